"""The interface of a provider of carbon intensities. Times are UTC seconds, intensities gCO2/kWh."""

from dataclasses import dataclass, field
from typing import Protocol

from services.core.domain.carbon import Signal
from services.core.domain.errors import WattshiftError

DAY_S = 86_400.0


class ProviderError(WattshiftError):
    """A provider did not give a usable answer; ``retry_after_s`` is how long it asked us to wait."""

    code = "unavailable"

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Point:
    """An intensity in force over ``[start_s, end_s)``; ``is_estimated`` if the provider did not measure it.

    ``fetched_s`` is when it was fetched, for points from the store.
    """

    start_s: float
    end_s: float
    gco2_per_kwh: float
    is_estimated: bool = False
    fetched_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Series:
    """Points in chronological order; ``skipped`` counts the rejected values of the answer."""

    points: tuple[Point, ...] = ()
    skipped: int = 0


@dataclass(frozen=True)
class ForecastIssue:
    """A forecast as the provider made it at ``generated_s``."""

    generated_s: float
    points: tuple[Point, ...]
    skipped: int = 0


@dataclass(frozen=True)
class Feed:
    """What a provider has for one zone. Lengths are real seconds unless named otherwise."""

    zone_name: str  #: The zone's name for people
    attribution: str  #: The attribution that the provider's licence requires
    step_s: float  #: Usual length of an interval
    max_age_s: float  #: Age, since the start of its interval, past which the newest value is stale
    poll_interval_s: float  #: How often to ask for new values
    history_s: float  #: How far back the provider has data; also the most that is fetched at the first start
    revision_s: float = 0.0  #: How far back values may still change
    ahead_s: float = 0.0  #: How far ahead values are known (a recording's); 0 for a live grid
    time_scale: float = 1.0  #: Grid seconds per real second
    forecast_interval_s: float | None = None  #: How often to ask for a forecast; ``None`` where the provider has none
    forecast_max_age_s: float = 0.0  #: Age past which a forecast is stale

    @property
    def has_forecast(self) -> bool:
        """Whether the provider forecasts this zone."""
        return self.forecast_interval_s is not None

    @property
    def day_s(self) -> float:
        """The length of a day of the grid."""
        return DAY_S / self.time_scale

    @property
    def horizon_s(self) -> float:
        """How far ahead the provider is asked to forecast, and our own forecast reaches: two days of the grid."""
        return 2 * self.day_s


class Provider(Protocol):
    """A source of intensities. Every method but ``feed`` may raise ``ProviderError``."""

    @property
    def name(self) -> str:
        """The provider's name in the settings."""
        ...

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The signals that it measures."""
        ...

    def feed(self, zone: str) -> Feed | None:
        """Return the feed of ``zone``; ``None`` if the provider has nothing for it."""
        ...

    def grid_s(self, zone: str, time_s: float) -> float:
        """Return what the grid's own clock shows at the real instant ``time_s``."""
        ...

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the newest interval, estimated by the provider if need be; empty if it knows none."""
        ...

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the measured intervals that begin in ``[start_s, end_s)``, as far as the provider has them."""
        ...

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return the newest forecast, reaching ``horizon_s`` ahead if possible; empty if there is none.

        A recording, which knows its future, also returns the forecasts that it will publish within ``ahead_s``.
        """
        ...
