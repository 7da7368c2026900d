"""Long solves: requests to the optimizer, their state and their results."""

from typing import Annotated

from pydantic import Field

from services.contracts.allocation import AllocationProblem, AllocationResult
from services.contracts.background import WorkFailure, WorkState
from services.contracts.partition import PartitionProblem, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsResult
from services.contracts.queries import PageQuery
from services.contracts.schema import Instant, Message, Name, Page, many, maybe, said
from services.contracts.solver import SolveOutcome, SolveProgress

Problem = Annotated[PoolsProblem | PartitionProblem | AllocationProblem, Field(discriminator="kind")]
Result = Annotated[PoolsResult | PartitionResult | AllocationResult, Field(discriminator="kind")]


class SolveSummary(Message):
    """A solve without its problem and its result."""

    id: str
    kind: str
    tenant_id: str
    state: WorkState
    submitted_at: Instant
    started_at: Instant | None = maybe("When a worker last started it.")
    ended_at: Instant | None = None
    attempts: int = said("How often a worker started it; more than once after a crash.", default=0)
    solve_s: float | None = maybe("Wall-clock time of the solve.")
    progress: SolveProgress | None = maybe("Null before a worker starts it; written at most once a second.")
    outcome: SolveOutcome | None = None
    failure: WorkFailure | None = None


class Solve(SolveSummary):
    """A solve with its problem and its result."""

    problem: Problem
    result: Result | None = None


class SolveList(Page[SolveSummary]):
    """One page of solves, newest first."""


class SolveQuery(PageQuery):
    """Which solves to list, newest first."""

    state: list[WorkState] = many("Solves in any of these states; repeatable.")
    kind: Name | None = None
    tenant: Name | None = maybe("For operators: only this tenant's. Users always see only their own.")
