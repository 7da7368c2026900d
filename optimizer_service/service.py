"""Use cases: submit, read and cancel solves."""

import asyncio

from optimizer_service.kinds import KINDS, SolveKind
from optimizer_service.repository.lengths import OUTCOME_FIELDS
from services.contracts.background import WorkProblem, WorkRecord, WorkState
from services.contracts.identity import Identity
from services.contracts.optimize import Solve, SolveList, SolveQuery, SolveSummary
from services.contracts.schema import Message
from services.contracts.serving import PLANNER
from services.contracts.solver import SolveOutcome
from services.kit.background.work_queue import WorkQueue, sha256
from services.kit.problems import not_found


class OptimizerService:
    """What callers may do with solves."""

    def __init__(self, work_queue: WorkQueue, plan_work_queue: WorkQueue) -> None:
        """Take the queue of tenants' solves, and that of the solves that plans await."""
        self._work_queue, self._plan_work_queue = work_queue, plan_work_queue

    async def submit(
        self, kind: SolveKind, request: Message, caller: Identity, idempotency_key: str | None
    ) -> tuple[SolveSummary, bool]:
        """Accept a solve, and return it with whether it is new; it may already have ended.

        The same key, or the same problem while it is stored, returns the same solve.

        Raises:
            ProblemError: 422 for a request that makes no sense or a key used for another body, 429 with too many
                solves pending.
        """

        async def resolve() -> WorkProblem:
            stored = await asyncio.to_thread(kind.problem_of, request)  # a large one takes a second: others wait
            return WorkProblem(stored, sha256(kind.name, stored), {"kind": kind.name})

        body_sha256 = sha256(kind.name, request.model_dump(mode="json"))
        work_queue = self._plan_work_queue if caller.key_id == PLANNER.key_id else self._work_queue
        work, is_new = await work_queue.submit(caller, idempotency_key, body_sha256, resolve)
        return _summary(work), is_new

    async def find(self, solve_id: str, caller: Identity) -> Solve:
        """Return a complete solve; ``ProblemError``: 404 if there is none of a known kind that the caller may see."""
        work = await self._work_queue.find(solve_id, caller)
        kind = KINDS.get(work.columns["kind"])
        if kind is None:  # such as ``carbon-bound``, of 0.1.0
            raise not_found("solve")
        return Solve(
            **dict(_summary(work)),
            problem=kind.problem.as_stored(work.problem),
            result=None if work.result is None else kind.result.as_stored(work.result),
        )

    async def page(self, query: SolveQuery, caller: Identity) -> SolveList:
        """Return one page of solves, newest first; ``ProblemError``: 422 for an invalid cursor."""
        also = {} if query.kind is None else {"kind": query.kind}
        page = {"cursor": query.cursor, "limit": query.limit, "states": query.state, "tenant": query.tenant}
        items, next_cursor = await self._work_queue.page(caller, **page, also=also, shown=_summary)
        return SolveList(items=items, next_cursor=next_cursor)

    async def cancel(self, solve_id: str, caller: Identity) -> SolveSummary:
        """Cancel a solve, once; ``ProblemError``: 404 if the caller sees none, 409 if it has ended otherwise."""
        return _summary(await self._work_queue.cancel(solve_id, caller))


def _summary(work: WorkRecord) -> SolveSummary:
    columns = work.columns
    outcome = {name: columns[name] for name in OUTCOME_FIELDS}
    return SolveSummary.of(
        work,
        kind=columns["kind"],
        solve_s=columns["solve_s"],
        progress=None if work.state is WorkState.QUEUED else columns["progress"],
        outcome=None if outcome["status"] is None else SolveOutcome.model_validate(outcome),
    )
