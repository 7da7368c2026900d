"""Grid carbon intensity, in gCO2/kWh; average and marginal signals are different things and never mixed."""

from __future__ import annotations

from pydantic import Field

from services.contracts.schema import Instant, Message
from services.core.domain.carbon import Signal


class IntensityPoint(Message):
    """An intensity in force from `start_at` until `end_at`."""

    start_at: Instant
    end_at: Instant
    gco2_per_kwh: float
    is_estimated: bool = False


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


class IntensityHistory(Message):
    """Past intensities, oldest first."""

    zone: str
    signal: Signal
    provider: str
    points: list[IntensityPoint]
    next_cursor: str | None = None


class IntensityForecast(Message):
    """Intensities ahead, from now on."""

    zone: str
    signal: Signal
    provider: str
    method: str = Field(description="`provider` or the name of our own model, such as `persistence`.")
    generated_at: Instant
    is_stale: bool
    time_scale: float = 1
    points: list[IntensityPoint]


class Zone(Message):
    """A zone the service knows, and what it has for it."""

    zone: str
    name: str
    provider: str
    signals: list[Signal]
    has_provider_forecast: bool
    attribution: str


class ZoneList(Message):
    """The zones."""

    items: list[Zone]
