"""Many reports, one transaction: while one is being stored, reports of other nodes gather for the next."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from services.kit.logging import Log

log = Log(__name__)

MOST = 128
ENOUGH, GATHER_S = 16, 0.02
"""With fewer reports waiting than these, the next transaction waits until there are, or for this time: more
share it, and each costs telemetry and the database less. A report that finds nothing under way never waits."""
_ALONE: Any = object()

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batches(Generic[Item, Answer]):
    """Stores reports as they arrive, one at a time for each node."""

    def __init__(
        self,
        store: Callable[[Mapping[str, Item], bool], Awaitable[Mapping[str, Answer]]],
        unknown: Callable[[], Exception],
    ) -> None:
        """Take what stores reports.

        Args:
            store: Stores reports by node, all or none, and returns the answers to those it has stored. It waits for a
                node only if told to: for one whose report comes alone, as there was no answer to it among others.
            unknown: Returns what is raised if there is none then.
        """
        self._store, self._unknown = store, unknown
        self._waiting: list[tuple[str, Item, asyncio.Future[Answer]]] = []
        self._enough = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def add(self, node_id: str, item: Item) -> Answer:
        """Have a report stored, and return the answer to it."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((node_id, item, future))
        if len(self._waiting) >= ENOUGH:
            self._enough.set()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        if (answer := await future) is not _ALONE:
            return answer
        answers = await self._store({node_id: item}, True)
        if node_id not in answers:
            raise self._unknown()
        return answers[node_id]

    async def _run(self) -> None:
        try:
            while batch := self._next():
                answers: Mapping[str, Any] = {}
                try:
                    answers = await self._store({node_id: item for node_id, item, _ in batch}, False)
                except Exception as error:
                    log.warning("batch.split", reports=len(batch), error=str(error))
                for node_id, _, future in batch:
                    if not future.done():  # whoever asked may have gone
                        future.set_result(answers.get(node_id, _ALONE))
                if 0 < len(self._waiting) < ENOUGH:
                    self._enough.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(GATHER_S):
                            await self._enough.wait()
        finally:
            self._running = None

    def _next(self) -> Sequence[tuple[str, Item, asyncio.Future[Answer]]]:
        batch: dict[str, tuple[str, Item, asyncio.Future[Answer]]] = {}
        left: list[tuple[str, Item, asyncio.Future[Answer]]] = []
        for each in self._waiting:
            if len(batch) < MOST and each[0] not in batch:
                batch[each[0]] = each
            else:
                left.append(each)
        self._waiting = left
        return [*batch.values()]
