"""The grid under a simulation: intensity now, its integral, and what policies are told.

Emissions of a constant power over ``[a, b)`` are ``P * (integral(b) - integral(a))`` with

    integral(t) = sum over steps i before t of c[i] * (times[i+1] - times[i])  +  c[last] * (t - times[last])

so that no simulation ever steps through a curve. The sum over steps is a prefix sum.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from services.core.domain.carbon import CarbonCurve, CarbonOutlook
from services.simulator.workload import CarbonTrace, ForecastKind

Floats = NDArray[np.float64]
DAY_S = 86_400.0


class Grid:
    """A carbon trace without an end: after it, its last day is repeated."""

    def __init__(self, trace: CarbonTrace, history_s: float, horizon_s: float) -> None:
        self.trace = trace
        self._history_s, self._horizon_s = history_s, horizon_s
        self._times: Floats = trace.times_s.astype(np.float64)
        self._values: Floats = trace.intensity_gco2_per_kwh.astype(np.float64)
        self._end_s = trace.end_s
        last_day = self._times >= trace.end_s - DAY_S
        self._day_times, self._day_values = self._times[last_day], self._values[last_day]
        self._index()
        self._outlook: tuple[int, int, CarbonOutlook] | None = None

    def at(self, time_s: float) -> float:
        """Return the intensity in force, gCO2/kWh."""
        return self._list_values[self._step(time_s)]

    def integral(self, time_s: float) -> float:
        """Return the integral of the intensity from the trace's beginning, (gCO2/kWh) s; negative before it."""
        step = self._step(time_s)
        return self._prefix[step] + self._list_values[step] * (time_s - self._list_times[step])

    def outlook(self, now_s: float) -> CarbonOutlook:
        """Return what a policy is told at this moment; the same value until the hour or the forecast changes."""
        self._step(now_s + self._horizon_s)  # lengthens the curve if need be
        step = self._step(now_s)
        issue = self._issue(now_s)
        if self._outlook is None or self._outlook[:2] != (step, issue):
            self._outlook = (step, issue, self._told(now_s, step, issue))
        return self._outlook[2]

    def _step(self, time_s: float) -> int:
        while time_s >= self._end_s:
            self._extend()
        return max(bisect_right(self._list_times, time_s) - 1, 0)

    def _extend(self) -> None:
        length_s = self.trace.end_s - float(self._day_times[0])
        repeats = max(1, len(self._times) // (4 * len(self._day_times)))
        for _ in range(repeats):
            shift_s = self._end_s - float(self._day_times[0])
            self._times = np.append(self._times, self._day_times + shift_s)
            self._values = np.append(self._values, self._day_values)
            self._end_s += length_s
        self._index()

    def _index(self) -> None:
        lengths = np.diff(np.append(self._times, self._end_s))
        self._prefix: list[float] = np.append(0.0, np.cumsum(self._values * lengths)).tolist()
        self._list_times: list[float] = self._times.tolist()
        self._list_values: list[float] = self._values.tolist()

    def _issue(self, now_s: float) -> int:
        issued = self.trace.issued
        if self.trace.forecast is not ForecastKind.FILE or issued is None:
            return -1
        return int(np.searchsorted(issued.issued_s, now_s, side="right")) - 1

    def _told(self, now_s: float, step: int, issue: int) -> CarbonOutlook:
        first = self._step(now_s - self._history_s)
        ahead = self._step(now_s + self._horizon_s)
        past = slice(first, step + 1)
        kind = self.trace.forecast
        if kind is ForecastKind.PERFECT:
            times, values = self._times[first : ahead + 1], self._values[first : ahead + 1]
            end_s = self._list_times[ahead + 1] if ahead + 1 < len(self._list_times) else self._end_s
        else:
            told_times, told, end_s = self._issued(issue) if issue >= 0 else self._persisted(step, ahead)
            keep = (told_times > self._list_times[step]) & (told_times <= now_s + self._horizon_s)
            beyond = told_times[told_times > now_s + self._horizon_s]
            end_s = min(end_s, float(beyond[0])) if beyond.size else end_s
            times = np.concatenate((self._times[past], told_times[keep]))
            values = np.concatenate((self._values[past], told[keep]))
            end_s = max(end_s, self._list_times[step + 1] if step + 1 < len(self._list_times) else self._end_s)
        return CarbonOutlook(self.trace.zone, self.trace.signal, CarbonCurve(times, values, end_s))

    def _persisted(self, step: int, ahead: int) -> tuple[Floats, Floats, float]:
        """Return the hours ahead as the same time of the last day that is known."""
        times = self._times[step + 1 : ahead + 1]
        known_s = self._list_times[step]
        days = np.ceil((times - known_s) / DAY_S)
        at = np.searchsorted(self._times, times - days * DAY_S, side="right") - 1
        end_s = self._list_times[ahead + 1] if ahead + 1 < len(self._list_times) else self._end_s
        return times, self._values[np.clip(at, 0, step)], end_s

    def _issued(self, issue: int) -> tuple[Floats, Floats, float]:
        issued = self.trace.issued
        assert issued is not None
        values = issued.intensity_gco2_per_kwh[issue]
        times = issued.starts_s[issue] + issued.step_s * np.arange(values.size)
        known = np.isfinite(values)
        return times[known], values[known], float(times[-1] + issued.step_s)
