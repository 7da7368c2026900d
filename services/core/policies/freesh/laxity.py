"""Which request is next: least laxity first, and the orders it is compared with.

The dispatcher holds the requests of one class that no instance serves yet. It gives the next one to an instance with
room; with preemption, a waiting request may also take the place of one that is being served.

A request's laxity falls by one second for each second that it waits, like that of every other waiting request, so
their order does not change as time passes. Each order is therefore a key that does not contain the time, kept in a heap
(``request_queue``): nothing is ranked again until predictions change. Keys are in seconds; the smallest is served
first, ties by arrival and then by id.

Source: FREESH section 3.3, equation 6, and appendix C.1, algorithm 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from services.core.domain.errors import DomainError
from services.core.domain.serving import WINDOW_LATENCIES

PREEMPTION_MARGIN_S = 0.1
"""By how much more urgent a request must be than the one whose place it takes, unless stated; the paper has none."""


class Order(StrEnum):
    """The orders in which waiting requests are served."""

    LLF = "llf"
    FCFS = "fcfs"
    EDF = "edf"
    SRTF = "srtf"


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """How fast the instances of a class serve a request that does not queue."""

    ttft_s: float  #: Time to first token, seconds, >= 0
    tbt_s: float  #: Time between tokens, seconds, > 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttft_s) and self.ttft_s >= 0 and math.isfinite(self.tbt_s) and self.tbt_s > 0):
            raise DomainError(f"a TTFT is not negative and a TBT above 0 s, not {self.ttft_s} and {self.tbt_s}")

    def latency_s(self, output_tokens: float) -> float:
        """Return ``Lat = N * TBT + TTFT``, seconds. Source: FREESH section 3.3."""
        return output_tokens * self.tbt_s + self.ttft_s


@dataclass(slots=True)
class ServingRequest:
    """A request as the dispatcher sees it."""

    id: str  #: Unique among the requests that are waiting or being served
    arrival_s: float  #: When it arrived, seconds
    output_tokens: float  #: How many tokens its answer is predicted to have
    input_tokens: int = 0  #: Length of its prompt
    tokens_done: float = 0.0  #: Tokens of the answer that already exist, if it was preempted
    request_class: str = ""  #: Its class, such as ``SL``
    tenant: str = ""  #: Its tenant, for fair shares
    excluded: frozenset[str] = frozenset()
    """Servers that failed to answer it and may not be given it again; unchanged while it waits."""
    due_s: float = math.inf  #: When its answer must be complete to be in time; infinite if no limit is set
    serial: int = field(default=-1, repr=False, compare=False)
    """Number of its entry in the queue; managed by the queue."""
    is_late: bool = field(default=False, repr=False, compare=False)
    """Whether it can no longer be in time; managed by the queue."""

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.arrival_s)
            and 0 <= self.output_tokens < math.inf
            and 0 <= self.input_tokens < math.inf
            and 0 <= self.tokens_done < math.inf
        ):
            raise DomainError(f"request {self.id}: its arrival is finite, and its lengths are finite and >= 0")


def deadline_s(request: ServingRequest, times: ServiceTimes) -> float:
    """Return the end of the scheduling window, ``arrival + W`` with ``W = 1.4 * Lat``, seconds."""
    return request.arrival_s + WINDOW_LATENCIES * times.latency_s(request.output_tokens)


def remaining_s(request: ServingRequest, times: ServiceTimes, *, is_running: bool = False) -> float:
    """Return the predicted remaining service time, seconds.

    A waiting request needs a first token, even if it was preempted, because its prompt must be read again. One that has
    outlived its prediction is expected to end with its next token.
    """
    left = max(request.output_tokens - request.tokens_done, min(request.output_tokens, 1.0))
    return left * times.tbt_s + (0.0 if is_running and request.tokens_done > 0 else times.ttft_s)


def laxity_s(request: ServingRequest, times: ServiceTimes, now_s: float, *, is_running: bool = False) -> float:
    """Return how long a request can still wait and end within its window, seconds; negative if it can no longer do so.

    Source: FREESH equation 6, ``(arrival + W) - t - remaining``.
    """
    return deadline_s(request, times) - now_s - remaining_s(request, times, is_running=is_running)


def is_too_late(request: ServingRequest, times: ServiceTimes, now_s: float) -> bool:
    """Return whether a waiting request could no longer be in time even if it were served at once."""
    return now_s + remaining_s(request, times) > request.due_s


def order_key_s(request: ServingRequest, order: Order, times: ServiceTimes, *, is_running: bool = False) -> float:
    """Return the key by which a request is ordered, smallest first; it does not depend on the time.

    LLF: the moment at which its laxity is 0. FCFS: its arrival. EDF: its deadline. SRTF: its remaining service time.
    """
    match order:
        case Order.LLF:
            return laxity_s(request, times, 0.0, is_running=is_running)
        case Order.FCFS:
            return request.arrival_s
        case Order.EDF:
            return deadline_s(request, times)
        case Order.SRTF:
            return remaining_s(request, times, is_running=is_running)


def preempted_by(
    waiting: ServingRequest,
    running: Iterable[ServingRequest],
    order: Order,
    times: ServiceTimes,
    *,
    margin_s: float = 0.0,
) -> ServingRequest | None:
    """Return the running request whose place a waiting one takes: the last in order, if it is strictly later.

    FCFS preempts nobody, since whatever waits arrived later. The cost of a preemption is part of the comparison: the
    waiting request's remaining time contains its TTFT, the running one's does not.

    Args:
        running: Requests in service, with their present ``tokens_done``.
        order: Any order; ``times`` must be the same as the queue's.
        margin_s: By how much the running one must be later, which keeps two requests of nearly equal laxity from
            displacing each other in turn.

    Source: FREESH section 3.3 ("if a newly arrived or updated request gets a strictly smaller l than a running one, we
    may preempt the latter").
    """
    last = max(
        ((order_key_s(each, order, times, is_running=True), each.arrival_s, each.id, each) for each in running),
        key=lambda found: found[:3],
        default=None,
    )
    if last is None or not order_key_s(waiting, order, times) < last[0] - margin_s:
        return None
    return last[3]
