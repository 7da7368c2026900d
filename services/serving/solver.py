"""Has the optimizer solve the problems of plans."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from services.contracts.background import WorkState
from services.contracts.identity import IDEMPOTENCY_HEADER
from services.contracts.optimize import Solve, SolveSummary
from services.contracts.partition import PartitionRequest, PartitionResult
from services.contracts.pools import PoolsRequest
from services.contracts.serving import PLANNER
from services.kit import traces
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

M = TypeVar("M", bound=BaseModel)

ENDED = (WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
CANCEL_WITHIN_S = 2.0


class NotSolvedError(Exception):
    """There was no answer in time."""


class PlanSolver:
    """Asks the optimizer for one solve at a time.

    A plan's id is the idempotency key of its solve: a request repeated after a crash gets the same solve.
    """

    def __init__(self, optimizer: ServiceClient) -> None:
        self._optimizer = optimizer
        self._solve_id: str | None = None

    async def solve(
        self, plan_id: str, request: PoolsRequest | PartitionRequest, within_s: float, kind: str = "pools"
    ) -> Solve:
        """Return the solve of a plan's problem once it has ended; wait while the optimizer does not answer.

        Raises:
            ProblemError: The problem is refused.
            NotSolvedError: There is no answer in time; the solve is cancelled.
        """
        with traces.span("plan.solve", plan_id=plan_id):
            try:
                async with asyncio.timeout(within_s):
                    accepted = await self._ask(
                        *("POST", f"/v1/optimize/{kind}", SolveSummary),
                        body=request,
                        headers={IDEMPOTENCY_HEADER: plan_id},
                        retry=True,
                    )
                    self._solve_id = accepted.id
                    pause_s = FIRST_PAUSE_S
                    while True:
                        solve = await self._ask("GET", f"/v1/optimize/{accepted.id}", Solve)
                        if solve.state in ENDED:
                            self._solve_id = None
                            return solve
                        await asyncio.sleep(pause_s)
                        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
            except TimeoutError as error:
                await self.cancel()
                raise NotSolvedError from error

    async def cancel(self) -> None:
        """Cancel the awaited solve, if there is one; if the optimizer does not answer, its time limit ends it."""
        if self._solve_id is None:
            return
        solve_id, self._solve_id = self._solve_id, None
        try:
            await self._optimizer.request(
                *("DELETE", f"/v1/optimize/{solve_id}"), identity=PLANNER, attempts=1, timeout_s=CANCEL_WITHIN_S
            )
        except ProblemError as error:
            if error.status != 409:  # it has ended
                log.warning("solve.not_cancelled", id=solve_id, error=str(error))

    async def _ask(
        self, method: str, path: str, answer: type[M], *, headers: dict[str, str] | None = None, **options: Any
    ) -> M:
        """Return the answer, waiting for as long as the optimizer is silent or full."""
        while True:
            try:
                return await self._optimizer.call(method, path, answer, headers=headers, identity=PLANNER, **options)
            except ProblemError as error:
                if error.status < 500 and error.status != 429:
                    raise
                log.warning("optimizer.waiting", error=str(error))
                await asyncio.sleep(LONGEST_PAUSE_S)


Answer = PartitionResult | str  #: What a search found, or why it found nothing
Search = Callable[[str, PartitionRequest], Awaitable[Answer]]
"""Searches for the plan of an id; asked again for the same id it is the same search."""


def search_by(optimizer: ServiceClient, within_s: float) -> Search:
    """Return a function that searches with the optimizer, for at most ``within_s`` each time."""

    async def search(plan_id: str, request: PartitionRequest) -> Answer:
        try:
            solve = await PlanSolver(optimizer).solve(plan_id, request, within_s, "partition")
        except NotSolvedError:
            return f"There was no answer within {within_s:.0f} s of solving."
        except ProblemError as error:
            return error.detail
        if solve.failure is not None:
            return solve.failure.detail
        if solve.state is WorkState.CANCELLED or not isinstance(solve.result, PartitionResult):
            return f"The solve {solve.id} was cancelled."
        return solve.result

    return search
