"""The grid of a simulation: its current intensity, the integral, and what policies know about it."""

import math

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve, CarbonOutlook
from services.core.domain.prices import PriceCurve
from services.simulator.workload import CarbonTrace, ForecastKind

DAY_S = 86_400.0
MARKET_S = 12 * 3_600.0  #: When the prices of the next day are known, UTC; in summer two hours later than in fact
LEARNED_FROM = 28  #: How many earlier issues of a forecast say how far one may be off
LEAST_ISSUES = 10  #: With fewer than this, nothing is known of that


class Grid:
    """A carbon trace that never ends: its last day is repeated."""

    def __init__(self, trace: CarbonTrace, history_s: float, horizon_s: float) -> None:
        self.trace = trace
        self._history_s, self._horizon_s = history_s, horizon_s
        self._curve = whole = trace.curve
        self._end_s = whole.end_s
        last_day = whole.times_s >= min(whole.end_s - DAY_S, whole.times_s[-1])  # a step may be longer, such as a month
        self._day_times, self._day_values = whole.times_s[last_day], whole.intensity_gco2_per_kwh[last_day]
        self._missed: Floats | None = None
        self._forecasts = trace.issued if trace.forecast is ForecastKind.FILE else None
        self._first_issue = 0 if trace.issued is None else int(np.argmax(trace.issued.ends_s > whole.start_s))
        self._known_until_s = -math.inf
        self._outlooks: tuple[CarbonOutlook, ...] = ()

    def at(self, time_s: float) -> float:
        """Return the intensity in force, gCO2/kWh."""
        if time_s >= self._end_s:
            self._extend(time_s)
        return self._curve.at(time_s)

    def integral(self, time_s: float) -> float:
        """Return the integral of the intensity from the trace's beginning, (gCO2/kWh) s; negative before it."""
        if time_s >= self._end_s:
            self._extend(time_s)
        return self._curve.integral(time_s)

    def between(self, start_s: float, end_s: float) -> CarbonCurve:
        """Return the true intensity over the non-empty interval ``[start_s, end_s)``."""
        if end_s >= self._end_s:
            self._extend(end_s)
        return self._curve.cut(start_s, end_s)

    def outlooks(self, now_s: float) -> tuple[CarbonOutlook, ...]:
        """Return what a policy now knows about one zone; the same value until the hour or the forecast changes."""
        if now_s >= self._known_until_s:
            if now_s + self._horizon_s >= self._end_s:
                self._extend(now_s + self._horizon_s)
            step, issue = self._curve.step_at(now_s), self._issue(now_s)
            self._outlooks = (self._outlook_of(now_s, step, issue),)
            self._known_until_s = min(float(self._curve.edges_s[step + 1]), self._issued_s(issue + 1))
        return self._outlooks

    def _extend(self, beyond_s: float) -> None:
        """Repeat the last day until the curve extends past ``beyond_s``."""
        curve, first_s, size = self._curve, float(self._day_times[0]), len(self._day_times)
        length_s = self.trace.curve.end_s - first_s
        laps = max(len(curve.times_s) // (4 * size), int((beyond_s - self._end_s) / length_s) + 2)
        offsets_s = self._end_s - first_s + length_s * np.arange(laps).repeat(size)
        times = np.append(curve.times_s, np.tile(self._day_times, laps) + offsets_s)
        values = np.append(curve.intensity_gco2_per_kwh, np.tile(self._day_values, laps))
        self._end_s += laps * length_s
        self._curve = CarbonCurve(times, values, self._end_s)

    def _issue(self, now_s: float) -> int:
        """Return the number of the forecast in force; before the first one, its number less one."""
        if (issued := self._forecasts) is None:
            return -1
        return max(int(np.searchsorted(issued.issued_s, now_s, side="right")), self._first_issue) - 1

    def _issued_s(self, issue: int) -> float:
        """Return when a forecast is issued; inf if there is none of that number."""
        if (issued := self._forecasts) is None or issue >= issued.issued_s.size:
            return math.inf
        return float(issued.issued_s[issue])

    def _outlook_of(self, now_s: float, step: int, issue: int) -> CarbonOutlook:
        curve, edges_s = self._curve, self._curve.edges_s
        first = curve.step_at(now_s - self._history_s)
        low = high = None
        ahead = curve.step_at(now_s + self._horizon_s)
        if self.trace.forecast is ForecastKind.PERFECT:
            known = slice(first, ahead + 1)
            times, values = curve.times_s[known], curve.intensity_gco2_per_kwh[known]
            end_s = float(edges_s[ahead + 1])
        else:
            past = slice(first, step + 1)
            is_issued = issue >= self._first_issue
            later_s, later, end_s = self._issued(issue) if is_issued else self._persisted(step, ahead)
            spread = self._spread(issue) if is_issued else None
            keep = (later_s > edges_s[step]) & (later_s <= now_s + self._horizon_s)
            beyond = later_s[later_s > now_s + self._horizon_s]
            end_s = min(end_s, float(beyond[0])) if beyond.size else end_s
            times = np.concatenate((curve.times_s[past], later_s[keep]))
            values = np.concatenate((curve.intensity_gco2_per_kwh[past], later[keep]))
            if spread is not None:
                measured = curve.intensity_gco2_per_kwh[past]
                low, high = (np.concatenate((measured, (later + each)[keep])) for each in spread)
            end_s = max(end_s, float(edges_s[step + 1]))
        curve, prices = CarbonCurve(times, values, end_s), self._prices(now_s)
        return CarbonOutlook(self.trace.zone, self.trace.signal, curve, low=low, high=high, prices=prices)

    def _prices(self, now_s: float) -> PriceCurve | None:
        """Return the prices that are known: of a day-ahead market today's, and tomorrow's once it has met."""
        if (site := self.trace.prices) is None:
            return None
        until_s = now_s + self._horizon_s
        if site.day_ahead:
            until_s = min(until_s, (now_s - MARKET_S) // DAY_S * DAY_S + 2 * DAY_S)
        return site.curve.cut(now_s - self._history_s, until_s)

    def _persisted(self, step: int, ahead: int) -> tuple[Floats, Floats, float]:
        """Predict the hours ahead by the same times of the last known day."""
        curve = self._curve
        times = curve.times_s[step + 1 : ahead + 1]
        days = np.ceil((times - curve.times_s[step]) / DAY_S)
        at = np.searchsorted(curve.times_s, times - days * DAY_S, side="right") - 1
        return times, curve.intensity_gco2_per_kwh[np.clip(at, 0, step)], float(curve.edges_s[ahead + 1])

    def _issued(self, issue: int) -> tuple[Floats, Floats, float]:
        issued = self._forecasts
        assert issued is not None
        values = issued.intensity_gco2_per_kwh[issue]
        times = issued.starts_s[issue] + issued.step_s * np.arange(values.size)
        known = np.isfinite(values)
        return times[known], values[known], float(times[-1] + issued.step_s)

    def _measured(self) -> tuple[Floats, Floats]:
        """Return the edges and values of the steps of the true intensity, including those before the trace."""
        before, curve = self.trace.before, self.trace.curve
        if before is None:
            return curve.edges_s, curve.intensity_gco2_per_kwh
        values = np.concatenate((before.intensity_gco2_per_kwh, curve.intensity_gco2_per_kwh))
        return np.concatenate((before.times_s, curve.edges_s)), values

    def _spread(self, issue: int) -> tuple[Floats, Floats] | None:
        """Return the first and ninth deciles of earlier issues' errors, by hour ahead; None: too few are known.

        Each is (n_known,), matching the values of ``_issued``; 0 for hours ahead with too few known errors.
        """
        issued = self._forecasts
        assert issued is not None
        if self._missed is None:
            times = issued.starts_s[:, None] + issued.step_s * (np.arange(issued.intensity_gco2_per_kwh.shape[1]) + 0.5)
            edges, true = self._measured()
            at = np.searchsorted(edges, times, side="right") - 1
            within = (at >= 0) & (at < true.size)
            missed = true[np.clip(at, 0, true.size - 1)] - issued.intensity_gco2_per_kwh
            self._missed = np.where(within, missed, np.nan)
        before = slice(max(issue - LEARNED_FROM, 0), issue)
        ends = issued.starts_s[before, None] + issued.step_s * np.arange(1, self._missed.shape[1] + 1)
        errors = np.sort(np.where(ends <= issued.issued_s[issue], self._missed[before], np.nan), axis=0)
        count = np.isfinite(errors).sum(axis=0)
        if not (count >= LEAST_ISSUES).any():
            return None
        known = np.isfinite(issued.intensity_gco2_per_kwh[issue])
        columns, most = np.arange(count.size), np.maximum(count - 1, 0)
        low, high = (
            np.where(count >= LEAST_ISSUES, errors[np.round(most * share).astype(np.int64), columns], 0.0)[known]
            for share in (0.1, 0.9)
        )
        return np.minimum(low, 0.0), np.maximum(high, 0.0)
