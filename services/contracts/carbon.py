"""Grid carbon intensity in gCO2/kWh. Average and marginal signals are different quantities and are never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from services.contracts.schema import Flag, Instant, Message, Real, maybe, said
from services.core.domain.signal import Signal

if TYPE_CHECKING:
    from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Measured

Clock = Literal["real", "grid"]
"""Whether a duration is in real seconds or in grid seconds, which pass faster while a recording is replayed faster.
A day of grid time is always 86,400 grid seconds."""


LearnedMethod = Literal["ridge", "pretrained", "blend", "persistence"]


class IntensityPoint(Message):
    """An intensity that applies from `start_at` until `end_at`."""

    start_at: Instant
    end_at: Instant
    gco2_per_kwh: Real
    is_estimated: Flag = False
    fetched_at: Instant | None = maybe(
        "When the value was fetched, or learned; null for one derived from other values."
    )

    @property
    def is_estimate(self) -> bool:
        """Whether the value is anything but a measurement."""
        return self.is_estimated


def curve_of(points: Sequence[IntensityPoint]) -> CarbonCurve:
    """Return contiguous steps, each ending where the next begins, as the core's curve, in UTC seconds.

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


class OfSource(Message):
    """What is said of one signal of a zone, by one provider."""

    zone: str
    signal: Signal
    provider: str


class CurrentIntensity(OfSource):
    """The current intensity."""

    point: IntensityPoint
    fetched_at: Instant
    age_s: float = said("Time since the value's interval began.")
    is_stale: bool = said("Whether the value is older than it should be; it is still the latest one known.")
    time_scale: float = said(
        "Grid seconds per real second; above 1 while a recording is replayed faster than real time.", default=1
    )
    grid_now: Instant | None = maybe("The time by the grid's clock: the recorded time while a recording is replayed.")


class IntensityHistory(OfSource):
    """Past intensities, oldest first."""

    points: list[IntensityPoint]
    next_cursor: str | None = None

    def as_domain(self) -> Measured:
        """Return the points as the core's, in UTC seconds; ``DomainError`` if none, or not in order of time."""
        import numpy as np  # here, as in ``curve_of``

        from services.core.domain.carbon import Measured

        columns = [(each.start_at.timestamp(), each.end_at.timestamp(), each.gco2_per_kwh) for each in self.points]
        starts_s, ends_s, intensity = np.array(columns, dtype=np.float64).reshape(-1, 3).T
        return Measured.of(starts_s, ends_s, intensity, np.array([each.is_estimate for each in self.points], np.bool_))


class ForecastPoint(IntensityPoint):
    """A forecast intensity."""

    p10: float | None = maybe("10th percentile, from the errors in the backtest; null without a backtest.")
    p90: float | None = maybe("90th percentile, from the errors in the backtest; null without a backtest.")

    @property
    def is_estimate(self) -> bool:
        """Always true."""
        return True


class IntensityForecast(OfSource):
    """Forecast intensities from now on."""

    method: str = said(
        "Source of the first points: `provider`, or our own `ridge`, `blend` (both learned), `pretrained` "
        "(learned on other grids) or `persistence`."
    )
    generated_at: Instant
    is_stale: bool
    time_scale: float = 1
    learned_from: Instant | None = maybe(
        "From this time on, where the provider's forecast has ended, points are our learned forecast."
    )
    persistence_from: Instant | None = maybe(
        "From this time on, where every other forecast has ended, points are our persistence forecast."
    )
    points: list[ForecastPoint]


class MethodErrors(Message):
    """The errors of a forecasting method."""

    method: LearnedMethod
    mean_absolute_error_gco2_per_kwh: list[float] = said("For day 1, day 2 and so on ahead.")


class ForecastBacktest(OfSource):
    """The errors that our own forecasts would have had on the last part of a zone's history."""

    method: LearnedMethod = said(
        "The method in use, which is the one with the smaller error. `blend` combines the last value "
        "with the day before; it is for steps shorter than an hour and for a history too short for "
        "`ridge`."
    )
    note: str = said("Why the method is not a learned one, if it is not.")
    generated_at: Instant = said("When the method was learned and tested.")
    first_at: Instant | None = maybe("Time of the first tested forecast, by the grid's clock.")
    last_at: Instant | None = maybe("Time of the last tested forecast, by the grid's clock.")
    forecasts: int = said("Number of forecasts tested; 0 while there is too little history.", default=0)
    errors: list[MethodErrors] = Field(default_factory=list[MethodErrors])
    coverage: float | None = maybe("Fraction of hours between p10 and p90, on days that were not used to find these.")
    greenest_regret: float | None = maybe(
        "How much more carbon-intensive the six hours of the next day with the lowest forecast were than "
        "the six that were in fact lowest, as a fraction."
    )


class OutlookPoint(IntensityPoint):
    """One step of an outlook."""

    kind: Literal["measured", "held", "provider", "learned", "persistence"] = said(
        "`measured`: measured by the provider; `held`: the last value (or, in a gap of the history, that "
        "of the day before) until a new one is measured; `provider`: the provider's forecast; `learned`: "
        "our forecast, learned from the zone's history; `persistence`: the same hour of the day before."
    )
    p10: float | None = maybe("10th percentile of a forecast, from the errors in the backtest; null without one.")
    p90: float | None = maybe("90th percentile of a forecast, from the errors in the backtest; null without one.")

    @property
    def is_estimate(self) -> bool:
        """Whether the value is anything but a measurement."""
        return self.is_estimated or self.kind != "measured"


class HourlyPrices(Message):
    """What electricity costs in consecutive hours. Beyond them, the same hour of the last day known is assumed."""

    currency: str
    start_at: Instant
    per_kwh: list[float] = Field(min_length=1, description="One price for each hour; a gap is filled likewise.")


class IntensityOutlook(OfSource):
    """History, current value and forecast as one curve of contiguous steps."""

    now: Instant
    grid_now: Instant
    time_scale: float = said("Grid seconds per real second.")
    is_stale: bool = said("Whether the latest measured value is older than it should be.")
    measured_until: Instant | None = said("End of the last measured step; null if none is known.")
    forecast_generated_at: Instant | None = said("When the provider made its forecast; null without one.")
    points: list[OutlookPoint] = Field(min_length=1)
    prices: HourlyPrices | None = maybe("Of the same time, by the real clock; null: unknown.")

    def as_domain(self) -> CarbonOutlook:
        """Return the outlook as policies and the ledger compute with it, in UTC seconds."""
        import numpy as np  # here, as in ``curve_of``

        from services.core.domain.carbon import CarbonOutlook
        from services.core.domain.prices import PriceCurve

        low = high = None
        if any(point.p10 is not None and point.p90 is not None for point in self.points):
            low, high = (
                np.array(
                    [point.gco2_per_kwh if each is None else each for point, each in zip(self.points, of, strict=True)]
                )
                for of in ([point.p10 for point in self.points], [point.p90 for point in self.points])
            )
        curve, of = curve_of(self.points), self.prices
        prices = of and PriceCurve(of.start_at.timestamp(), np.array(of.per_kwh))
        return CarbonOutlook(self.zone, self.signal, curve, self.is_stale, low, high, prices)


class ZoneSource(Message):
    """The source of the values of one signal in a zone, and its state."""

    signal: Signal
    provider: str
    attribution: str
    has_provider_forecast: bool
    step_s: float = said("Usual length of an interval, in real seconds.")
    max_age_s: float = said("Real seconds since the start of its interval after which a value is stale.")
    time_scale: float = said("Grid seconds per real second.")
    last_success_at: Instant | None = said("When the provider last answered successfully.")
    last_error: str | None = said("The latest error, if the provider has not answered successfully since.")
    skipped_values: int = said(
        "Values rejected since the process started because they were null, not finite or without a time."
    )


class Zone(Message):
    """A grid zone, and the data available for it."""

    zone: str
    name: str
    provider: str
    signals: list[Signal]
    has_provider_forecast: bool
    attribution: str
    sources: list[ZoneSource] = Field(default_factory=list[ZoneSource])


class ZoneList(Message):
    """The known zones."""

    items: list[Zone]
