"""Carbon intensity over time, as a step curve."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.prices import PriceCurve
from services.core.domain.signal import Signal

LEAST_MEASURED = 0.9  #: A mean over the past is unknown where less than this share of it was measured
_ALL_KNOWN: Bools = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True)
class CarbonCurve:
    """Intensity as a step function: ``intensity_gco2_per_kwh[i]`` holds from ``times_s[i]`` until ``times_s[i + 1]``.

    The first value also holds before the curve and the last one after it; both are then estimates. This is the one rule
    for what is not known: ``Measured`` follows it in the gaps of a history.

    Raises:
        DomainError: the arrays do not fit this description.
    """

    times_s: Floats  #: (n,) UTC seconds, strictly increasing, n >= 1
    intensity_gco2_per_kwh: Floats  #: (n,) finite; marginal signals may be negative
    end_s: float  #: When the last value stops holding
    estimated: Bools = field(default_factory=lambda: _ALL_KNOWN)
    """(n,) whether the step is anything but a measurement; all False unless given."""

    def __post_init__(self) -> None:
        times, values = self.times_s, self.intensity_gco2_per_kwh
        if self.estimated is _ALL_KNOWN:
            object.__setattr__(self, "estimated", np.zeros(times.shape, dtype=np.bool_))
        if times.ndim != 1 or not times.shape == values.shape == self.estimated.shape or times.size == 0:
            raise DomainError("a carbon curve needs one intensity per time and at least one of both")
        if not (np.all(np.isfinite(values)) and np.all(np.diff(times) > 0) and self.end_s > times[-1]):
            raise DomainError("a carbon curve needs finite intensities at strictly increasing times")

    @property
    def start_s(self) -> float:
        """When the first step begins, UTC seconds."""
        return self._columns[0][0]

    @cached_property
    def edges_s(self) -> Floats:
        """Where steps begin and end, UTC seconds: (n + 1,); read-only."""
        return np.append(self.times_s, self.end_s)

    @property
    def lengths_s(self) -> Floats:
        """How long each step lasts: (n,)."""
        return np.diff(self.edges_s)

    @cached_property
    def _columns(self) -> tuple[list[float], list[float], list[float]]:
        """Start, value, and the integral up to the start of each step, as lists, in which single look-ups are faster.

        The integral has one more entry, up to the end of the curve.
        """
        integral = np.append(0.0, np.cumsum(self.intensity_gco2_per_kwh * self.lengths_s))
        return self.times_s.tolist(), self.intensity_gco2_per_kwh.tolist(), integral.tolist()

    def step_at(self, time_s: float) -> int:
        """Return the index of the step in force at ``time_s``: the first before the curve, the last after it."""
        return max(bisect_right(self._columns[0], time_s) - 1, 0)

    def at(self, time_s: float) -> float:
        """Return the intensity in force at ``time_s``, gCO2/kWh."""
        return self._columns[1][self.step_at(time_s)]

    def integral(self, time_s: float) -> float:
        """Return the integral of the intensity from the start of the curve to ``time_s``, (gCO2/kWh) s.

        Emissions of a constant power over ``[a, b)`` are ``P * (integral(b) - integral(a))``, with

            integral(t) = sum over steps i before t of c[i] * (times[i+1] - times[i])  +  c[last] * (t - times[last])

        With positive intensities it is negative before the curve.
        """
        times, values, integral = self._columns
        step = max(bisect_right(times, time_s) - 1, 0)
        return integral[step] + values[step] * (time_s - times[step])

    def mean(self, start_s: float, end_s: float) -> float:
        """Return the time-weighted mean over ``[start_s, end_s)``, gCO2/kWh; if that is empty, the value at its start.

        Source: GREEN section 4.2: the mean times energy is what a constant power emits.
        """
        weights = self._seconds_within(start_s, end_s)
        total = weights.sum()
        return float(weights @ self.intensity_gco2_per_kwh / total) if total > 0 else self.at(start_s)

    def is_estimated(self, start_s: float, end_s: float) -> bool:
        """Return whether any part of ``[start_s, end_s)`` is an estimate; for an empty window, whether its start is."""
        if start_s < self.start_s or max(start_s, end_s) > self.end_s:
            return True
        within = self._seconds_within(start_s, end_s) > 0
        return bool(self.estimated[within].any() if within.any() else self.estimated[self.step_at(start_s)])

    def means(self, starts_s: Floats, length_s: float) -> Floats:
        """Return the time-weighted mean over ``[start, start + length_s)`` for each start, gCO2/kWh: (n,) to (n,).

        Args:
            starts_s: (n,) UTC seconds, n >= 1.
            length_s: Length of each window, > 0.
        """
        begins, ends, intensity = self.steps(float(starts_s.min()), float(starts_s.max()) + length_s)
        edges, integral = np.append(begins, ends[-1]), np.append(0.0, np.cumsum(intensity * (ends - begins)))
        until: Floats = np.interp(starts_s + length_s, edges, integral)
        since: Floats = np.interp(starts_s, edges, integral)
        return (until - since) / length_s

    def steps(self, start_s: float, end_s: float) -> tuple[Floats, Floats, Floats]:
        """Return the steps within ``[start_s, end_s)``, cut at both ends.

        Returns:
            begins: (n,) UTC seconds; the first is ``start_s``.
            ends: (n,) UTC seconds; the last is ``end_s``.
            intensity: (n,) gCO2/kWh.
        """
        inside = self.times_s[(self.times_s > start_s) & (self.times_s < end_s)]
        begins = np.append(start_s, inside)
        ends = np.append(inside, end_s)
        return begins, ends, self.intensity_gco2_per_kwh[self._steps_at(begins)]

    def cut(self, start_s: float, end_s: float) -> CarbonCurve:
        """Return the curve over ``[start_s, end_s)`` alone; this window must not be empty."""
        begins, _, intensity = self.steps(start_s, end_s)
        estimated = self.estimated[self._steps_at(begins)] | (begins < self.start_s)
        if end_s > self.end_s:
            estimated[-1] = True
        return CarbonCurve(begins, intensity, end_s, estimated)

    def _steps_at(self, times_s: Floats) -> Ints:
        return np.clip(np.searchsorted(self.times_s, times_s, side="right") - 1, 0, None)

    def _seconds_within(self, start_s: float, end_s: float) -> Floats:
        """Return how much of each step lies in a window; the first and last steps are extended to its ends: (n,)."""
        edges = np.minimum(np.maximum(self.edges_s, start_s), max(start_s, end_s))
        edges[0], edges[-1] = start_s, max(start_s, end_s)
        return edges[1:] - edges[:-1]


@dataclass(frozen=True)
class Measured:
    """What was measured of a grid's intensity, with gaps where nothing was.

    Attributes:
        starts_s, ends_s: (n,) when each measured step starts and ends, UTC seconds, in order without overlap; n >= 1.
    """

    starts_s: Floats
    ends_s: Floats
    curve: CarbonCurve  #: What was measured; in each gap, the preceding value holds, as an estimate

    @classmethod
    def of(cls, starts_s: Floats, ends_s: Floats, intensity: Floats, estimated: Bools) -> Measured:
        """Return measured steps as columns (n,): their values, gCO2/kWh, and whether the provider estimated each.

        Raises:
            DomainError: there are none, or they are not in chronological order.
        """
        gaps = np.flatnonzero(ends_s[:-1] < starts_s[1:])
        curve = CarbonCurve(
            np.insert(starts_s, gaps + 1, ends_s[gaps]),
            np.insert(intensity, gaps + 1, intensity[gaps]),
            float(ends_s[-1]) if ends_s.size else 0.0,
            np.insert(estimated, gaps + 1, True),
        )
        return cls(starts_s, ends_s, curve)

    def mean(self, start_s: float, end_s: float) -> float | None:
        """Return the mean over ``[start_s, end_s)``, gCO2/kWh; None if less than ``LEAST_MEASURED`` was measured."""
        if not start_s < end_s or self.share(start_s, end_s) < LEAST_MEASURED:
            return None
        return self.curve.mean(start_s, end_s)

    def share(self, start_s: float, end_s: float) -> float:
        """Return how much of ``[start_s, end_s)``, which must not be empty, was measured: 0 to 1."""
        within = np.minimum(self.ends_s, end_s) - np.maximum(self.starts_s, start_s)
        return float(within[within > 0].sum()) / (end_s - start_s)


def mixed(curves: Sequence[CarbonCurve], shares: Sequence[float]) -> CarbonCurve:
    """Return the intensity of power drawn from several grids: at every moment the mean weighted by their shares.

    Args:
        curves: All of one signal.
        shares: One per curve, >= 0; they add up to 1.
    """
    drawn = [(curve, share) for curve, share in zip(curves, shares, strict=True) if share > 0]
    if len(drawn) == 1:
        return drawn[0][0]
    edges = np.unique(np.concatenate([curve.edges_s for curve, _ in drawn]))
    parts = [curve.cut(float(edges[0]), float(edges[-1])) for curve, _ in drawn]
    times = edges[:-1]
    intensity = np.zeros(times.shape)
    estimated = np.zeros(times.shape, dtype=np.bool_)
    for part, (_, share) in zip(parts, drawn, strict=True):
        at = np.searchsorted(part.times_s, times, side="right") - 1
        intensity += share * part.intensity_gco2_per_kwh[at]
        estimated |= part.estimated[at]
    return CarbonCurve(times, intensity, float(edges[-1]), estimated)


@dataclass(frozen=True)
class CarbonOutlook:
    """What is known of one zone's grid at the time of a decision.

    Attributes:
        low, high: (n,) for the curve's steps, the deciles between which the actual value is taken to lie four times out
            of five, gCO2/kWh; where they are not known they equal the step's value. None: none are known.

    Raises:
        DomainError: the deciles do not match the steps of the curve.
    """

    zone: str  #: The grid zone
    signal: Signal  #: What the intensities measure
    curve: CarbonCurve  #: Recent history and forecast in one curve
    stale: bool = False  #: Whether the newest value is past its maximum age; decisions still use it, and say so
    low: Floats | None = None
    high: Floats | None = None
    prices: PriceCurve | None = None  #: What electricity costs there; None: unknown

    def __post_init__(self) -> None:
        n_steps = self.curve.times_s.size
        if any(deciles is not None and deciles.shape != (n_steps,) for deciles in (self.low, self.high)):
            raise DomainError("an outlook has one low and one high value per step of its curve")
