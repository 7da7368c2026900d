"""PJM's Data Miner 2, in the shapes its feeds answer."""

from datetime import UTC, datetime, timedelta

import httpx
import pytest

from carbon_service.providers.pjm import ENTRY
from carbon_service.providers.protocol import Provider, ProviderError
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

ZONE, SIGNAL = "US-MIDA-PJM", Signal.MARGINAL
FEED = "/fivemin_marginal_emissions"
NOW = datetime(2024, 2, 20, 5, 30, tzinfo=UTC)
G_PER_LB = 0.45359237


def a_row(at: datetime, rate: object) -> dict[str, object]:
    return {"datetime_beginning_utc": f"{at:%Y-%m-%dT%H:%M:%S}", "pnode_id": 1, "marginal_co2_rate": rate}


def a_page(*rows: dict[str, object]) -> dict[str, object]:
    return {"links": [], "items": list(rows), "searchSpecification": {"rowCount": 50000}, "totalRows": len(rows)}


@pytest.fixture
def pjm(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> Provider:
    return built(ENTRY, http, NOW.timestamp, watch.pacing(), key="a-key", url=upstream.url)


async def test_rates_are_converted_and_negative_ones_kept(pjm: Provider, upstream: Upstream) -> None:
    rows = [a_row(NOW - timedelta(minutes=10), 1402.0), a_row(NOW - timedelta(minutes=5), -614.25)]
    upstream.answer(FEED, a_page(*reversed(rows)))
    found = await pjm.history(ZONE, SIGNAL, NOW.timestamp() - 3600, NOW.timestamp())
    assert [point.gco2_per_kwh for point in found.points] == pytest.approx([1402 * G_PER_LB, -614.25 * G_PER_LB])
    (asked,) = upstream.asked
    assert asked.headers["ocp-apim-subscription-key"] == "a-key"
    assert asked.query["pnode_id"] == "1"
    assert asked.query["startRow"] == "1"
    assert asked.query["datetime_beginning_ept"] == "02/19/2024 22:30to02/20/2024 01:30"


async def test_the_hour_that_autumn_repeats_is_read_twice_over(pjm: Provider, upstream: Upstream) -> None:
    first = datetime(2024, 11, 3, 5, 55, tzinfo=UTC)  # 01:55 for the first time
    rows = [a_row(first, 10.0), a_row(first + timedelta(hours=1), 20.0)]  # 01:55 again
    upstream.answer(FEED, a_page(*rows))
    found = await pjm.history(ZONE, SIGNAL, first.timestamp(), first.timestamp() + 7200)
    assert [point.start_s - first.timestamp() for point in found.points] == [0.0, 3600.0]
    assert upstream.asked[0].query["datetime_beginning_ept"] == "11/03/2024 00:55to11/03/2024 03:55"


async def test_what_was_not_asked_for_and_what_is_no_number(pjm: Provider, upstream: Upstream) -> None:
    rows = [
        a_row(NOW - timedelta(hours=9), 1.0),
        a_row(NOW - timedelta(minutes=5), None),
        a_row(NOW - timedelta(minutes=10), "NaN"),
        {"datetime_beginning_utc": "2/20/2024", "marginal_co2_rate": 3},
    ]
    upstream.answer(FEED, a_page(*rows))
    found = await pjm.history(ZONE, SIGNAL, NOW.timestamp() - 3600, NOW.timestamp())
    assert (found.points, found.skipped) == ((), 3)


async def test_a_full_page_is_followed_by_the_next(
    pjm: Provider, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carbon_service.providers.pjm.ROWS_PER_PAGE", 2)
    rows = [a_row(NOW - timedelta(minutes=5 * age), float(age)) for age in (1, 2, 3)]
    upstream.answer(FEED, a_page(*rows[:2]), a_page(rows[2]))
    found = await pjm.history(ZONE, SIGNAL, NOW.timestamp() - 3600, NOW.timestamp())
    assert len(found.points) == 3
    assert [one.query["startRow"] for one in upstream.asked] == ["1", "3"]


async def test_the_newest_value_and_no_forecast(pjm: Provider, upstream: Upstream) -> None:
    upstream.answer(FEED, a_page(*[a_row(NOW - timedelta(minutes=age), float(age)) for age in (25, 15, 20)]))
    (point,) = (await pjm.latest(ZONE, SIGNAL)).points
    assert point.gco2_per_kwh == pytest.approx(15 * G_PER_LB)
    assert await pjm.forecast(ZONE, SIGNAL, 3600) == ()


async def test_no_more_than_six_requests_a_minute(pjm: Provider, upstream: Upstream, watch: Watch) -> None:
    upstream.answer(FEED, a_page())
    started_s = watch.now_s
    for _ in range(7):
        await pjm.latest(ZONE, SIGNAL)
    assert watch.now_s - started_s == pytest.approx(60.0)


async def test_a_key_that_is_refused(pjm: Provider, upstream: Upstream) -> None:
    upstream.answer(FEED, Answer({"message": "Access denied due to invalid subscription key"}, status=401))
    with pytest.raises(ProviderError) as caught:
        await pjm.latest(ZONE, SIGNAL)
    assert caught.value.status == 401


async def test_the_hourly_feed(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> None:
    pjm = built(ENTRY, http, NOW.timestamp, watch.pacing(), key="a-key", resolution="hourly", url=upstream.url)
    upstream.answer("/hourly_marginal_emissions", a_page(a_row(NOW - timedelta(hours=1), 1000.0)))
    (point,) = (await pjm.latest(ZONE, SIGNAL)).points
    assert point.end_s - point.start_s == 3600
