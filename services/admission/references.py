"""What jobs name by reference has to exist when they are submitted."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.secrets import SecretRepository, SecretWanted
from services.admission.submissions import Draft
from services.contracts.problems import FieldError, ProblemCode
from services.kit.problems import ProblemError


class References:
    """Checks the secrets that jobs name. Submissions without any do not touch the database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def check(self, draft: Draft) -> ProblemError | None:
        """Return a problem if a job names what its tenant does not have.

        A repeated submission is left to the commit, which knows its answer, whatever was deleted since.
        """
        secrets = [
            SecretWanted(at, job.spec.project, use.name)
            for at, job in enumerate(draft.jobs)
            for use in job.spec.secrets or ()
        ]
        if not secrets:
            return None
        async with self._engine.connect() as connection:
            missing = await SecretRepository(connection).missing(draft.entry.tenant_id, secrets)
            if not missing or (draft.key and await SecretRepository(connection).is_repeated(*draft.key)):
                return None
        errors = [_missing_secret(draft, at, name) for at, name in missing]
        return ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors[:50])


def _missing_secret(draft: Draft, at: int, name: str) -> FieldError:
    prefix = f"/jobs/{at}" if draft.entry.batch else ""
    number = next(n for n, use in enumerate(draft.jobs[at].spec.secrets or ()) if use.name == name)
    detail = f"There is no secret {name}; set it with `wattshift secrets set {name}`, or PUT /v1/secrets/{name}."
    return FieldError(pointer=f"{prefix}/secrets/{number}/name", detail=detail)
