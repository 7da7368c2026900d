"""Has the optimizer search for a fleet's plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.contracts.background import WorkState
from services.contracts.partition import PartitionRequest, PartitionResult
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError
from services.serving.solver import NotSolvedError, PlanSolver

Answer = PartitionResult | str
"""What a search found, or why it found nothing."""
Search = Callable[[str, PartitionRequest], Awaitable[Answer]]
"""Searches for the plan of an id; asked again for the same id it is the same search."""


def search_by(optimizer: ServiceClient, within_s: float) -> Search:
    """Return searches in the optimizer, each with so much time."""

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
