"""The kind ``allocation``: from a request, through ``core.policies.allocation``, to its answer."""

from __future__ import annotations

from optimizer_service.sources import Sources
from services.contracts.allocation import AllocationProblem, AllocationRequest, AllocationResult, solve_allocation
from services.contracts.problems import ProblemCode
from services.core.domain.errors import DomainError
from services.core.domain.progress import Report, unreported
from services.kit.problems import ProblemError


async def resolve(request: AllocationRequest, sources: Sources) -> AllocationProblem:
    """Return the problem of a request, which contains everything."""
    problem = AllocationProblem.model_validate(request.model_dump())
    try:
        problem.in_core()
    except DomainError as error:
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
    return problem


def solve(problem: AllocationProblem, report: Report = unreported) -> AllocationResult:
    """Return who gets what."""
    return solve_allocation(problem, report)
