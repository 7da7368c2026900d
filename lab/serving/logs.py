"""Traffic from a log of requests, and one more figure of a backtest."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S, WINDOW_S
from services.core.profiles.traffic import HEAD_ROOM, WINDOWS, Backtest, Traffic


def observe(times_s: ArrayLike, class_of: ArrayLike, *, n_classes: int, start_s: float, end_s: float) -> Traffic:
    """Return the traffic of a request log, in whole steps from ``start_s``; a remainder before ``end_s`` is ignored.

    Args:
        times_s: (n_requests,) arrivals, UTC seconds, in any order.
        class_of: (n_requests,) their classes, 0 .. ``n_classes`` - 1.
        n_classes: How many classes there are.
        start_s, end_s: The period for which the log is complete.

    Raises:
        DomainError: a log that ends before it starts, an arrival outside it, a class that does not exist, or arrays
            that do not match.
    """
    if not -np.inf < start_s <= end_s < np.inf:
        raise DomainError(f"a log goes from a moment to a later one, not from {start_s:g} to {end_s:g} s")
    times, classes = np.asarray(times_s, dtype=np.float64), np.asarray(class_of, dtype=np.int64)
    if times.ndim != 1 or times.shape != classes.shape:
        raise DomainError(f"{times.shape} arrivals, but {classes.shape} classes")
    if not np.all((times >= start_s) & (times <= end_s)):
        raise DomainError(f"an arrival outside the log, which goes from {start_s:g} to {end_s:g} s")
    if not np.all((classes >= 0) & (classes < n_classes)):
        raise DomainError(f"a class that is not among the {n_classes}")
    windows = int((end_s - start_s) // STEP_S) * WINDOWS
    at = np.floor((times - start_s) / WINDOW_S).astype(np.int64)
    inside = at < windows
    flat = np.bincount(at[inside] * n_classes + classes[inside], minlength=windows * n_classes)
    counts = flat.astype(np.int64).reshape(-1, WINDOWS, n_classes)
    return Traffic(counts.max(axis=1) / WINDOW_S, counts)


def spare_share(score: Backtest, head_room: float = HEAD_ROOM) -> Floats:
    """Return the capacity that is ready but unused, relative to the mean peak; (n_classes,), NaN without demand."""
    spare = np.nanmean(np.maximum(head_room * score.forecast_qps - score.actual_qps, 0.0), axis=(0, 1))
    peak = np.nanmean(score.actual_qps, axis=(0, 1))
    return spare / np.where(peak > 0, peak, np.nan)
