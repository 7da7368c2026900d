"""Secrets and uploads that jobs refer to must exist when the jobs are submitted."""

from collections import defaultdict

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.secrets import SecretRepository, SecretWanted
from services.admission.repository.uploads import UploadRepository
from services.admission.submissions import Draft
from services.contracts.codes import ProblemCode
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError
from services.kit.references import missing_references, named_upload, secret_places


class References:
    """Checks the secrets and uploads that jobs name. Submissions without any do not touch the database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def check(self, draft: Draft) -> ProblemError | None:
        """Return a problem if a job names a secret or upload that its tenant lacks.

        Uploads that it names are kept from now on.
        """
        secrets = [
            SecretWanted(at, job.spec.project, name)
            for at, job in enumerate(draft.jobs)
            if job.spec.secrets or job.spec.source
            for name in secret_places(job.spec)
        ]
        uploads = {upload for job in draft.jobs if (upload := named_upload(job.spec))}
        if not secrets and not uploads:
            return None
        tenant_id = draft.entry.tenant_id
        async with self._engine.begin() as connection:
            missing = await SecretRepository(connection).missing(tenant_id, secrets) if secrets else []
            lacking = uploads - await UploadRepository(connection).use(tenant_id, uploads) if uploads else uploads
        if not missing and not lacking:
            return None
        names: defaultdict[int, list[str]] = defaultdict(list)
        for at, name in missing:
            names[at].append(name)
        errors: list[FieldError] = []
        for at, job in enumerate(draft.jobs):
            errors += missing_references(job.spec, names[at], lacking, f"/jobs/{at}" if draft.entry.batch else "")
        return ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors[:50])
