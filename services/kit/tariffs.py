"""What a site pays for electricity, from one file in TOML: by zone a day-ahead price, tariffs by hour, demand charges.

    currency = "EUR"
    [zones.DE]
    day_ahead = "entsoe"
    per_kwh = 0.09
    demand_per_kw_month = 11.0
    timezone = "Europe/Berlin"
    hours = [{from = 17, to = 20, days = "weekdays", months = [11, 12, 1, 2], per_kwh = 0.08}]

An hour's price is the day-ahead one, if any, with ``per_kwh`` and that of each entry of ``hours`` that holds in it.
"""

import csv
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, ValidationError

from services.contracts.invalid import explained
from services.contracts.schema import Int, Message, Real
from services.core.domain.units import S_PER_HOUR
from services.kit.text import decimal, decoded

MOST_HOURS = 200_000  #: Of a file of prices


def _zone_known(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise ValueError("must be a time zone, such as Europe/Berlin") from None
    return name


class TariffHours(Message):
    """Hours of the day, local time, that cost more or less than others; from 22 to 6 is over midnight."""

    since: Int = Field(alias="from", ge=0, le=23)
    to: Int = Field(ge=1, le=24)
    days: Literal["all", "weekdays", "weekends"] = "all"
    months: tuple[Annotated[Int, Field(ge=1, le=12)], ...] = tuple(range(1, 13))
    per_kwh: Real

    def hold(self, local: datetime) -> bool:
        """Return whether they hold at a local time; the days and months are those of that time itself."""
        hour, is_weekend = local.hour, local.weekday() > 4
        within = self.since <= hour < self.to if self.since < self.to else hour >= self.since or hour < self.to
        return within and local.month in self.months and self.days != ("weekdays" if is_weekend else "weekends")


class Tariff(Message):
    """What is paid in one zone, in the currency of the file."""

    day_ahead: str | None = Field(default=None, min_length=1)
    """A provider of day-ahead prices, ``PROVIDER:AREA``, or a file of ``start_at,per_kwh`` beside this one."""
    per_kwh: Real = 0
    hours: list[TariffHours] = Field(default_factory=list[TariffHours])
    timezone: Annotated[str, AfterValidator(_zone_known)] = "UTC"
    demand_per_kw_month: Real = Field(default=0, ge=0)
    """For the highest mean of an hour in each calendar month, UTC."""

    def added(self, hour_s: float) -> float:
        """Return what an hour, by its beginning in UTC seconds, costs without the day-ahead price, per kWh."""
        # Hours of a clock that is 30 or 45 minutes from UTC begin within those of UTC.
        quarters = [datetime.fromtimestamp(hour_s + 900 * at, ZoneInfo(self.timezone)) for at in range(4)]
        return self.per_kwh + fmean(sum(each.per_kwh for each in self.hours if each.hold(at)) for at in quarters)


class Tariffs(Message):
    """All zones' tariffs, in one currency."""

    currency: str = Field(pattern=r"^[A-Z]{3}$")
    zones: dict[str, Tariff]


def read_tariffs(path: Path) -> Tariffs:
    """Return the tariffs of a file; ``ValueError`` names the file and the entry that is wrong."""
    try:
        return Tariffs.model_validate(tomllib.loads(decoded(path.read_bytes())))
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path.name}: {'.'.join(map(str, first['loc']))}: {explained(first)}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path.name}: {error}") from error


def read_hours(path: Path) -> dict[float, float]:
    """Return the prices per kWh of a file by the beginning of their hours; shorter steps become their mean.

    Raises:
        ValueError: It cannot be read, or a row is no instant and price; the message names the row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path.name}: {error}") from error
    found: list[tuple[float, float]] = []
    for number, row in enumerate(rows[:MOST_HOURS], start=2):
        try:
            at = datetime.fromisoformat(row["start_at"] or "")
            found.append(((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), decimal(row["per_kwh"] or "")))
        except (KeyError, ValueError, OverflowError):
            raise ValueError(f"{path.name}, row {number}: needs start_at, an instant, and per_kwh, a number") from None
    return by_hour(found)


def by_hour(prices: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Return the mean price of each hour, in order, from instants (UTC seconds) and prices; those not finite count
    nothing."""
    hours: dict[float, list[float]] = defaultdict(list)
    for at_s, price in prices:
        if abs(price) < float("inf"):
            hours[at_s - at_s % S_PER_HOUR].append(price)
    return {hour_s: fmean(hours[hour_s]) for hour_s in sorted(hours)}


def priced(tariff: Tariff, hours_s: Iterable[float], day_ahead: Mapping[float, float]) -> dict[float, float]:
    """Return what each of these hours costs, per kWh; those whose day-ahead price is needed and not known are left out.

    Args:
        day_ahead: Day-ahead prices by hour; ignored where the tariff has none.
    """
    return {
        hour_s: tariff.added(hour_s) + (day_ahead[hour_s] if tariff.day_ahead else 0.0)
        for hour_s in hours_s
        if not tariff.day_ahead or hour_s in day_ahead
    }
