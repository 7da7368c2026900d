"""Every kind of solve. A new kind is a function of its problem, plus one entry here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.contracts.allocation import AllocationProblem, AllocationRequest, AllocationResult
from services.contracts.codes import ProblemCode
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult
from services.contracts.schema import Message
from services.contracts.solver import SolveOutcome
from services.core.domain.errors import DomainError
from services.core.domain.solving import Report
from services.core.policies.clover.partition import checked
from services.kit.problems import ProblemError
from services.solving.allocation import given, solve_allocation
from services.solving.partition import demands_of, solve_partition
from services.solving.pools import pool_problem, solve_pools


@dataclass(frozen=True)
class SolveKind:
    """One kind of solve: ``POST /v1/optimize/{name}``."""

    name: str  #: Its name in the URL and in the table
    summary: str  #: Its summary in the API's description
    request: type[Message]  #: What a caller sends
    problem: type[Any]  #: What is stored and solved: the request, with its kind
    result: type[Any]  #: What is returned
    check: Callable[[Any], object]  #: Raises ``DomainError`` for a problem that makes no sense
    solve: Callable[[Any, Report], SolveOutcome]
    """Pure: returns the result of a problem and reports its progress. Equal problems have equal results, time limits
    aside."""

    def problem_of(self, request: Message) -> dict[str, Any]:
        """Return the problem of a request, as it is stored; ``ProblemError``: 422 for one that makes no sense."""
        problem = self.problem.model_validate(request.model_dump())
        try:
            self.check(problem)
        except DomainError as error:
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
        return problem.model_dump(mode="json")


KINDS: Mapping[str, SolveKind] = {
    kind.name: kind
    for kind in (
        SolveKind(
            name="pools",
            summary="Plan LLM instances by place, mode and class of requests.",
            request=PoolsRequest,
            problem=PoolsProblem,
            result=PoolsResult,
            check=pool_problem,
            solve=solve_pools,
        ),
        SolveKind(
            name="partition",
            summary="Choose model variants and the slices of GPUs they run on.",
            request=PartitionRequest,
            problem=PartitionProblem,
            result=PartitionResult,
            check=lambda problem: checked(*demands_of(problem)),
            solve=solve_partition,
        ),
        SolveKind(
            name="allocation",
            summary="Give jobs GPUs, power limits or clocks, and places, within a power limit.",
            request=AllocationRequest,
            problem=AllocationProblem,
            result=AllocationResult,
            check=given,
            solve=solve_allocation,
        ),
    )
}
