"""What a worker does with an id: claim it, do the work, and write the answer if the claim is still valid.

The work runs in the main thread, where Celery's soft time limit interrupts it. All queries run in an event loop on a
separate thread, so that the claim is renewed while a solver computes for minutes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded  # pyright: ignore[reportMissingTypeStubs]
from pydantic import ValidationError

from services.contracts.background import WorkFailure, WorkFailureCode, WorkRecord
from services.core.domain.errors import DomainError, PolicyConfigError
from services.kit.background.queue import WorkStore
from services.kit.celery import leave_process
from services.kit.ids import new_id
from services.kit.logging import Log

log = Log(__name__)

R = TypeVar("R")

PROGRESS_S = 1.0  #: Progress is written no oftener than this

DATABASE_PATIENCE_S = 60.0
"""How long an answer is kept while the database is unreachable; after that the work is done again."""


class Worker:
    """Does one piece of work at a time, in the worker process that created it."""

    def __init__(
        self,
        what: str,
        store: WorkStore,
        answer: Callable[[WorkRecord, Worker], Any],
        *,
        lease_s: float,
        took: str,
        is_away: Callable[[BaseException], bool],
        on_lost_claim: Callable[[], None] = leave_process,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a worker.

        Args:
            what: Name of one piece of work, for the log.
            answer: Does the work: takes the claimed work and this worker, and returns the result as JSON. It raises
                ``DomainError``, ``PolicyConfigError`` or ``ValidationError`` for an invalid problem.
            lease_s: How long the claim is valid without being renewed.
            took: Column for how long the work took, in seconds.
            is_away: Whether an exception means that the database does not answer.
            on_lost_claim: Ends the work when its claim has been lost and its result is no longer needed.
            on_written: Called in the main thread once an answer was written, or could not be.
        """
        self.progress: dict[str, Any] = {}
        """Columns to write with the next renewal of the claim; the work replaces them as it proceeds, as often as it
        likes."""
        self._what, self._store, self._answer = what, store, answer
        self._lease_s, self._took, self._is_away = lease_s, took, is_away
        self._on_lost_claim, self._on_written = on_lost_claim, on_written
        self._claimed: tuple[str, str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="claims", daemon=True)
        self._thread.start()

    def run(self, message: str) -> None:
        """Do the work that a message names, or in its place that of a tenant who has waited longer: each has its own.

        None is done if another worker is doing or has done it, or it was cancelled.
        """
        work_id, claim = self.ask(lambda: self._store.fairest(message)), new_id("claim")
        work = self.ask(lambda: self._store.claim(work_id, claim, self._lease_s))
        if work is None:
            log.info(f"{self._what}.skipped", id=work_id)
            return
        log.info(f"{self._what}.started", id=work_id, attempt=work.attempts)
        self.progress = {}
        self._claimed = work_id, claim
        renewal = asyncio.run_coroutine_threadsafe(self._renew(work_id, claim), self._loop)
        began_s = time.monotonic()
        try:
            answer = self._answer_or_failure(work)
        except SoftTimeLimitExceeded:
            answer = WorkFailure(code=WorkFailureCode.TIME_LIMIT, detail="It exceeded its time limit.")
        finally:
            renewal.cancel()
        try:
            self._write(work_id, claim, answer, time.monotonic() - began_s)
        finally:
            self._on_written()

    def ask(self, query: Callable[[], Awaitable[R]]) -> R:
        """Run a query on the event loop's thread, and repeat it while the database is unreachable."""
        deadline_s = time.monotonic() + DATABASE_PATIENCE_S
        while True:
            try:
                return asyncio.run_coroutine_threadsafe(_awaited(query), self._loop).result()
            except Exception as error:
                if not self._is_away(error) or time.monotonic() > deadline_s:
                    raise
                log.warning("database.waiting", error=str(error) or type(error).__name__)
                time.sleep(0.5)

    def save(self, **columns: Any) -> bool:
        """Write columns of the current row, for the worker that continues if this one dies.

        Returns:
            Whether the claim is still valid; if it is not, nothing is written.
        """
        assert self._claimed is not None, "there is no current work"
        work_id, claim = self._claimed
        return self.ask(lambda: self._store.renew(work_id, claim, self._lease_s, **columns))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last``, which closes the connections, and end the thread."""
        asyncio.run_coroutine_threadsafe(last, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _answer_or_failure(self, work: WorkRecord) -> Any:
        try:
            return self._answer(work, self)
        except (DomainError, PolicyConfigError, ValidationError) as error:
            return WorkFailure(code=WorkFailureCode.INVALID_PROBLEM, detail=str(error))
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            log.exception(f"{self._what}.broke")
            detail = f"The {self._what} broke off: {type(error).__name__}."
            return WorkFailure(code=WorkFailureCode.INTERNAL, detail=detail)

    def _write(self, work_id: str, claim: str, answer: Any, took_s: float) -> None:
        columns = {**self.progress, self._took: took_s}
        if isinstance(answer, WorkFailure):
            stood = self.ask(lambda: self._store.fail(work_id, claim, answer, **columns))
            log.warning(f"{self._what}.failed", id=work_id, code=answer.code, detail=answer.detail, written=stood)
            return
        stood = self.ask(lambda: self._store.succeed(work_id, claim, answer, **columns))
        log.info(f"{self._what}.ended", id=work_id, s=round(took_s, 3), written=stood)

    async def _renew(self, work_id: str, claim: str) -> None:
        """Renew the claim after a fifth of the lease, or sooner if there is new progress to write."""
        due_s = self._lease_s / 5
        look_s = min(PROGRESS_S, due_s)
        waited_s, written = 0.0, dict[str, Any]()
        while True:
            await asyncio.sleep(look_s)
            waited_s += look_s
            progress = self.progress
            if waited_s < due_s and progress == written:
                continue
            waited_s, written = 0.0, progress
            try:
                stands = await self._store.renew(work_id, claim, self._lease_s, **progress)
            except Exception as error:  # the answer is written only if the claim is still valid by then
                log.warning("claim.not_renewed", id=work_id, error=str(error) or type(error).__name__)
                continue
            if not stands:
                log.info(f"{self._what}.stopped", id=work_id)
                self._on_lost_claim()
                return


async def _awaited(query: Callable[[], Awaitable[R]]) -> R:
    return await query()
