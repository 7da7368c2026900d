"""What jobs name by reference has to exist when they are submitted."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.secrets import SecretRepository, SecretWanted
from services.admission.repository.uploads import UploadRepository
from services.admission.submissions import Draft
from services.contracts.jobs import JobSpec
from services.contracts.problems import FieldError, ProblemCode
from services.kit.problems import ProblemError

NO_UPLOAD = "There is no complete upload with this SHA-256; upload it first, as `wattshift submit --upload` does."


class References:
    """Checks the secrets and uploads that jobs name. Submissions without any do not touch the database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def check(self, draft: Draft) -> ProblemError | None:
        """Return a problem if a job names what its tenant does not have. What it names is kept for it from now on."""
        secrets = [
            SecretWanted(at, job.spec.project, name)
            for at, job in enumerate(draft.jobs)
            if job.spec.secrets or job.spec.source
            for name in secret_places(job.spec)
        ]
        uploads = {job.spec.source.upload for job in draft.jobs if job.spec.source and job.spec.source.upload}
        if not secrets and not uploads:
            return None
        tenant_id = draft.entry.tenant_id
        async with self._engine.begin() as connection:
            missing = await SecretRepository(connection).missing(tenant_id, secrets) if secrets else []
            lacking = uploads - await UploadRepository(connection).use(tenant_id, uploads) if uploads else uploads
        if not missing and not lacking:
            return None
        errors = [_missing_secret(draft, at, name) for at, name in missing]
        errors += [
            FieldError(pointer=f"{_prefix(draft, at)}/source/upload", detail=NO_UPLOAD)
            for at, job in enumerate(draft.jobs)
            if job.spec.source and job.spec.source.upload in lacking
        ]
        return ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors[:50])


def _missing_secret(draft: Draft, at: int, name: str) -> FieldError:
    detail = f"There is no secret {name}; set it with `wattshift secrets set {name}`, or PUT /v1/secrets/{name}."
    return FieldError(pointer=_prefix(draft, at) + secret_places(draft.jobs[at].spec)[name], detail=detail)


def _prefix(draft: Draft, at: int) -> str:
    return f"/jobs/{at}" if draft.entry.batch else ""


def secret_places(spec: JobSpec) -> dict[str, str]:
    """Return the secrets that a job names, each with the pointer to where it does so first."""
    places = {use.name: f"/secrets/{number}/name" for number, use in reversed([*enumerate(spec.secrets or ())])}
    if spec.source and spec.source.git and spec.source.git.secret:
        places.setdefault(spec.source.git.secret, "/source/git/secret")
    return places
