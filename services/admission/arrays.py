"""Use cases on arrays of jobs: list, get, and cancel, hold or release all tasks together."""

from collections.abc import Callable, Collection

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.dependencies import Found
from services.admission.jobs import visible
from services.admission.repository.arrays import ArrayRepository
from services.admission.steering import Command, decide
from services.contracts.identity import Identity
from services.contracts.jobs import JobArray, JobArrayList
from services.contracts.queries import ArrayQuery
from services.core.domain.errors import TransitionError
from services.kit.cursors import one_page
from services.kit.problems import not_found

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
            found = await ArrayRepository(connection).page(visible(query, identity, "arrays", ARRAY_ID))
        items, following = one_page(found, query.limit, lambda array: array.id)
        return JobArrayList(items=items, next_cursor=following)

    async def get(self, identity: Identity, array_id: str) -> JobArray:
        """Return an array; one that the caller may not see is treated as if it did not exist."""
        async with self._engine.connect() as connection:
            found = await ArrayRepository(connection).find(array_id, identity)
        if found is None:
            raise not_found("array")
        return found

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
                    decision = decide(
                        command,
                        alike.state,
                        cancel_requested=alike.cancel_requested,
                        hold_requested=alike.hold_requested,
                    )
                except TransitionError as error:
                    said = error
                    continue
                possible += 1
                if decision is not None:
                    changed += await repository.change_tasks(array.id, alike, decision, identity.key_id)
            if not possible and said is not None:
                raise TransitionError(f"No task of the array can be changed so: {said}")
            if changed and array.tenant_id != identity.tenant_id:
                await repository.audit(identity, f"array.{command}", array.id, tenant=array.tenant_id)
        return changed

    async def find(self, tenant_id: str, project: str | None, words: Collection[str]) -> Found:
        """Return the ids of the tenant's jobs and arrays that each word may mean: as id, name, number or id prefix.

        Only those of ``project``, or of all projects if it is None.
        """
        async with self._engine.connect() as connection:
            repository = ArrayRepository(connection)
            found = {word: [word] for word in await repository.with_ids(tenant_id, project, words)}
            for word in words:
                if word not in found:
                    found[word] = await repository.named(tenant_id, project, word)
            return found
