"""Every kind of solve. A new kind is a module with its three functions, and one entry here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from optimizer_service import allocation, carbon_bound, partition, pools
from optimizer_service.sources import Sources
from services.contracts.allocation import AllocationProblem, AllocationRequest, AllocationResult
from services.contracts.optimize import CarbonBoundProblem, CarbonBoundRequest, CarbonBoundResult
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult
from services.contracts.schema import Message
from services.contracts.solver import SolveOutcome
from services.core.domain.progress import Report

RequestT = TypeVar("RequestT", bound=Message)
ProblemT = TypeVar("ProblemT", bound=Message)
ResultT = TypeVar("ResultT", bound=SolveOutcome)


@dataclass(frozen=True)
class SolveKind(Generic[RequestT, ProblemT, ResultT]):
    """One kind of solve: ``POST /v1/optimize/{name}``.

    Attributes:
        name: In the address and in the table.
        summary: For the API's description.
        request: What a caller sends.
        problem: What is stored and solved; it contains everything needed.
        result: What is answered.
        resolve: Makes the problem of a request, reading whatever the request refers to. Raises ``ProblemError``.
        solve: Pure: the result of a problem; it reports how far it is. Equal problems have equal results, time limits
            aside.
    """

    name: str
    summary: str
    request: type[RequestT]
    problem: type[ProblemT]
    result: type[ResultT]
    resolve: Callable[[RequestT, Sources], Awaitable[ProblemT]]
    solve: Callable[[ProblemT, Report], ResultT]


KINDS: Mapping[str, SolveKind[Any, Any, Any]] = {
    kind.name: kind
    for kind in (
        SolveKind(
            name="carbon-bound",
            summary="The least carbon any schedule of some work could reach",
            request=CarbonBoundRequest,
            problem=CarbonBoundProblem,
            result=CarbonBoundResult,
            resolve=carbon_bound.resolve,
            solve=carbon_bound.solve,
        ),
        SolveKind(
            name="pools",
            summary="LLM instances by place, mode and class of requests",
            request=PoolsRequest,
            problem=PoolsProblem,
            result=PoolsResult,
            resolve=pools.resolve,
            solve=pools.solve,
        ),
        SolveKind(
            name="partition",
            summary="Model variants on slices of GPUs",
            request=PartitionRequest,
            problem=PartitionProblem,
            result=PartitionResult,
            resolve=partition.resolve,
            solve=partition.solve,
        ),
        SolveKind(
            name="allocation",
            summary="GPUs, control values and places for jobs within a power limit",
            request=AllocationRequest,
            problem=AllocationProblem,
            result=AllocationResult,
            resolve=allocation.resolve,
            solve=allocation.solve,
        ),
    )
}
