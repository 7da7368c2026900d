"""Every kind of solve. A new kind is a function of its problem, plus one entry here."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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

RequestT = TypeVar("RequestT", bound=Message)
ProblemT = TypeVar("ProblemT", bound=Message)
ResultT = TypeVar("ResultT", bound=SolveOutcome)


@dataclass(frozen=True)
class SolveKind(Generic[RequestT, ProblemT, ResultT]):
    """One kind of solve: ``POST /v1/optimize/{name}``."""

    name: str  #: Its name in the URL and in the table
    summary: str  #: Its summary in the API's description
    request: type[RequestT]  #: What a caller sends
    problem: type[ProblemT]  #: What is stored and solved; it contains everything needed
    result: type[ResultT]  #: What is returned
    resolve: Callable[[RequestT], Awaitable[ProblemT]]
    """Makes the problem from a request; raises ``ProblemError`` for one that makes no sense."""
    solve: Callable[[ProblemT, Report], ResultT]
    """Pure: returns the result of a problem and reports its progress. Equal problems have equal results, time limits
    aside."""


def _checked(kind: type[ProblemT], check: Callable[[ProblemT], object]) -> Callable[[Message], Awaitable[ProblemT]]:

    def made(request: Message) -> ProblemT:
        problem = kind.model_validate(request.model_dump())
        try:
            check(problem)
        except DomainError as error:
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
        return problem

    async def resolve(request: Message) -> ProblemT:
        return await asyncio.to_thread(made, request)  # a large one takes a second, and others are waiting

    return resolve


KINDS: Mapping[str, SolveKind[Any, Any, Any]] = {
    kind.name: kind
    for kind in (
        SolveKind(
            name="pools",
            summary="Plan LLM instances by place, mode and class of requests.",
            request=PoolsRequest,
            problem=PoolsProblem,
            result=PoolsResult,
            resolve=_checked(PoolsProblem, pool_problem),
            solve=solve_pools,
        ),
        SolveKind(
            name="partition",
            summary="Choose model variants and the slices of GPUs they run on.",
            request=PartitionRequest,
            problem=PartitionProblem,
            result=PartitionResult,
            resolve=_checked(PartitionProblem, lambda problem: checked(*demands_of(problem))),
            solve=solve_partition,
        ),
        SolveKind(
            name="allocation",
            summary="Give jobs GPUs, power limits or clocks, and places, within a power limit.",
            request=AllocationRequest,
            problem=AllocationProblem,
            result=AllocationResult,
            resolve=_checked(AllocationProblem, given),
            solve=solve_allocation,
        ),
    )
}
