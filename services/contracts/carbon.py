"""Grid carbon intensity, in gCO2/kWh; average and marginal signals are different things and never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from services.contracts.schema import Instant, Message
from services.core.domain.signal import Signal

if TYPE_CHECKING:
    from services.core.domain.carbon import CarbonCurve, CarbonOutlook

Clock = Literal["real", "grid"]
"""In whose seconds a length of time is given: everyone's, or the grid's, which run faster while a recording is
replayed faster. A day of the grid is always 86400 grid seconds."""


LearnedMethod = Literal["ridge", "blend", "persistence"]


class IntensityPoint(Message):
    """An intensity in force from `start_at` until `end_at`."""

    start_at: Instant
    end_at: Instant
    gco2_per_kwh: float
    is_estimated: bool = False

    @property
    def is_estimate(self) -> bool:
        """Whether the value is anything but a measurement."""
        return self.is_estimated


def curve_of(points: Sequence[IntensityPoint]) -> CarbonCurve:
    """Return contiguous steps, each of which ends where the next begins, as the core's curve, in UTC seconds.

    Only measured values that the provider did not estimate itself count as known.

    Raises:
        DomainError: there are no points, or they are not in order of time.
    """
    import numpy as np  # here: the command line reads these contracts and is installed without NumPy

    from services.core.domain.carbon import CarbonCurve

    return CarbonCurve(
        times_s=np.array([point.start_at.timestamp() for point in points], dtype=np.float64),
        intensity_gco2_per_kwh=np.array([point.gco2_per_kwh for point in points], dtype=np.float64),
        end_s=points[-1].end_at.timestamp() if points else 0.0,
        estimated=np.array([point.is_estimate for point in points], dtype=np.bool_),
    )


class CurrentIntensity(Message):
    """The intensity now."""

    zone: str
    signal: Signal
    provider: str
    point: IntensityPoint
    fetched_at: Instant
    age_s: float = Field(description="Since the value's interval began.")
    is_stale: bool = Field(description="Past the age at which it should have been replaced; still the best there is.")
    time_scale: float = Field(
        default=1, description="Grid seconds per real second; above 1 while a recording is replayed faster."
    )
    grid_now: Instant | None = Field(
        default=None, description="What the grid's own clock shows: the recorded instant while a recording is replayed."
    )


class IntensityHistory(Message):
    """Past intensities, oldest first."""

    zone: str
    signal: Signal
    provider: str
    points: list[IntensityPoint]
    next_cursor: str | None = None


class ForecastPoint(IntensityPoint):
    """A predicted intensity."""

    p10: float | None = Field(default=None, description="One in ten was below it in the backtest; null if none tells.")
    p90: float | None = Field(default=None, description="One in ten was above it in the backtest; null if none tells.")

    @property
    def is_estimate(self) -> bool:
        """True."""
        return True


class IntensityForecast(Message):
    """Intensities ahead, from now on."""

    zone: str
    signal: Signal
    provider: str
    method: str = Field(
        description="What the first points come from: `provider`, or our own: `ridge`, `blend` (both learned) or "
        "`persistence`."
    )
    generated_at: Instant
    is_stale: bool
    time_scale: float = 1
    learned_from: Instant | None = Field(
        default=None, description="From here on the points are our learned forecast: the provider's ends before."
    )
    persistence_from: Instant | None = Field(
        default=None, description="From here on the points are our persistence: the forecast before it ends."
    )
    points: list[ForecastPoint]


class MethodErrors(Message):
    """How far a method was off."""

    method: LearnedMethod
    mean_absolute_error_gco2_per_kwh: list[float] = Field(description="Of day 1, day 2 and so on ahead.")


class ForecastBacktest(Message):
    """How our own forecasts would have gone over the last part of what is known of a zone."""

    zone: str
    signal: Signal
    provider: str
    method: LearnedMethod = Field(
        description="What is in use: the one with the smaller error. `blend`, of the last value and the day before, is "
        "for steps shorter than an hour and a history too short for `ridge`."
    )
    note: str = Field(description="Why it is not the learned one, where it is not.")
    generated_at: Instant = Field(description="When it was learned and tested.")
    first_at: Instant | None = Field(
        default=None, description="From when on forecasts were tested, by the grid's clock."
    )
    last_at: Instant | None = Field(default=None, description="The last of them, by the grid's clock.")
    forecasts: int = Field(default=0, description="How many were tested; 0 while there is too little history.")
    errors: list[MethodErrors] = Field(default_factory=list[MethodErrors])
    coverage: float | None = Field(
        default=None, description="Share of hours between p10 and p90, tested on other days than those they come from."
    )
    greenest_regret: float | None = Field(
        default=None,
        description="By how much the six hours of the next day that were taken for the greenest emitted more than the "
        "six that were; a share.",
    )


class OutlookPoint(IntensityPoint):
    """One step of an outlook."""

    kind: Literal["measured", "held", "provider", "learned", "persistence"] = Field(
        description="`measured` by the provider; `held`: the last value, or yesterday's in a gap of the history, "
        "until a measured one comes; `provider`: its forecast; `learned`: ours, from the zone's history; "
        "`persistence`: the same hour of the day before."
    )

    @property
    def is_estimate(self) -> bool:
        """Whether the value is anything but a measurement."""
        return self.is_estimated or self.kind != "measured"


class IntensityOutlook(Message):
    """History, now and forecast as one curve of contiguous steps: each begins where the one before ends."""

    zone: str
    signal: Signal
    provider: str
    now: Instant
    grid_now: Instant
    time_scale: float = Field(description="Grid seconds per real second.")
    is_stale: bool = Field(description="The freshest measured value is past its age; what follows it is forecast.")
    measured_until: Instant | None = Field(description="Where the measured steps end; null when none is known.")
    forecast_generated_at: Instant | None = Field(description="When the provider made the forecast; null without one.")
    points: list[OutlookPoint] = Field(min_length=1)

    def as_domain(self) -> CarbonOutlook:
        """Return the outlook as policies and the ledger compute with it, in UTC seconds."""
        from services.core.domain.carbon import CarbonOutlook

        return CarbonOutlook(zone=self.zone, signal=self.signal, curve=curve_of(self.points), stale=self.is_stale)


class ZoneSource(Message):
    """Where the values of one signal of a zone come from, and how that goes."""

    signal: Signal
    provider: str
    attribution: str
    has_provider_forecast: bool
    step_s: float = Field(description="Usual length of an interval, real seconds.")
    max_age_s: float = Field(description="Age, since its interval began, past which a value is stale; real seconds.")
    time_scale: float = Field(description="Grid seconds per real second.")
    last_success_at: Instant | None = Field(description="When the provider last answered.")
    last_error: str | None = Field(description="Why it did not, if it has not since.")
    skipped_values: int = Field(description="Values refused since the process started: null, not finite, not dated.")


class Zone(Message):
    """A zone the service knows, and what it has for it."""

    zone: str
    name: str
    provider: str
    signals: list[Signal]
    has_provider_forecast: bool
    attribution: str
    sources: list[ZoneSource] = Field(default_factory=list[ZoneSource])


class ZoneList(Message):
    """The zones."""

    items: list[Zone]
