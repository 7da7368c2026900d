"""Intensities of generation mixes, and the providers that publish them, in the shapes their documentation shows.

ENTSO-E: the "Transparency Platform RESTful API" guide (16.1.B&C, document A75; 14.1.D, A69). EIA: the answer of
``electricity/rto/fuel-type-data`` in the "Open Data API v2" documentation. eCO2mix: the data set
``eco2mix-national-tr`` of ODRÉ. Energinet: ``CO2Emis`` in the guide of Energi Data Service. None was asked live.
"""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.providers.eco2mix import ENTRY as ECO2MIX
from carbon_service.providers.eco2mix import PATH
from carbon_service.providers.eia import ENTRY as EIA
from carbon_service.providers.eia import ROWS_PER_PAGE
from carbon_service.providers.energinet import ENTRY as ENERGINET
from carbon_service.providers.entsoe import ENTRY as ENTSOE
from carbon_service.providers.entsoe import generated
from carbon_service.providers.mix import STORED, UNKNOWN, Mix, intensity, series_of
from carbon_service.providers.protocol import ExpectsGeneration, ProviderError
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

DIRECT, LIFE = Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE
NOW_S = datetime(2026, 5, 14, 16, 0, tzinfo=UTC).timestamp()


def hour(at: int, minute: int = 0) -> float:
    return datetime(2026, 5, 14, at, minute, tzinfo=UTC).timestamp()


def test_the_intensity_is_the_mean_of_factors_by_what_each_source_generates() -> None:
    mix = {"coal": 100.0, "gas": 100.0, "wind": 200.0, "solar": -3.0}
    assert intensity(mix, DIRECT) == (pytest.approx((760 + 370) / 4), False)
    assert intensity(mix, LIFE) == (pytest.approx((820 + 490 + 22) / 4), False)


def test_stores_and_the_unknown_have_no_part_in_it_but_much_unknown_is_an_estimate() -> None:
    mix = {"coal": 50.0, "nuclear": 50.0}
    assert intensity({**mix, STORED: 900.0, UNKNOWN: 10.0}, DIRECT) == (380.0, False)
    assert intensity({**mix, UNKNOWN: 11.0}, DIRECT) == (380.0, True)
    assert intensity({STORED: 1.0, UNKNOWN: 1.0}, DIRECT)[0] is None
    assert intensity({"coal": 0.0}, DIRECT)[0] is None


def test_an_interval_without_a_source_that_just_had_its_share_is_refused_and_a_small_one_may_go() -> None:
    whole, small = {"coal": 50.0, "wind": 50.0}, {"coal": 99.0, "wind": 1.0}
    found = series_of([Mix(2.0, {"wind": 50.0}), Mix(0.0, whole), Mix(1.0, {"coal": 50.0})], DIRECT, 1.0)
    assert [(point.start_s, point.gco2_per_kwh) for point in found.points] == [(0.0, 380.0)]
    assert found.skipped == 2
    assert len(series_of([Mix(0.0, small), Mix(1.0, {"coal": 9.0})], DIRECT, 1.0).points) == 2


def a_row(period: str, fuel: str, value: object) -> dict[str, object]:
    return {
        **{"period": period, "respondent": "CISO", "respondent-name": "California Independent System Operator"},
        **{"fueltype": fuel, "type-name": fuel, "value": value, "value-units": "megawatthours"},
    }


async def test_eia_names_hours_by_their_end(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> None:
    rows = [
        *(
            a_row("2026-05-14T14", "NG", "300"),
            a_row("2026-05-14T14", "SUN", "600"),
            a_row("2026-05-14T14", "SNB", 100),
        ),
        *(a_row("2026-05-14T15", "NG", "500"), a_row("2026-05-14T15", "SUN", "500"), a_row("2026-05-14T15", "BAT", -9)),
        *(a_row("2026-05-14T15", "WND", None), a_row("never", "NG", "1")),
    ]
    upstream.answer("/electricity/rto/fuel-type-data/data/", {"response": {"total": len(rows), "data": rows}})
    eia = built(EIA, http, lambda: NOW_S, watch.pacing(), key="secret", url=upstream.url)
    found = await eia.history("US-CAL-CISO", DIRECT, hour(10), hour(15))
    assert [(p.start_s, round(p.gco2_per_kwh, 6)) for p in found.points] == [(hour(13), 111.0), (hour(14), 185.0)]
    assert found.skipped == 1
    asked = upstream.asked[0].query
    assert (asked["facets[respondent][0]"], asked["start"], asked["end"]) == ("CISO", "2026-05-14T10", "2026-05-14T16")
    assert (await eia.history("US-CAL-CISO", LIFE, hour(10), hour(15))).points[1].gco2_per_kwh == (490 + 48) / 2
    assert len(upstream.asked) == 1  # both signals are of one answer
    assert [eia.area(zone) for zone in ("US-MIDA-PJM", "DE", "US-HI", "CA-ON")] == ["PJM", None, None, None]


async def test_eia_is_read_page_by_page(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> None:
    full = {"response": {"data": [a_row("2026-05-14T14", "NG", 1)] * ROWS_PER_PAGE}}
    upstream.answer("/electricity/rto/fuel-type-data/data/", full, {"response": {"data": []}})
    eia = built(EIA, http, lambda: NOW_S, watch.pacing(), key="secret", url=upstream.url)
    assert len((await eia.history("US-CAL-CISO", DIRECT, hour(10), hour(15))).points) == 1
    assert [each.query["offset"] for each in upstream.asked] == ["0", str(ROWS_PER_PAGE)]


def a_quarter(at: str, gas: float | None, own: float | None, **more: float) -> dict[str, object]:
    base = {"charbon": 24, "fioul": 180, "nucleaire": 36_420, "eolien": 5_980, "solaire": 6_840, "hydraulique": 7_420}
    known: dict[str, object] = {name: None if gas is None else value for name, value in {**base, **more}.items()}
    return {"date_heure": f"2026-05-14T{at}:00+00:00", "taux_co2": own, "gaz": gas, "bioenergies": 920, **known}


async def test_france_is_the_mean_of_its_quarters_and_what_contradicts_its_own_figure_is_doubted(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    to_come = dict.fromkeys(a_quarter("15:30", 0, 0))
    upstream.answer(
        PATH,
        [
            *(a_quarter("14:00", 4_000, 35), a_quarter("14:15", 4_240, 35), a_quarter("14:30", 4_120, 300)),
            {**to_come, "date_heure": "2026-05-14T15:30:00+00:00"},
        ],
    )
    eco2mix = built(ECO2MIX, http, lambda: NOW_S, watch.pacing(), url=upstream.url)
    found = await eco2mix.history("FR", DIRECT, hour(14), hour(16))
    total = 24 + 180 + 36_420 + 5_980 + 6_840 + 7_420 + 4_120 + 920
    right = (24 * 760 + 180 * 774 + 4_120 * 370) / total
    assert [point.start_s for point in found.points] == [hour(14), hour(14, 30)]
    assert [point.gco2_per_kwh for point in found.points] == pytest.approx([right, right])
    assert [point.is_estimated for point in found.points] == [False, True]
    assert found.skipped == 0


async def test_denmark_is_cut_to_the_range_whatever_clock_the_answer_was_asked_by(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    rows = [
        {"Minutes5UTC": f"2026-05-14T{at}:00", "Minutes5DK": "", "PriceArea": "DK1", "CO2Emission": value}
        for at, value in (("13:55", 1), ("14:00", 160.0), ("14:05", 158.0), ("15:00", 2))
    ]
    upstream.answer("/CO2Emis", {"total": 4, "dataset": "CO2Emis", "records": rows})
    upstream.answer("/CO2EmisProg", {"records": [{**rows[1], "Minutes5UTC": "2026-05-14T16:00:00"}]})
    energinet = built(ENERGINET, http, lambda: NOW_S, watch.pacing(), url=upstream.url)
    found = await energinet.history("DK-DK1", DIRECT, hour(14), hour(15))
    assert [(point.start_s, point.gco2_per_kwh) for point in found.points] == [(hour(14), 160.0), (hour(14, 5), 158.0)]
    assert upstream.asked[0].query["filter"] == '{"PriceArea":["DK1"]}'
    (issue,) = await energinet.forecast("DK-DK1", DIRECT, 86_400.0)
    assert [(point.start_s, point.gco2_per_kwh) for point in issue.points] == [(NOW_S, 160.0)]
    assert energinet.feed("DK") is None


def a_series(psr: str, points: dict[int, float], curve: str = "A01", domain: str = "in", step: str = "PT60M") -> str:
    inner = "".join(f"<Point><position>{at}</position><quantity>{mw}</quantity></Point>" for at, mw in points.items())
    return (
        f"<TimeSeries><businessType>A01</businessType>"
        f'<{domain}BiddingZone_Domain.mRID codingScheme="A01">10Y1001A1001A83F</{domain}BiddingZone_Domain.mRID>'
        f"<quantity_Measure_Unit.name>MAW</quantity_Measure_Unit.name><curveType>{curve}</curveType>"
        f"<MktPSRType><psrType>{psr}</psrType></MktPSRType><Period><timeInterval><start>2026-05-14T10:00Z</start>"
        f"<end>2026-05-14T13:00Z</end></timeInterval><resolution>{step}</resolution>{inner}</Period></TimeSeries>"
    )


def a_document(*series: str) -> bytes:
    name = "urn:iec62325.351:tc57wg16:451-6:generationloaddocument:3:0"
    return f'<?xml version="1.0"?><GL_MarketDocument xmlns="{name}">{"".join(series)}</GL_MarketDocument>'.encode()


async def test_entsoe_is_read_by_type_and_positions_left_out_repeat_the_one_before(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    content = a_document(
        a_series("B05", {1: 100, 2: 300, 3: 100}),
        a_series("B19", {1: 100}, curve="A03"),
        a_series("B10", {1: 50, 2: 50, 3: 50}, domain="out"),
        a_series("B16", {at: 100 if at < 9 else 200 for at in range(1, 13)}, step="PT15M"),
    )
    upstream.answer("/api", Answer(raw=content))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    found = await entsoe.history("DE", DIRECT, hour(10), hour(13))
    assert [point.start_s for point in found.points] == [hour(10), hour(11), hour(12)]
    assert [point.gco2_per_kwh for point in found.points] == pytest.approx([760 / 3, 3 * 760 / 5, 760 / 4])
    asked = upstream.asked[0].query
    assert (asked["documentType"], asked["processType"], asked["in_Domain"]) == ("A75", "A16", "10Y1001A1001A83F")
    assert (asked["periodStart"], asked["periodEnd"]) == ("202605141000", "202605141300")


async def test_wind_and_sun_of_entsoe_are_means_of_hours_by_source(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    quarters = {1: 0, 2: 40, 3: 80, 4: 120, 5: 8}
    content = a_document(
        a_series("B16", quarters, step="PT15M"), a_series("B18", {1: 30}, curve="A03"), a_series("B99", {1: 1})
    )
    upstream.answer("/api", Answer(raw=content))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    assert isinstance(entsoe, ExpectsGeneration)
    found = await entsoe.expected("DE", hour(10), hour(13))
    assert found == {
        **{hour(10): {"solar": 60.0, "wind at sea": 30.0}, hour(11): {"solar": 8.0, "wind at sea": 30.0}},
        **{hour(12): {"wind at sea": 30.0}},
    }
    asked = upstream.asked[0].query
    assert (asked["documentType"], asked["processType"], asked["in_Domain"]) == ("A69", "A01", "10Y1001A1001A82H")


async def test_a_long_range_of_entsoe_is_asked_for_by_the_week_and_no_data_is_no_error(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    nothing = b"<Acknowledgement_MarketDocument><Reason><code>999</code></Reason></Acknowledgement_MarketDocument>"
    upstream.answer("/api", Answer(raw=nothing))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    assert (await entsoe.history("DE", DIRECT, NOW_S - 15 * 86_400, NOW_S)).points == ()
    ends = [each.query["periodEnd"] for each in upstream.asked]
    assert ends == ["202605061600", "202605131600", "202605141600"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"<a", b'<!DOCTYPE a [<!ENTITY b "cc">]><a>&b;</a>', b"\xff", b"<a>" * 100_000]
)
async def test_what_is_no_document_is_an_error(
    content: bytes, http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    upstream.answer("/api", Answer(raw=content))
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    with pytest.raises(ProviderError, match="the answer is") as caught:
        await entsoe.latest("DE", DIRECT)
    assert "secret" not in str(caught.value)


def test_a_document_of_nonsense_is_counted_or_left_out() -> None:
    assert generated(a_document()) == []
    assert generated(a_document(a_series("B05", {1: 1}, step="P1Y"))) == [("B05", None, 0.0)]
    odd = a_series("B05", {1: 1}).replace("<quantity>1<", "<quantity>NaN<")
    assert generated(a_document(odd)) == []
    far = a_series("B05", {1: 1}, curve="A03").replace("2026-05-14T13:00Z", "9999-05-14T13:00Z")
    assert len(generated(a_document(far))) == 7 * 96
