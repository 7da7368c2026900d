"""The demand of a pool's next plan, from what routers reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.contracts.serving import DemandForecast, PoolPartition
from services.core.domain.arrays import Floats, Ints
from services.core.domain.serving import SERVICE, STEP_S, STEPS_AHEAD, WINDOW_S
from services.core.profiles.traffic import DAY_STEPS, WINDOWS, Traffic

HISTORY_S = 14 * 86_400.0
DAY_WINDOWS = DAY_STEPS * WINDOWS
SURGE_WINDOWS = 12


@dataclass(frozen=True)
class RequestLog:
    """Requests of one partition, window by window, up to the last whole window before now."""

    counts: Ints  #: (n_windows, n_classes), all sources together
    is_known: npt.NDArray[np.bool_]  #: (n_windows,) whether any source reported it
    end_s: float  #: Where the last window ends, UTC seconds

    @classmethod
    def empty(cls, classes: int, end_s: float) -> RequestLog:
        """Return a log of two weeks without any reports."""
        windows = int(HISTORY_S / WINDOW_S)
        return cls(np.zeros((windows, classes), np.int64), np.zeros(windows, np.bool_), end_s)


def predict_demand(
    part: PoolPartition,
    log: RequestLog,
    *,
    from_s: float,
    now_s: float,
    head_room: float,
    max_age_s: float,
    quantile: float = SERVICE,
    steps: int = STEPS_AHEAD,
    is_surge: bool = False,
) -> DemandForecast:
    """Return the peaks to plan for in ``steps`` steps from ``from_s`` on.

    With head-room, they should suffice for each class in a share ``quantile`` of the steps.

    In a surge, when more requests arrive than were planned for, the first step has at least the greatest rate of the
    last minute, which forecasters that learn from days do not know yet.

    If the log ended more than ``max_age_s`` ago, or is shorter than a step, the peaks are the spec's assumed rates, or
    the greatest peak of the last known day if that is higher; with neither, there is no demand.
    """
    from services.learning.demand import (  # scikit-learn: a tenth of a second, for this task alone
        candidates,
        forecast_demand,
    )

    counts, age_s = _history(log, max_age_s, now_s)
    names = [each.name for each in part.classes]
    assumed = np.array([part.assumed_qps.get(name, 0.0) for name in names]) if part.assumed_qps else None
    traffic = Traffic.of_windows(counts)
    if age_s <= max_age_s and len(traffic):
        predicted = forecast_demand(traffic, assumed, head_room=head_room, service=quantile)
        end_s = now_s - age_s
        peaks = _shifted(predicted.peaks_qps, (from_s - end_s) / STEP_S)
        method, is_assumed, left_out = predicted.method, predicted.assumed, predicted.left_out
    else:
        rates, method = _assumed(counts, assumed)
        peaks, is_assumed = np.repeat(rates[None], STEPS_AHEAD, axis=0), True
        why = "no whole step was reported" if age_s <= max_age_s else f"the log ended {age_s:.0f} s ago"
        left_out = {each.name: why if len(counts) else "nothing was reported" for each in candidates()}
    if is_surge:
        peaks = peaks.copy()
        peaks[0] = np.maximum(peaks[0], counts[-SURGE_WINDOWS:].max(axis=0, initial=0) / WINDOW_S)
    return DemandForecast(
        method=method,
        is_assumed=is_assumed,
        history_s=len(counts) * WINDOW_S,
        peaks_qps={name: peaks[:steps, index].tolist() for index, name in enumerate(names)},
        mean_shares=_mean_shares(names, traffic),
        left_out=left_out,
    )


def _history(log: RequestLog, max_age_s: float, now_s: float) -> tuple[Ints, float]:
    """Return the counts up to the last window reported, and how many seconds ago that ended.

    A short silence means that no requests came. A longer one, during which the log was stale, is filled from the day
    before; if that is unknown too, history begins after it.
    """
    known = np.flatnonzero(log.is_known)
    if not known.size:
        return log.counts[:0], np.inf
    end, first = int(known[-1]) + 1, int(known[0])
    counts = log.counts[:end].copy()
    for at in np.flatnonzero(np.diff(known) - 1 > max_age_s / WINDOW_S):
        start, stop = int(known[at]) + 1, int(known[at + 1])
        if stop - start <= DAY_WINDOWS <= start - first:
            counts[start:stop] = counts[start - DAY_WINDOWS : stop - DAY_WINDOWS]
        else:
            first = stop
    return counts[first:], now_s - (log.end_s - (len(log.is_known) - end) * WINDOW_S)


def _mean_shares(names: list[str], traffic: Traffic) -> dict[str, float]:
    """Return the last day's mean rate of each class that had requests, as a share of the peaks of its steps."""
    known = traffic.since(max(0, len(traffic) - DAY_STEPS))
    assert known.counts is not None
    peaks, means = known.peaks_qps.sum(axis=0), known.counts.mean(axis=1).sum(axis=0) / WINDOW_S
    return {
        name: float(mean / peak)
        for name, peak, mean in zip(names, peaks.tolist(), means.tolist(), strict=True)
        if peak > 0
    }


def _assumed(counts: Ints, assumed: Floats | None) -> tuple[Floats, str]:
    seen = counts[-DAY_WINDOWS:].max(axis=0, initial=0) / WINDOW_S
    if assumed is not None and (assumed >= seen).all():
        return assumed, "assumed"
    if len(counts):
        return seen if assumed is None else np.maximum(assumed, seen), "greatest peak of the last day known"
    return seen, "none reported, none assumed"


def _shifted(peaks_qps: Floats, steps: float) -> Floats:
    """Return the peaks of six steps that begin ``steps`` steps later: of each, the greatest of those it overlaps.

    Steps beyond the forecast are like its last step.
    """
    first = np.floor(np.arange(STEPS_AHEAD) + steps)
    last = np.ceil(np.arange(STEPS_AHEAD) + 1 + steps) - 1
    spans = np.clip(np.stack([first, last], axis=1), 0, STEPS_AHEAD - 1).astype(np.int64)
    return np.stack([peaks_qps[start : stop + 1].max(axis=0) for start, stop in spans])
