"""Prices of electricity: from providers, in the shapes of their documentation, to what the scheduler asks for.

ENTSO-E: the publication document of 12.1.D (document A44) in the "Transparency Platform RESTful API" guide. Energinet:
``DayAheadPrices`` of Energi Data Service. Neither was asked live.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from carbon_service.app import create_app
from carbon_service.prices import PriceWatch
from carbon_service.providers.energinet import ENTRY as ENERGINET
from carbon_service.providers.entsoe import ENTRY as ENTSOE
from carbon_service.providers.protocol import ProviderError
from carbon_service.repository import Repository
from carbon_service.zones import ZoneConfigError
from services.contracts.carbon import IntensityOutlook
from tests.carbon.harness import NOW_S, Now, running, settings
from tests.carbon.upstream import Answer, Upstream, Watch, built

HOUR_S = 3_600.0


def hour(at: int, minute: int = 0) -> float:
    return datetime(2026, 5, 14, at, minute, tzinfo=UTC).timestamp()


def a_series(points: dict[int, float], *, curve: str = "A01", unit: str = "EUR", sequence: int | None = None) -> str:
    inner = "".join(
        f"<Point><position>{at}</position><price.amount>{p}</price.amount></Point>" for at, p in points.items()
    )
    name = "classificationSequence_AttributeInstanceComponent.position"
    return (
        f"<TimeSeries><mRID>1</mRID><auction.type>A01</auction.type><businessType>A62</businessType>"
        f'<in_Domain.mRID codingScheme="A01">10Y1001A1001A82H</in_Domain.mRID>'
        f"<currency_Unit.name>{unit}</currency_Unit.name><price_Measure_Unit.name>MWH</price_Measure_Unit.name>"
        f"{'' if sequence is None else f'<{name}>{sequence}</{name}>'}<curveType>{curve}</curveType><Period>"
        f"<timeInterval><start>2026-05-14T10:00Z</start><end>2026-05-14T12:00Z</end></timeInterval>"
        f"<resolution>PT15M</resolution>{inner}</Period></TimeSeries>"
    )


def a_document(*series: str) -> bytes:
    name = "urn:iec62325.351:tc57wg16:451-3:publicationdocument:7:3"
    root = "Publication_MarketDocument"
    return f'<?xml version="1.0"?><{root} xmlns="{name}">{"".join(series)}</{root}>'.encode()


async def test_entsoes_prices_are_of_the_first_auction_and_held_where_left_out(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    first, second = a_series({1: 80.0, 3: -20.0}, curve="A03", sequence=1), a_series({1: 999.0}, sequence=2)
    upstream.answer("/api", Answer(raw=a_document(first, second)))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    found = await entsoe.prices("DE", "EUR", hour(10), hour(12))
    assert found[:3] == [(hour(10), 0.08), (hour(10, 15), 0.08), (hour(10, 30), -0.02)]
    assert len(found) == 8
    asked = upstream.asked[0].query
    assert (asked["documentType"], asked["in_Domain"], asked["out_Domain"]) == ("A44", *["10Y1001A1001A82H"] * 2)
    assert (asked["periodStart"], asked["periodEnd"]) == ("202605141000", "202605141200")


async def test_prices_in_another_currency_are_refused(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    upstream.answer("/api", Answer(raw=a_document(a_series({1: 80.0}, unit="PLN"))))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    with pytest.raises(ProviderError, match="in PLN, not in EUR"):
        await entsoe.prices("PL", "EUR", hour(10), hour(12))
    energinet = built(ENERGINET, http, lambda: NOW_S, watch.pacing(), url=upstream.url)
    with pytest.raises(ProviderError, match="EUR and DKK, not in GBP"):
        await energinet.prices("DK-DK1", "GBP", hour(10), hour(12))


async def test_energinets_prices_are_those_of_the_area(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    rows = [
        {
            "TimeUTC": f"2026-05-14T{at}:00",
            "TimeDK": "",
            "PriceArea": "DK1",
            "DayAheadPriceEUR": 50.5,
            "DayAheadPriceDKK": value,
        }
        for at, value in (("10:00", 377.0), ("10:15", None), ("10:30", 380.5))
    ]
    upstream.answer("/DayAheadPrices", {"total": 3, "dataset": "DayAheadPrices", "records": rows})
    energinet = built(ENERGINET, http, lambda: NOW_S, watch.pacing(), url=upstream.url)
    found = await energinet.prices("DK-DK1", "DKK", hour(10), hour(11))
    assert found == [(hour(10), 0.377), (hour(10, 30), 0.3805)]
    assert upstream.asked[0].query["filter"] == '{"PriceArea":["DK1"]}'
    assert (await energinet.prices("SE3", "EUR", hour(10), hour(11)))[0] == (hour(10), 0.0505)
    assert upstream.asked[1].query["filter"] == '{"PriceArea":["SE3"]}'


class Market:
    """A provider whose prices are as many hundredths as the hour's number since the epoch, modulo 24."""

    until_s = NOW_S + 30 * HOUR_S
    fails = False

    async def prices(self, area: str, currency: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
        if self.fails:
            raise ProviderError("away")
        hours = range(int(start_s // HOUR_S), int(min(end_s, self.until_s) // HOUR_S))
        return [(at * HOUR_S, at % 24 / 100) for at in hours]


@pytest.fixture
async def emptied(repository: Repository) -> Repository:
    async with repository._engine.begin() as connection:
        await connection.execute(text("TRUNCATE carbon_prices"))
    return repository


async def test_prices_are_kept_by_the_hour_and_those_of_the_past_stay_as_they_were(
    emptied: Repository, tmp_path: Path
) -> None:
    (path := tmp_path / "prices.toml").write_text(
        'currency = "EUR"\n[zones.DE]\nday_ahead = "market"\nper_kwh = 0.1\n[zones.SE]\nper_kwh = 0.3\n'
    )
    now, market = Now(), Market()
    kept = PriceWatch(emptied, path, {"market": market}, 10 * 86_400.0, now)
    await kept.keep()
    this_hour = NOW_S // HOUR_S * HOUR_S
    currency, known = await emptied.prices("DE", this_hour - 2 * HOUR_S, this_hour + 200 * HOUR_S) or ("", {})
    assert currency == "EUR"
    assert min(known) == this_hour - 2 * HOUR_S
    assert max(known) == this_hour + 29 * HOUR_S, "as far as the market has met"
    assert known[this_hour] == 0.1 + this_hour // HOUR_S % 24 / 100
    assert await emptied.priced_until_s("SE") == this_hour + 95 * HOUR_S

    path.write_text('currency = "EUR"\n[zones.DE]\nday_ahead = "market"\nper_kwh = 0.5\n[zones.SE]\nper_kwh = 0.7\n')
    now.s, market.fails = NOW_S + HOUR_S, True
    await kept.keep()
    assert (await emptied.prices("DE", this_hour, NOW_S + 99 * HOUR_S) or ("", {}))[1][this_hour] == known[this_hour]
    prices = (await emptied.prices("SE", this_hour, this_hour + 3 * HOUR_S) or ("", {}))[1]
    assert [*prices.values()] == [0.3, 0.7, 0.7], (
        "an hour that is over keeps its price; one provider's fault is its own"
    )

    now.s += 20 * 86_400.0
    await kept.keep()
    assert await emptied.prices("DE", 0.0, NOW_S + 99 * HOUR_S) is None, "kept no longer than values"


async def test_the_outlook_has_the_prices_of_its_time_and_policies_read_them(
    emptied: Repository, empty_database: str, tmp_path: Path
) -> None:
    (path := tmp_path / "prices.toml").write_text('currency = "SEK"\n[zones.SE]\nper_kwh = 1.25\n')
    async with running(empty_database, Now(), zones=("SE", "GB"), prices_file=path) as client:
        answer = await client.get("/v1/carbon/SE/outlook", params=(asked := {"past_s": 3_600, "ahead_s": 7_200}))
        for _ in range(3_000):  # until they are first kept
            if answer.json()["prices"] is not None:
                break
            await asyncio.sleep(0.01)
            answer = await client.get("/v1/carbon/SE/outlook", params=asked)
        found = IntensityOutlook.model_validate_json(answer.content)
        assert found.prices is not None
        assert (found.prices.currency, set(found.prices.per_kwh)) == ("SEK", {1.25})
        assert found.prices.start_at.timestamp() <= NOW_S - 3_600
        curve = found.as_domain().prices
        assert curve is not None
        assert curve.start_s + curve.per_kwh.size * HOUR_S >= NOW_S + 7_200
        assert (await client.get("/v1/carbon/GB/outlook")).json()["prices"] is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[zones.FR]", "it prices FR, which CARBON_ZONES does not name"),
        ('[zones.SE]\nday_ahead = "nordpool"', "SE: nordpool is no provider, and no file there"),
        ('[zones.SE]\nday_ahead = "entsoe"', "needs CARBON_ENTSOE_TOKEN"),
        ("[zones.SE]\nper_kwh = 'much'", "zones.SE.per_kwh: must be a number"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_at_the_start(tmp_path: Path, said: str, why: str) -> None:
    (path := tmp_path / "prices.toml").write_text(f'currency = "EUR"\n{said}\n')
    with pytest.raises((ZoneConfigError, ValueError), match=why):
        create_app(settings(zones=("SE",), prices_file=path, DATABASE_URL="postgresql://nowhere/none"))
