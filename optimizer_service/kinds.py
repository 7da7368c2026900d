"""Every kind of solve. A new kind is a function of its problem, plus one entry here."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.contracts.allocation import AllocationProblem, AllocationRequest, AllocationResult
from services.contracts.carbon import Clock, IntensityForecast
from services.contracts.codes import ProblemCode
from services.contracts.optimize import CarbonBoundProblem, CarbonBoundRequest, CarbonBoundResult
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult
from services.contracts.problems import FieldError
from services.contracts.schema import Message
from services.contracts.solver import SolveOutcome
from services.core.domain.carbon import Signal
from services.core.domain.errors import DomainError
from services.core.domain.solving import Report
from services.core.policies.clover.partition import checked
from services.kit.carbon import Carbon
from services.kit.plugins import load_plugins
from services.kit.problems import ProblemError
from services.solving.allocation import given, solve_allocation
from services.solving.partition import demands_of, solve_partition
from services.solving.pools import pool_problem, solve_pools


class Sources:
    """What ``SolveKind.resolve`` may read from the other services."""

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon

    async def forecast(self, zone: str, signal: Signal | None, horizon_s: float, clock: Clock) -> IntensityForecast:
        """Return intensities from now on, ``horizon_s`` seconds of ``clock`` ahead.

        Raises:
            ProblemError: 422 for an unknown zone or signal; 503 while the carbon service does not answer.
        """
        try:
            return await self._carbon.forecast(zone, horizon_s, clock, signal)
        except ProblemError as error:
            pointer = {404: "/zone", 422: "/horizon_h"}.get(error.status)
            if pointer is None:
                raise
            if signal and error.problem_code is not ProblemCode.UNKNOWN_ZONE and error.status == 404:
                pointer = "/signal"
            errors = [FieldError(pointer=pointer, detail=error.detail)]
            raise ProblemError(422, error.problem_code, error.detail, errors=errors) from error


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
    resolve: Callable[[RequestT, Sources], Awaitable[ProblemT]]
    """Makes the problem from a request, reading whatever the request refers to. Raises ``ProblemError``."""
    solve: Callable[[ProblemT, Report], ResultT]
    """Pure: returns the result of a problem and reports its progress. Equal problems have equal results, time limits
    aside."""


def _whole(
    kind: type[ProblemT], check: Callable[[ProblemT], object]
) -> Callable[[Message, Sources], Awaitable[ProblemT]]:
    """Return a ``resolve`` for requests that contain everything; it refuses those that make no sense."""

    def made(request: Message) -> ProblemT:
        problem = kind.model_validate(request.model_dump())
        try:
            check(problem)
        except DomainError as error:
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
        return problem

    async def resolve(request: Message, sources: Sources) -> ProblemT:
        return await asyncio.to_thread(made, request)  # a large one takes a second, and others are waiting

    return resolve


@dataclass(frozen=True)
class BoundKind:
    """How the lowest carbon is computed: ``resolve`` and ``solve`` of its kind, which the wattshift-lab package has."""

    resolve: Callable[[CarbonBoundRequest, Sources], Awaitable[CarbonBoundProblem]]
    solve: Callable[[CarbonBoundProblem, Report], CarbonBoundResult]


def _bound() -> BoundKind:
    for plugin in load_plugins("wattshift.carbon_bounds", BoundKind):
        return plugin.value
    raise ProblemError(
        422,
        ProblemCode.INVALID_REQUEST,
        "The least carbon of any schedule is computed by the package wattshift-lab, which is not installed here; in a "
        "checkout of this release: pip install ./lab",
    )


KINDS: Mapping[str, SolveKind[Any, Any, Any]] = {
    kind.name: kind
    for kind in (
        SolveKind(
            name="carbon-bound",
            summary="Compute the least carbon that any schedule could reach.",
            request=CarbonBoundRequest,
            problem=CarbonBoundProblem,
            result=CarbonBoundResult,
            resolve=lambda request, sources: _bound().resolve(request, sources),
            solve=lambda problem, report: _bound().solve(problem, report),
        ),
        SolveKind(
            name="pools",
            summary="Plan LLM instances by place, mode and class of requests.",
            request=PoolsRequest,
            problem=PoolsProblem,
            result=PoolsResult,
            resolve=_whole(PoolsProblem, pool_problem),
            solve=solve_pools,
        ),
        SolveKind(
            name="partition",
            summary="Choose model variants and the slices of GPUs they run on.",
            request=PartitionRequest,
            problem=PartitionProblem,
            result=PartitionResult,
            resolve=_whole(PartitionProblem, lambda problem: checked(*demands_of(problem))),
            solve=solve_partition,
        ),
        SolveKind(
            name="allocation",
            summary="Give jobs GPUs, power limits or clocks, and places, within a power limit.",
            request=AllocationRequest,
            problem=AllocationProblem,
            result=AllocationResult,
            resolve=_whole(AllocationProblem, given),
            solve=solve_allocation,
        ),
    )
}
