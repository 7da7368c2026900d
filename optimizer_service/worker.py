"""What a worker does with the id of a solve: claim its row, solve, write the answer while the claim stands.

The solve runs in the main thread, where Celery's soft time limit can reach it. Everything that talks to the database
runs in an event loop on a thread of its own, so that the claim is renewed while a solver computes for minutes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from celery.exceptions import SoftTimeLimitExceeded
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service.kinds import KINDS
from optimizer_service.repository import SolveRepository, SolveRow
from services.contracts.optimize import SolveFailure, SolveFailureCode, SolveOutcome
from services.core.domain.errors import DomainError
from services.db.engine import is_connection_error
from services.kit.celery import leave_process
from services.kit.ids import new_id
from services.kit.logging import Log

log = Log(__name__)

R = TypeVar("R")

DATABASE_PATIENCE_S = 60.0
"""How long an answer is held on to while the database is away; after that the solve is done anew."""


class SolveWorker:
    """Solves one solve at a time, in whichever process of the pool made it."""

    def __init__(
        self, engine: AsyncEngine, lease_s: float, *, on_lost_claim: Callable[[], None] = leave_process
    ) -> None:
        self._engine = engine
        self._repository = SolveRepository(engine)
        self._lease_s = lease_s
        self._on_lost_claim = on_lost_claim
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="claims", daemon=True)
        self._thread.start()

    def run(self, solve_id: str) -> None:
        """Solve, unless another worker does or did, or nobody wants it any more."""
        claim = new_id("claim")
        row = self._call(lambda: self._repository.claim(solve_id, claim, self._lease_s))
        if row is None:
            log.info("solve.skipped", solve=solve_id)
            return
        log.info("solve.started", solve=solve_id, kind=row.kind, attempt=row.attempts)
        keeper = asyncio.run_coroutine_threadsafe(self._keep(solve_id, claim), self._loop)
        began_s = time.monotonic()
        try:
            answer = _answer(row)
        except SoftTimeLimitExceeded:
            answer = SolveFailure(code=SolveFailureCode.TIME_LIMIT, detail="It ran past its time limit.")
        finally:
            keeper.cancel()
        self._write(solve_id, claim, answer, time.monotonic() - began_s)

    def close(self) -> None:
        """Give back the connections and end the thread."""
        asyncio.run_coroutine_threadsafe(self._engine.dispose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _write(self, solve_id: str, claim: str, answer: SolveOutcome | SolveFailure, solve_s: float) -> None:
        if isinstance(answer, SolveFailure):
            stood = self._call(lambda: self._repository.fail(solve_id, claim, answer, solve_s))
            log.warning("solve.failed", solve=solve_id, code=answer.code, detail=answer.detail, written=stood)
            return
        document = answer.model_dump(mode="json")
        stood = self._call(lambda: self._repository.succeed(solve_id, claim, document, solve_s))
        log.info(
            "solve.ended",
            solve=solve_id,
            status=answer.status,
            solver=answer.solver,
            s=round(solve_s, 3),
            written=stood,
        )

    async def _keep(self, solve_id: str, claim: str) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 5)
            try:
                stands = await self._repository.renew(solve_id, claim, self._lease_s)
            except Exception as error:  # the answer is written only if the claim still stands by then
                log.warning("claim.not_renewed", solve=solve_id, error=str(error) or type(error).__name__)
                continue
            if not stands:
                log.info("solve.stopped", solve=solve_id)
                self._on_lost_claim()
                return

    def _call(self, query: Callable[[], Awaitable[R]]) -> R:
        """Run a query on the loop's thread, again and again while the database is away."""
        deadline_s = time.monotonic() + DATABASE_PATIENCE_S
        while True:
            try:
                return asyncio.run_coroutine_threadsafe(_awaited(query), self._loop).result()
            except Exception as error:
                if not is_connection_error(error) or time.monotonic() > deadline_s:
                    raise
                log.warning("database.waiting", error=str(error) or type(error).__name__)
                time.sleep(0.5)


async def _awaited(query: Callable[[], Awaitable[R]]) -> R:
    return await query()


def _answer(row: SolveRow) -> SolveOutcome | SolveFailure:
    kind = KINDS.get(row.kind)
    if kind is None:
        detail = f"This worker knows no kind of solve called {row.kind}."
        return SolveFailure(code=SolveFailureCode.INVALID_PROBLEM, detail=detail)
    try:
        return kind.solve(kind.problem.model_validate(row.problem))
    except (DomainError, ValidationError) as error:
        return SolveFailure(code=SolveFailureCode.INVALID_PROBLEM, detail=str(error))
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        log.exception("solve.broke")
        return SolveFailure(code=SolveFailureCode.INTERNAL, detail=f"The solve broke off: {type(error).__name__}.")
