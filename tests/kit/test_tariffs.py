"""The file of what electricity costs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from services.kit.tariffs import Tariff, by_hour, priced, read_hours, read_tariffs

FILE = """
currency = "EUR"
[zones.DE]
day_ahead = "entsoe"
per_kwh = 0.09
demand_per_kw_month = 11
timezone = "Europe/Berlin"
hours = [
    {from = 17, to = 20, days = "weekdays", months = [11, 12], per_kwh = 0.08},
    {from = 22, to = 6, per_kwh = -0.02},
]
"""


def berlin(day: int, hour: int, month: int = 11) -> float:
    return datetime(2026, month, day, hour, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


@pytest.fixture
def tariff(tmp_path: Path) -> Tariff:
    (path := tmp_path / "prices.toml").write_text(FILE.replace("\n", "\r\n"), "utf-8-sig", newline="")  # from Windows
    found = read_tariffs(path)
    assert found.currency == "EUR"
    return found.zones["DE"]


def test_an_hour_costs_what_holds_in_it_by_the_local_clock(tariff: Tariff) -> None:
    friday, saturday = 27, 28
    hours = [berlin(friday, 16), berlin(friday, 17), berlin(friday, 19), berlin(friday, 20), berlin(saturday, 18)]
    assert [tariff.added(at) for at in hours] == pytest.approx([0.09, 0.17, 0.17, 0.09, 0.09])
    nights = [berlin(friday, 22), berlin(saturday, 5), berlin(saturday, 6), berlin(1, 18, month=10)]
    assert [tariff.added(at) for at in nights] == pytest.approx([0.07, 0.07, 0.09, 0.09])


@pytest.mark.parametrize(
    ("zone", "shares"),
    [
        ("Europe/Berlin", [1, 1, 1, 0]),
        ("Asia/Kolkata", [0.5, 1, 1, 0.5]),
        ("Asia/Kathmandu", [0.75, 1, 1, 0.25]),
        ("Australia/Eucla", [0.75, 1, 1, 0.25]),
    ],
)
def test_hours_of_a_clock_between_those_of_utc_cost_for_as_long_as_they_last(zone: str, shares: list[float]) -> None:
    tariff = Tariff.model_validate({"timezone": zone, "hours": [{"from": 17, "to": 20, "per_kwh": 1.0}]})
    five = datetime(2026, 11, 27, 17, tzinfo=ZoneInfo(zone)).timestamp()
    hours = [five - five % 3_600 + 3_600 * at for at in range(-1, 5)]
    assert list(priced(tariff, hours, {}).values()) == [0, *shares, 0]


def test_an_hour_without_its_day_ahead_price_has_none(tariff: Tariff) -> None:
    hours = [berlin(27, 12), berlin(27, 13)]
    assert priced(tariff, hours, {hours[1]: -0.01}) == {hours[1]: pytest.approx(0.08)}
    assert priced(Tariff(per_kwh=0.3), hours, {}) == dict.fromkeys(hours, 0.3)


def test_shorter_steps_become_the_mean_of_their_hour(tmp_path: Path) -> None:
    (path := tmp_path / "day.csv").write_text(
        "start_at,per_kwh\n2026-11-27T12:15:00Z,0.4\n2026-11-27T12:00:00Z,0.2\n2026-11-27T15:00:00+02:00,-0.1\n"
    )
    noon = datetime(2026, 11, 27, 12, tzinfo=ZoneInfo("UTC")).timestamp()
    assert read_hours(path) == pytest.approx({noon: 0.3, noon + 3_600: -0.1})
    assert by_hour([(noon, float("nan")), (noon, 1.0)]) == {noon: 1.0}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("currency = 'euro'\n[zones]", "prices.toml: currency: "),
        ("currency = 'EUR'\n[zones.DE]\ntimezone = 'Berlin'", "zones.DE.timezone: .*must be a time zone"),
        ("currency = 'EUR'\n[zones.DE]\nper_khw = 1", "zones.DE.per_khw: is not a known field"),
        ("currency = 'EUR'\n[zones.DE]\nhours = [{from = 24, to = 3, per_kwh = 1}]", "zones.DE.hours.0.from: "),
        ("currency = ", "prices.toml: "),
    ],
)
def test_a_file_that_says_something_else_is_one_clear_error(tmp_path: Path, said: str, why: str) -> None:
    (path := tmp_path / "prices.toml").write_text(said)
    with pytest.raises(ValueError, match=why):
        read_tariffs(path)
    with pytest.raises(ValueError, match=r"none\.toml: No such file"):
        read_tariffs(tmp_path / "none.toml")


def test_a_row_that_is_no_price_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "day.csv").write_text("start_at,per_kwh\n2026-11-27T12:00:00Z,0.2\n2026-11-27T13:00:00Z,\n")
    with pytest.raises(ValueError, match=r"day\.csv, row 3: needs start_at"):
        read_hours(path)
