"""Use cases on existing jobs: list, get, cancel, hold, release."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.jobs import JobRepository, LockedJob
from services.admission.steering import Command, Decision, decide
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.jobs import Job, JobCounts, JobList
from services.contracts.queries import JobFilters, JobQuery
from services.kit.cursors import one_page, read_cursor
from services.kit.problems import ProblemError, not_found
from services.kit.projects import check_project

Q = TypeVar("Q", bound=JobFilters)
JOB_ID = r"job_[0-9a-z]{26}"


def visible_tenant(identity: Identity) -> str | None:
    """Return the tenant whose jobs the caller may see; None means all tenants."""
    return None if identity.is_operator else identity.tenant_id


def visible(query: Q, identity: Identity, what: str, id_pattern: str) -> Q:
    """Return a query for a list of ``what`` with the tenant and project that its caller sees, and the cursor's id.

    Raises:
        ProblemError: 403 if it names a tenant or project that is not the caller's, 422 for an invalid cursor.
    """
    if not identity.is_operator and query.tenant not in (None, identity.tenant_id):
        raise ProblemError(403, ProblemCode.FORBIDDEN, f"Only an operator sees the {what} of other tenants.")
    seen = {
        "tenant": visible_tenant(identity) or query.tenant,
        "project": check_project(query.project, identity.project),
        "cursor": read_cursor(query.cursor, id_pattern),
    }
    return query.model_copy(update=seen)


class Jobs:
    """Reads jobs, and cancels, holds and releases them."""

    def __init__(self, engine: AsyncEngine, on_change: Callable[[], None]) -> None:
        self._engine, self._on_change = engine, on_change

    async def page(self, identity: Identity, query: JobQuery) -> JobList:
        """Return one page, newest first."""
        async with self._engine.connect() as connection:
            found = await JobRepository(connection).page(visible(query, identity, "jobs", JOB_ID))
        items, following = one_page(found, query.limit, lambda job: job.id)
        return JobList(items=items, next_cursor=following)

    async def counts(self, identity: Identity) -> JobCounts:
        """Return how many jobs have not ended."""
        async with self._engine.connect() as connection:
            return await JobRepository(connection).counts(identity)

    async def get(self, identity: Identity, job_id: str) -> Job:
        """Return a job; one that the caller may not see is treated as if it did not exist."""
        async with self._engine.connect() as connection:
            job = await JobRepository(connection).find(job_id, identity)
        if job is None:
            raise not_found("job")
        return job

    async def steer(self, identity: Identity, job_id: str, command: Command) -> Job:
        """Cancel, hold or release a job, or forget its checkpoint; repeating a command changes nothing.

        The row is locked meanwhile. A scheduler that starts the job at the same time either comes first, and is then
        asked to stop the gang, or comes second, and then finds that the job is no longer queued.
        """
        async with self._engine.begin() as connection:
            repository = JobRepository(connection)
            job = await repository.lock(job_id, identity)
            if job is None:
                raise not_found("job")
            decision = decide(
                command,
                job.state,
                cancel_requested=job.cancel_requested,
                hold_requested=job.hold_requested,
                is_bound=bool(job.bound_to),
            )
            if decision is not None:
                await self._apply(repository, identity, job_id, job, decision)
        if decision is not None:
            self._on_change()
        return await self.get(identity, job_id)

    @staticmethod
    async def _apply(
        repository: JobRepository, identity: Identity, job_id: str, job: LockedJob, decision: Decision
    ) -> None:
        await repository.change(job_id, decision)
        data: dict[str, Any] = {"by": identity.key_id}
        if state := decision.values.get("state"):
            data["state"] = state
        if "bound_to" in decision.values:
            data["nodes"] = [*job.bound_to]
        await repository.add_event(job_id, job.tenant_id, decision.event, **data)
        if job.tenant_id != identity.tenant_id:
            await repository.audit(identity, decision.event, job_id, tenant=job.tenant_id)
