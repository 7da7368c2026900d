"""The shapes of the Green Software Foundation's Carbon Aware Web API: camelCase, g/kWh, durations in minutes."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel
from pydantic.alias_generators import to_camel

from services.contracts.instants import LenientInstant
from services.contracts.queries import Plain
from services.contracts.schema import Int

MOST_LOCATIONS = 50
MOST_REQUESTS = 100
LONGEST_WINDOW_MIN = 14 * 24 * 60

LocationName = Annotated[str, Field(max_length=100)]


class _Shape(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)


class EmissionsData(_Shape):
    """What was measured over one interval; ``duration`` is ``[d.]hh:mm:ss``."""

    location: str
    time: datetime
    rating: float
    duration: str


class EmissionsForecastPoint(_Shape):
    """The mean over a window of ``duration`` minutes that begins at ``timestamp``."""

    location: str
    timestamp: datetime
    duration: float | int
    value: float


class EmissionsForecast(_Shape):
    """A forecast as the means of sliding windows, and the best of them."""

    generated_at: datetime
    requested_at: datetime
    location: str
    data_start_at: datetime
    data_end_at: datetime
    window_size: float | int
    optimal_data_points: list[EmissionsForecastPoint]
    forecast_data: list[EmissionsForecastPoint]


class ForecastRequest(_Shape):
    """Asks for the forecast as it was at ``requestedAt``."""

    requested_at: LenientInstant
    location: LocationName
    data_start_at: LenientInstant | None = None
    data_end_at: LenientInstant | None = None
    window_size: Int | None = Field(default=None, ge=1, le=LONGEST_WINDOW_MIN)


class IntensityRequest(_Shape):
    """A period to average over."""

    location: LocationName
    start_time: LenientInstant
    end_time: LenientInstant


class CarbonIntensity(_Shape):
    """The time-weighted mean of a period; null if nothing was measured."""

    location: str
    start_time: datetime
    end_time: datetime
    carbon_intensity: float | None


class Location(_Shape):
    """The approximate position of a zone; null if unknown."""

    name: str
    latitude: float | None
    longitude: float | None


class Period(BaseModel):
    """``time`` and ``toTime``, which newer clients call ``startTime`` and ``endTime``."""

    time: LenientInstant | None = None
    toTime: LenientInstant | None = None  # noqa: N815  (that API's spelling)
    startTime: LenientInstant | None = None  # noqa: N815
    endTime: LenientInstant | None = None  # noqa: N815


class OneLocation(Period):
    """A location and a period."""

    location: LocationName


class Locations(Period):
    """Several locations, each as a separate parameter, and a period."""

    location: list[LocationName] = Field(default_factory=list[str], max_length=MOST_LOCATIONS)
    locations: list[LocationName] = Field(default_factory=list[str], max_length=MOST_LOCATIONS)


class ForecastsQuery(BaseModel):
    """Which part of the current forecasts, and the length of the windows."""

    location: list[LocationName] = Field(min_length=1, max_length=MOST_LOCATIONS)
    dataStartAt: LenientInstant | None = None  # noqa: N815  (that API's spelling)
    dataEndAt: LenientInstant | None = None  # noqa: N815
    windowSize: Annotated[int | None, Plain] = Field(default=None, ge=1, le=LONGEST_WINDOW_MIN)  # noqa: N815


class ForecastRequests(RootModel[list[ForecastRequest]]):
    """Forecasts to look up, each as it was known at some time."""

    root: list[ForecastRequest] = Field(min_length=1, max_length=MOST_REQUESTS)


class IntensityRequests(RootModel[list[IntensityRequest]]):
    """Periods to average over."""

    root: list[IntensityRequest] = Field(min_length=1, max_length=MOST_REQUESTS)
