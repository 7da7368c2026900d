"""Use cases on existing jobs and arrays: list, get, cancel, hold, release."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.access import write_audit
from services.admission.repository.arrays import ArrayRepository
from services.admission.repository.jobs import JobRepository
from services.admission.steering import Command, decide
from services.admission.submissions import Found
from services.contracts.identity import Identity
from services.contracts.jobs import Job, JobArray, JobArrayList, JobCounts, JobList
from services.contracts.queries import ArrayQuery, JobFilters, JobQuery
from services.core.domain.errors import TransitionError
from services.kit.problems import found
from services.kit.projects import check_project, check_tenant
from services.kit.routes import one_page, read_cursor

Q = TypeVar("Q", bound=JobFilters)
JOB_ID = r"job_[0-9a-z]{26}"


def visible(query: Q, identity: Identity, id_pattern: str) -> Q:
    """Return a query for a list with the tenant and project that its caller sees, and the cursor's id.

    Raises:
        ProblemError: 403 if it names a tenant or project that is not the caller's, 422 for an invalid cursor.
    """
    seen = {
        "tenant": check_tenant(query.tenant, identity),
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
            listed = await JobRepository(connection).page(visible(query, identity, JOB_ID))
        items, following = one_page(listed, query.limit, lambda job: job.id)
        return JobList(items=items, next_cursor=following)

    async def counts(self, identity: Identity) -> JobCounts:
        """Return how many jobs have not ended."""
        async with self._engine.connect() as connection:
            return await JobRepository(connection).counts(identity)

    async def get(self, identity: Identity, job_id: str) -> Job:
        """Return a job; one that the caller may not see is treated as if it did not exist."""
        async with self._engine.connect() as connection:
            return found(await JobRepository(connection).find(job_id, identity), "job")

    async def steer(self, identity: Identity, job_id: str, command: Command) -> Job:
        """Cancel, hold or release a job, or forget its checkpoint; repeating a command changes nothing.

        The row is locked meanwhile. A scheduler that starts the job at the same time either comes first, and is then
        asked to stop the gang, or comes second, and then finds that the job is no longer queued.
        """
        async with self._engine.begin() as connection:
            repository = JobRepository(connection)
            job = found(await repository.lock(job_id, identity), "job")
            decision = decide(command, job)
            if decision is not None:
                await repository.change(job_id, decision)
                data: dict[str, Any] = {"by": identity.key_id}
                if state := decision.values.get("state"):
                    data["state"] = state
                if "bound_to" in decision.values:
                    data["nodes"] = [*job.bound_to]
                await repository.add_event(job_id, job.tenant_id, decision.event, **data)
                if job.tenant_id != identity.tenant_id:
                    await write_audit(connection, identity, decision.event, job_id, tenant=job.tenant_id)
        if decision is not None:
            self._on_change()
        return await self.get(identity, job_id)


ARRAY_ID = r"array_[0-9a-z]{26}"
ATTEMPTS = 4
DEADLOCK = "40P01"  #: PostgreSQL's code: tasks were locked in another order, by a scheduler that applies a plan


class Arrays:
    """Reads arrays, and cancels, holds and releases their tasks."""

    def __init__(self, engine: AsyncEngine, on_change: Callable[[], None]) -> None:
        self._engine, self._on_change = engine, on_change

    async def page(self, identity: Identity, query: ArrayQuery) -> JobArrayList:
        """Return one page, newest first."""
        async with self._engine.connect() as connection:
            listed = await ArrayRepository(connection).page(visible(query, identity, ARRAY_ID))
        items, following = one_page(listed, query.limit, lambda array: array.id)
        return JobArrayList(items=items, next_cursor=following)

    async def get(self, identity: Identity, array_id: str) -> JobArray:
        """Return an array; one that the caller may not see is treated as if it did not exist."""
        async with self._engine.connect() as connection:
            return found(await ArrayRepository(connection).find(array_id, identity), "array")

    async def steer(self, identity: Identity, array_id: str, command: Command) -> JobArray:
        """Cancel, hold or release all tasks in one transaction, each as ``steering`` decides for its state.

        Tasks for which the command is not possible, such as those that have ended, stay as they are.

        Raises:
            TransitionError: the command is possible for none of the tasks.
        """
        array = await self.get(identity, array_id)
        for attempt in range(ATTEMPTS):
            try:
                if await self._steer(identity, array, command):
                    self._on_change()
                break
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) != DEADLOCK or attempt == ATTEMPTS - 1:
                    raise
        return await self.get(identity, array_id)

    async def _steer(self, identity: Identity, array: JobArray, command: Command) -> int:
        """Return how many tasks were changed."""
        changed = possible = 0
        said: TransitionError | None = None
        async with self._engine.begin() as connection:
            repository = ArrayRepository(connection)
            for alike in await repository.lock_tasks(array.id):
                try:
                    decision = decide(command, alike)
                except TransitionError as error:
                    said = error
                    continue
                possible += 1
                if decision is not None:
                    changed += await repository.change_tasks(array.id, alike, decision, identity.key_id)
            if not possible and said is not None:
                raise TransitionError(f"No task of the array can be changed so: {said}")
            if changed and array.tenant_id != identity.tenant_id:
                await write_audit(connection, identity, f"array.{command}", array.id, tenant=array.tenant_id)
        return changed

    async def find(self, tenant_id: str, project: str | None, words: AbstractSet[str]) -> Found:
        """Return the ids of the tenant's jobs and arrays that each word may mean: as id, name, number or id prefix.

        Only those of ``project``, or of all projects if it is None.
        """
        async with self._engine.connect() as connection:
            repository = ArrayRepository(connection)
            ids = {word: [word] for word in await repository.with_ids(tenant_id, project, words)}
            return ids | await repository.named(tenant_id, project, words - ids.keys())
