"""The interface of a provider of carbon intensities. Times are UTC seconds, intensities gCO2/kWh."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

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
    fetched_s: float | None = dataclasses.field(default=None, compare=False)


@dataclass(frozen=True)
class ForecastIssue:
    """A forecast as the provider made it at ``generated_s``."""

    generated_s: float
    points: tuple[Point, ...]
    skipped: int = 0


@dataclass(frozen=True)
class Series:
    """Points in chronological order; ``skipped`` counts the rejected values of the answer."""

    points: tuple[Point, ...] = ()
    skipped: int = 0

    def issued(self, generated_s: float) -> tuple[ForecastIssue, ...]:
        """Return the forecast that the points are, made at ``generated_s``; none without points."""
        return (ForecastIssue(generated_s, self.points, self.skipped),) if self.points else ()


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


@runtime_checkable
class ExpectsGeneration(Protocol):
    """A provider that has day-ahead forecasts of wind and sun, too; what is learned takes them into account."""

    async def expected(self, zone: str, start_s: float, end_s: float) -> Mapping[float, Mapping[str, float]]:
        """Return what wind and sun were expected to generate the day before, MW by source, by hour of the range.

        Raises:
            ProviderError: It gave no usable answer.
        """
        ...


def instant_s(value: Any) -> float | None:
    """Return an ISO 8601 instant as UTC seconds; without an offset it is taken as UTC. ``None`` for anything else."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """Return a finite number, even if written as a decimal string; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def rows(answer: Any, *path: str) -> list[Any]:
    """Return the list of rows at ``path`` of an answer; ``ProviderError`` if there is no list there."""
    found = field(answer, *path)
    if not isinstance(found, list):
        raise ProviderError(f"the answer has no list at {'.'.join(path) or 'its root'}")
    return found


def field(row: Any, *path: str) -> Any:
    """Return the value at ``path`` of a row; ``None`` if there is none."""
    found = row
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def written(time_s: float, form: str, zone: tzinfo = UTC) -> str:
    """Return UTC seconds as text, in a format of ``strftime``."""
    return datetime.fromtimestamp(time_s, zone).strftime(form)


Reading = tuple[float | None, float | None, bool]
"""When an interval begins (UTC seconds), its value, whether it is estimated; ``None`` for a value that is refused."""


def readings(
    found: Iterable[Any],
    start: str,
    *value: str,
    scale: float = 1.0,
    within: tuple[float, float] = (-math.inf, math.inf),
    estimated: str = "",
) -> Iterator[Reading]:
    """Yield the readings of rows, given the names of their fields; those that begin outside ``within`` are left out."""
    for row in found:
        start_s, amount = instant_s(field(row, start)), number(field(row, *value))
        if start_s is None or within[0] <= start_s < within[1]:
            yield start_s, None if amount is None else amount * scale, field(row, estimated) is True


def series(readings: Iterable[Reading], step_s: float) -> Series:
    """Return readings as points in chronological order; of two at one instant, the later in the answer counts.

    An interval ends where the next begins, but lasts no longer than ``step_s``: a gap stays a gap, and a step that is
    shorter than usual stays short.
    """
    found: dict[float, tuple[float, bool]] = {}
    skipped = 0
    for start_s, value, is_estimated in readings:
        if start_s is None or value is None:
            skipped += 1
        else:
            found[start_s] = (value, is_estimated)
    starts = sorted(found)
    ends = [min(start + step_s, following) for start, following in pairwise(starts)]
    ends += [start + step_s for start in starts[-1:]]
    return Series(tuple(Point(start, end, *found[start]) for start, end in zip(starts, ends, strict=True)), skipped)
