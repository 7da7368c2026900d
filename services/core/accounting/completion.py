"""How long jobs took, and how evenly tenants are served."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class CompletionTimes:
    """Job completion times of a set of jobs; NaN if the set is empty."""

    jobs: int
    mean_s: float
    p99_s: float


def completion_times(submitted_s: Floats, ended_s: Floats) -> CompletionTimes:
    """Return the mean and 99th percentile JCT: from submission to end, including waiting and preemption.

    The percentile interpolates linearly between order statistics. Reports call it the tail.

    Args:
        submitted_s: (n_jobs,) UTC seconds.
        ended_s: (n_jobs,) UTC seconds, of jobs that have ended.

    Raises:
        DomainError: a job ends before it is submitted, or the arrays differ in length.

    Source: GREEN section 8.1.
    """
    if submitted_s.shape != ended_s.shape or bool((ended_s < submitted_s).any()):
        raise DomainError("every job needs one submission and an end not before it")
    if not submitted_s.size:
        return CompletionTimes(0, float("nan"), float("nan"))
    jct_s = ended_s - submitted_s
    return CompletionTimes(jct_s.size, float(jct_s.mean()), float(np.quantile(jct_s, 0.99)))


def jain_index(served: Iterable[float]) -> float:
    """Return Jain's index, ``(sum x)^2 / (n * sum x^2)``: 1 if all are served equally, 1/n if one gets everything.

    NaN if there are no tenants, and 1 if none has received anything.

    Args:
        served: What each has received relative to its weight, in any unit, >= 0. Here: the GPU time of tenants that
            had jobs waiting, since a tenant that wants no more is not served badly.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness and Discrimination, DEC-TR-301, 1984.
    """
    values = [*served]
    if not values:
        return float("nan")
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0
