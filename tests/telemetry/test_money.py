"""Money in reports: each hour's energy at its price, rows that add up, and what is charged for the highest hour."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal

import pytest

from tests.support.control_plane import OPERATOR, USER, service_headers
from tests.support.ledger import fold_now
from tests.telemetry.conftest import Plane
from tests.telemetry.test_hours import BEGAN, ask, two_days
from tests.telemetry.test_lines import export, rows_of

HOUR = timedelta(hours=1)
FIRST = BEGAN.replace(minute=0, second=0, microsecond=0)


@pytest.fixture
async def priced(plane: Plane) -> AsyncIterator[Plane]:
    """Prices of two zones for three days, as the carbon service stores them."""
    async with plane.database.connection() as connection:
        await connection.executemany(
            "INSERT INTO carbon_prices VALUES ($1, $2, 'EUR', $3, $4, now())",
            [
                (FIRST + at * HOUR, f"{plane.zone}-{zone}", Decimal(at % 24 - 3) / 100 + zone, Decimal(12 * zone))
                for at in range(72)
                for zone in range(2)
            ],
        )
    yield plane
    async with plane.database.connection() as connection:
        await connection.execute("DELETE FROM carbon_prices")


def price(row: dict[str, str]) -> Decimal:
    at = datetime.fromisoformat(row["start_at"])
    return Decimal(int((at - FIRST) / HOUR) % 24 - 3) / 100 + int(row["zone"][-1])


def cost(rows: list[dict[str, str]]) -> float:
    return float(sum(Decimal(row["facility_energy_j"]) * price(row) for row in rows)) / 3.6e6


@pytest.mark.parametrize("group", ["job", "tenant", "day", "project"])
async def test_rows_cost_their_energy_by_the_hour_and_add_up(priced: Plane, group: str) -> None:
    await two_days(priced)
    rows = rows_of(await export(priced))
    report = await ask(priced, group_by=group)
    assert report["currency"] == "EUR"
    lines = {line["group"]: line["accounts"]["money"] for line in report["lines"]}
    if group == "job":
        assert lines == {name: pytest.approx(cost([row for row in rows if row["job_id"] == name])) for name in lines}
    if group == "day":
        of_jobs = [row for row in rows if row["job_id"]]
        assert lines == {
            day: pytest.approx(cost([row for row in of_jobs if row["start_at"].startswith(day)])) for day in lines
        }
    assert report["total_accounts"]["money"] == pytest.approx(cost(rows))
    assert sum(lines.values()) + report["idle_accounts"]["money"] == pytest.approx(report["total_accounts"]["money"])
    end = (FIRST + 70 * HOUR).isoformat()
    answer = await priced.http.get(
        "/v1/reports/hours", params={"start": FIRST.isoformat(), "end": end}, headers=service_headers(OPERATOR)
    )
    assert sum(each["money"] for each in answer.json()["items"]) == pytest.approx(report["total_accounts"]["money"])


async def test_the_highest_hour_of_each_month_is_charged_where_a_charge_is_stated(priced: Plane) -> None:
    await two_days(priced)
    hours: dict[datetime, float] = {}
    for row in rows_of(await export(priced)):
        if row["zone"].endswith("-1"):
            at = datetime.fromisoformat(row["start_at"]).replace(minute=0, second=0, microsecond=0)
            hours[at] = hours.get(at, 0.0) + float(row["facility_energy_j"]) / 3.6e6
    report = await ask(priced)
    assert [each["month"] for each in report["demand"]] == ["2026-03", "2026-04"]
    for each in report["demand"]:
        at, peak_kw = max(
            ((at, kw) for at, kw in hours.items() if f"{at:%Y-%m}" == each["month"]), key=lambda of: of[1]
        )
        assert (each["zone"], datetime.fromisoformat(each["peak_at"])) == (f"{priced.zone}-1", at)
        assert each["peak_kw"] == pytest.approx(peak_kw)
        assert each["money"] == pytest.approx(12 * peak_kw)
    seen = await priced.http.get("/v1/reports/footprint", headers=service_headers(USER))
    assert seen.json()["demand"] == []


async def test_money_is_unknown_where_an_hour_has_no_price_and_of_days_that_were_summed(priced: Plane) -> None:
    await two_days(priced)
    async with priced.database.connection() as connection:
        await connection.execute("DELETE FROM carbon_prices WHERE start_at = $1", FIRST + 5 * HOUR)
    accounts = (await ask(priced))["total_accounts"]
    assert accounts["money"] is None
    assert f"price of electricity in {priced.zone}-0" in accounts["unknown"]
    later = (FIRST + 6 * HOUR).isoformat()
    assert (await ask(priced, start=later))["total_accounts"]["money"] is not None

    assert await fold_now(priced.database, 86_400.0) > 0
    accounts = (await ask(priced, start=later))["total_accounts"]
    assert accounts["money"] is None
    assert f"price of electricity in {priced.zone}-1" in accounts["unknown"]


async def test_without_prices_nothing_is_said_of_money(plane: Plane) -> None:
    await two_days(plane)
    report = await ask(plane)
    assert (report["currency"], report["total_accounts"]["money"], report["demand"]) == (None, None, [])
    assert not any("price" in each for each in report["total_accounts"]["unknown"])
