"""Every kind of solve. A new kind is a function of its problem, plus one entry here."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.contracts.codes import ProblemCode
from services.contracts.optimize import LabRequest
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult
from services.contracts.schema import Message
from services.contracts.solver import SolveOutcome
from services.core.domain.errors import DomainError
from services.core.domain.solving import Report
from services.core.policies.clover.partition import checked
from services.kit.carbon import Carbon
from services.kit.plugins import load_plugins
from services.kit.problems import ProblemError
from services.solving.partition import demands_of, solve_partition
from services.solving.pools import pool_problem, solve_pools

RequestT = TypeVar("RequestT", bound=Message)
ProblemT = TypeVar("ProblemT", bound=Message)
ResultT = TypeVar("ResultT", bound=SolveOutcome)


@dataclass(frozen=True)
class SolveKind(Generic[RequestT, ProblemT, ResultT]):
    """One kind of solve: ``POST /v1/optimize/{name}``."""

    name: str  #: Its name in the URL and in the table
    request: type[RequestT]  #: What a caller sends
    problem: type[ProblemT]  #: What is stored and solved; it contains everything needed
    result: type[ResultT]  #: What is returned
    resolve: Callable[[RequestT, Carbon], Awaitable[ProblemT]]
    """Makes the problem from a request, reading whatever the request refers to. Raises ``ProblemError``, or
    ``DomainError`` for a request that makes no sense as a whole."""
    solve: Callable[[ProblemT, Report], ResultT]
    """Pure: returns the result of a problem and reports its progress. Equal problems have equal results, time limits
    aside."""


AnyKind = SolveKind[Any, Any, Any]


def whole(
    kind: type[ProblemT], check: Callable[[ProblemT], object]
) -> Callable[[Message, Carbon], Awaitable[ProblemT]]:
    """Return a ``resolve`` for requests that contain everything; ``check`` refuses those that make no sense."""

    def made(request: Message) -> ProblemT:
        problem = kind.model_validate(request.model_dump())
        check(problem)
        return problem

    async def resolve(request: Message, carbon: Carbon) -> ProblemT:
        return await asyncio.to_thread(made, request)  # a large one takes a second, and others are waiting

    return resolve


KINDS: Mapping[str, AnyKind] = {
    kind.name: kind
    for kind in (
        SolveKind(
            name="pools",
            request=PoolsRequest,
            problem=PoolsProblem,
            result=PoolsResult,
            resolve=whole(PoolsProblem, pool_problem),
            solve=solve_pools,
        ),
        SolveKind(
            name="partition",
            request=PartitionRequest,
            problem=PartitionProblem,
            result=PartitionResult,
            resolve=whole(PartitionProblem, lambda problem: checked(*demands_of(problem))),
            solve=solve_partition,
        ),
    )
}

REQUESTS: Mapping[str, tuple[type[Message], str]] = {
    "carbon-bound": (LabRequest, "Compute the least carbon that any schedule could reach."),
    "pools": (PoolsRequest, "Plan LLM instances by place, mode and class of requests."),
    "partition": (PartitionRequest, "Choose model variants and the slices of GPUs they run on."),
    "allocation": (LabRequest, "Give jobs GPUs, power limits or clocks, and places, within a power limit."),
}
"""What each kind is asked, and its summary in the API's description; those not in ``KINDS`` are the lab's."""


def kind_of(name: str) -> AnyKind:
    """Return a kind of solve; ``DomainError`` if it is the lab's, which is not installed, or there is none."""
    if name in KINDS:
        return KINDS[name]
    for plugin in load_plugins("wattshift.solves", SolveKind):
        if plugin.name == name:
            return plugin.value
    raise DomainError(
        f"A solve of the kind {name} is computed by the package wattshift-lab, which is not installed here; in a "
        "checkout of this release: pip install ./lab"
    )


async def problem_of(name: str, request: Message, carbon: Carbon) -> Message:
    """Return the problem of a request; ``ProblemError`` or ``RequestValidationError``, 422, if it has none."""
    try:
        kind = kind_of(name)
        if isinstance(request, LabRequest):
            request = kind.request.model_validate(request.model_dump())
        return await kind.resolve(request, carbon)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error
    except DomainError as error:
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
