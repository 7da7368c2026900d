"""The kind ``pools``: from a request, through ``core.policies.freesh``, to its answer."""

from __future__ import annotations

from optimizer_service.sources import Sources
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult, pools_result
from services.contracts.problems import ProblemCode
from services.core.domain.errors import DomainError
from services.core.domain.progress import Report, unreported
from services.core.policies.freesh.pool_planning import plan_pools
from services.kit.problems import ProblemError


async def resolve(request: PoolsRequest, sources: Sources) -> PoolsProblem:
    """Return the problem of a request, which contains everything."""
    problem = PoolsProblem.model_validate(request.model_dump())
    try:
        problem.in_core()
    except DomainError as error:
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
    return problem


def solve(problem: PoolsProblem, report: Report = unreported) -> PoolsResult:
    """Return the plan."""
    asked = problem.in_core()
    plan = plan_pools(
        asked,
        problem.solver,
        time_limit_s=problem.time_limit_s,
        relative_gap=problem.gap,
        incumbent=problem.incumbent_in_core(),
        report=report,
    )
    return pools_result(problem, asked, plan)
