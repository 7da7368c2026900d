"""The kind ``partition``: from a request, through ``core.policies.clover``, to its answer."""

from __future__ import annotations

from optimizer_service.sources import Sources
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult, solve_partition
from services.contracts.problems import ProblemCode
from services.core.domain.errors import DomainError
from services.core.domain.progress import Report, unreported
from services.core.policies.clover.partition import checked
from services.kit.problems import ProblemError


async def resolve(request: PartitionRequest, sources: Sources) -> PartitionProblem:
    """Return the problem of a request, which contains everything."""
    problem = PartitionProblem.model_validate(request.model_dump())
    try:
        checked(*problem.in_core())
    except DomainError as error:
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
    return problem


def solve(problem: PartitionProblem, report: Report = unreported) -> PartitionResult:
    """Return the configurations."""
    return solve_partition(problem, report)
