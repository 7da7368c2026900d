"""How well requests were served: violations, time to first token, time between tokens, fairness.

One definition of each, for the router, the simulator and the reports. ``Lat`` is the time that an instance would need
for a request alone, ``N * TBT + TTFT`` with its actual number of tokens and the profiled times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.serving import SLO_LATENCIES, WINDOW_LATENCIES

LENGTH_GROUPS = 4


@dataclass(frozen=True)
class ServedRequests:
    """Requests that were answered, as columns, all (n_requests,).

    Attributes:
        arrival_s, first_token_s, finish_s: When each arrived, had its first token and its last one, seconds.
        output_tokens: Tokens of the answers, >= 1.
        latency_s: ``Lat`` of each, > 0.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Ints
    latency_s: Floats

    def __post_init__(self) -> None:
        columns = (self.arrival_s, self.first_token_s, self.finish_s, self.output_tokens, self.latency_s)
        if any(each.shape != (self.arrival_s.size,) for each in columns):
            raise DomainError("served requests need the same number of values in each column")
        in_order = (self.arrival_s <= self.first_token_s) & (self.first_token_s <= self.finish_s)
        if not bool(in_order.all() and (self.output_tokens >= 1).all() and (self.latency_s > 0).all()):
            raise DomainError("a request arrives, has a first token and then ends, with at least a token and Lat > 0")

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def e2e_s(self) -> Floats:
        """(n_requests,) from arrival to the last token, seconds."""
        return self.finish_s - self.arrival_s

    @property
    def ttft_s(self) -> Floats:
        """(n_requests,) from arrival to the first token, seconds; waiting included."""
        return self.first_token_s - self.arrival_s

    @property
    def tbt_s(self) -> Floats:
        """(n_requests,) mean time between tokens after the first, seconds; NaN for answers of one token."""
        gaps = self.output_tokens - 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(gaps > 0, (self.finish_s - self.first_token_s) / gaps, np.nan)

    @property
    def violates(self) -> np.ndarray:
        """(n_requests,) whether it took longer than its SLO, ``5 * Lat``. Source: FREESH equation 10."""
        return self.e2e_s > SLO_LATENCIES * self.latency_s

    def timely_tokens(self) -> Floats:
        """Return how many tokens of each request came within ``1.4 * Lat`` of its arrival: (n_requests,).

        Tokens are taken to come evenly between the first and the last.

        Source: FREESH appendix C.2, x_i.
        """
        left_s = self.arrival_s + WINDOW_LATENCIES * self.latency_s - self.first_token_s
        gap_s = np.nan_to_num(self.tbt_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            later = np.where(gap_s > 0, np.floor(left_s / gap_s + 1e-9), self.output_tokens)
        return np.where(left_s < 0, 0.0, np.minimum(1.0 + later, self.output_tokens))


def violation_rate(served: ServedRequests) -> float:
    """Return the share of requests that violate their SLO; NaN without requests. Source: FREESH equation 10."""
    return float(served.violates.mean()) if len(served) else float("nan")


def jain_index(amounts: Floats) -> float:
    """Return Jain's fairness index of what each party got, ``(sum X)^2 / (K sum X^2)``: 1 / K .. 1.

    Args:
        amounts: (n_parties,) >= 0. NaN if there are none; 1 if nobody got anything, which is equal.

    Source: FREESH equation 9; Jain et al. 1984.
    """
    if not amounts.size:
        return float("nan")
    squares = float((amounts**2).sum())
    return float(amounts.sum()) ** 2 / (amounts.size * squares) if squares else 1.0


def length_fairness(served: ServedRequests) -> float:
    """Return Jain's index of timely tokens over four groups by output length, quartiles of equally many requests.

    Long answers have more tokens, so that even with every token in time the index is below 1. Requests of one class
    belong together; for several classes see ``fairness_of_classes``.

    Source: FREESH appendix C.2, equation 9 with K = 4. *Our reading* of ties: equal lengths are divided in order of
    arrival, so that groups have equally many requests.
    """
    if not len(served):
        return float("nan")
    order = np.lexsort((served.arrival_s, served.output_tokens))
    timely = served.timely_tokens()[order]
    groups = np.array_split(timely, min(LENGTH_GROUPS, len(served)))
    return jain_index(np.array([group.sum() for group in groups]))


def fairness_of_classes(served: ServedRequests, request_class: Ints) -> float:
    """Return the mean of ``length_fairness`` over classes, weighted by their requests.

    *Our reading* of the paper's single figure: it defines the index for one class and prints one for all four.

    Args:
        served: Requests of all classes.
        request_class: (n_requests,) any number for each class.
    """
    if not len(served):
        return float("nan")
    total = 0.0
    for each in np.unique(request_class):
        inside = request_class == each
        total += inside.sum() * length_fairness(of_requests(served, inside))
    return float(total) / len(served)


def of_requests(served: ServedRequests, which: np.ndarray) -> ServedRequests:
    """Return some of the requests, by mask or index."""
    return ServedRequests(
        served.arrival_s[which],
        served.first_token_s[which],
        served.finish_s[which],
        served.output_tokens[which],
        served.latency_s[which],
    )
