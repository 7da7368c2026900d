"""What simulated clusters pay, and what their policies know of prices."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from services.core.domain.prices import PriceCurve
from services.core.domain.units import S_PER_HOUR
from services.simulator.engine import simulate
from services.simulator.engine.grid import Grid
from services.simulator.engine.recorder import Bill
from services.simulator.raw import TraceFormatError
from services.simulator.readers.carbon import read_carbon, with_prices
from services.simulator.workload import ClusterSpec, SitePrices
from tests.support.workloads import START_S, a_trace, a_workload

DAY_S = 86_400.0


def site(per_kwh: list[float], **more: object) -> SitePrices:
    return SitePrices(PriceCurve(START_S // S_PER_HOUR * S_PER_HOUR, np.array(per_kwh)), "EUR", **more)  # type: ignore[arg-type]


def test_energy_is_paid_by_the_hour_and_each_months_highest_hour_besides() -> None:
    first = datetime(2023, 1, 31, 22, tzinfo=UTC).timestamp()
    bill = Bill(SitePrices(PriceCurve(first, np.array([0.1, 0.2, -0.1])), "EUR", demand_per_kw_month=10.0))
    bill.draw(first + 1_800, first + 2.5 * S_PER_HOUR, 2_000.0)
    bill.draw(first + 2.5 * S_PER_HOUR, first + 3 * S_PER_HOUR, 6_000.0)
    money, demand_money = bill.figures()
    assert money == pytest.approx(1.0 * 0.1 + 2.0 * 0.2 - 4.0 * 0.1)
    assert demand_money == pytest.approx(10.0 * (2.0 + 4.0))


def test_a_run_costs_its_energy_times_the_price_and_says_nothing_without_prices() -> None:
    trace, cluster = a_trace((300.0,) * 48), ClusterSpec.parse("1x4:A100")
    work = a_workload([(0.0, 3 * S_PER_HOUR, 2), (S_PER_HOUR, 2 * S_PER_HOUR, 1)])
    without = simulate("joint", work, cluster, trace).summary()
    assert (without["currency"], without["money"], without["demand_money"]) == (None, None, None)
    flat = simulate("joint", work, cluster, replace(trace, prices=site([0.25], demand_per_kw_month=4.0))).summary()
    assert flat["money"] == pytest.approx(0.25 * flat["energy_kwh"])
    assert 0 < flat["demand_money"] <= 4.0 * flat["peak_power_w"] / 1_000
    changed = {name for name in flat if flat[name] != without[name]}
    assert changed == {"currency", "money", "demand_money"}, "prices alone steer nothing"


def test_a_days_prices_are_known_from_noon_of_the_day_before() -> None:
    midnight = START_S // DAY_S * DAY_S
    trace = replace(a_trace((300.0,) * 120), prices=site([float(hour) for hour in range(96)], day_ahead=True))

    def known_until_s(at_s: float, prices: SitePrices | None = trace.prices) -> float:
        curve = Grid(replace(trace, prices=prices), DAY_S, 2 * DAY_S).outlooks(at_s)[0].prices
        assert curve is not None
        return curve.start_s + curve.per_kwh.size * S_PER_HOUR

    assert known_until_s(midnight + DAY_S + 11.9 * S_PER_HOUR) == midnight + 2 * DAY_S
    assert known_until_s(midnight + DAY_S + 12 * S_PER_HOUR) == midnight + 3 * DAY_S
    assert known_until_s(midnight + DAY_S, site([1.0] * 96)) == midnight + 3 * DAY_S, "a tariff is known as far"


TOML = 'currency = "GBP"\n[zones.GB]\nday_ahead = "day.csv"\nper_kwh = 0.1\n'


def test_a_file_of_tariffs_prices_the_zone_of_a_run(tmp_path: Path) -> None:
    (path := tmp_path / "prices.toml").write_text(TOML)
    (tmp_path / "day.csv").write_text("start_at,per_kwh\n2023-08-01T00:00Z,0.2\n2023-08-01T02:00Z,-0.1\n")
    trace = with_prices(read_carbon("GB", start="2023-08-01", days=1), path)
    assert trace.prices is not None
    assert trace.prices.curve.per_kwh.tolist() == pytest.approx([0.3, 0.3, 0.0])
    assert (trace.prices.currency, trace.prices.day_ahead) == ("GBP", True)


@pytest.mark.parametrize(
    ("toml", "rows", "why"),
    [
        (TOML.replace("GB]", "DE]"), "", "it has no zone GB; it has DE"),
        (TOML, "2021-08-01T00:00Z,0.2\n", "no prices of the simulated time"),
        (TOML.replace("day.csv", "entsoe"), "", "entsoe: .*No such file"),
    ],
)
def test_a_file_without_the_prices_is_one_error(tmp_path: Path, toml: str, rows: str, why: str) -> None:
    (path := tmp_path / "prices.toml").write_text(toml)
    (tmp_path / "day.csv").write_text("start_at,per_kwh\n" + rows)
    with pytest.raises(TraceFormatError, match=why):
        with_prices(read_carbon("GB", start="2023-08-01", days=1), path)
