"""Intensities of generation mixes, and the providers that publish them, in the shapes their documentation shows.

ENTSO-E: the "Transparency Platform RESTful API" guide (16.1.B&C, document A75; 14.1.D, A69). EIA: the answer of
``electricity/rto/fuel-type-data`` in the "Open Data API v2" documentation. eCO2mix: the data set
``eco2mix-national-tr`` of ODRÉ. Energinet: ``CO2Emis`` in the guide of Energi Data Service. None was asked live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_service.providers.eco2mix import ENTRY as ECO2MIX
from carbon_service.providers.eco2mix import PATH
from carbon_service.providers.eia import ENTRY as EIA
from carbon_service.providers.eia import ROWS_PER_PAGE
from carbon_service.providers.energinet import ENTRY as ENERGINET
from carbon_service.providers.entry import LiveSettings
from carbon_service.providers.entsoe import AREAS, BORDERS, generated
from carbon_service.providers.entsoe import ENTRY as ENTSOE
from carbon_service.providers.mix import FACTORS, SIGNALS, STORED, UNKNOWN, Mix, MixProvider, intensity, series_of
from carbon_service.providers.protocol import ExpectsGeneration, Feed, ProviderError
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

DIRECT, LIFE = Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE
INTERCHANGE = "/electricity/rto/interchange-data/data/"
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
    upstream.answer(INTERCHANGE, {"response": {"total": 0, "data": []}})
    eia = built(EIA, http, lambda: NOW_S, watch.pacing(), key="secret", url=upstream.url)
    found = await eia.history("US-CAL-CISO", DIRECT, hour(10), hour(15))
    assert [(p.start_s, round(p.gco2_per_kwh, 6)) for p in found.points] == [(hour(13), 111.0), (hour(14), 185.0)]
    assert found.skipped == 1
    asked = upstream.asked[0].query
    assert (asked["facets[respondent][0]"], asked["start"], asked["end"]) == ("CISO", "2026-05-14T10", "2026-05-14T16")
    assert (await eia.history("US-CAL-CISO", LIFE, hour(10), hour(15))).points[1].gco2_per_kwh == (490 + 48) / 2
    assert len(upstream.asked) == 2  # both signals are of the same answers
    assert [eia.area(zone) for zone in ("US-MIDA-PJM", "DE", "US-HI", "CA-ON")] == ["PJM", None, None, None]


async def test_eia_is_read_page_by_page(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> None:
    full = {"response": {"data": [a_row("2026-05-14T14", "NG", 1)] * ROWS_PER_PAGE}}
    upstream.answer("/electricity/rto/fuel-type-data/data/", full, {"response": {"data": []}})
    upstream.answer(INTERCHANGE, {"response": {"data": []}})
    eia = built(EIA, http, lambda: NOW_S, watch.pacing(), key="secret", url=upstream.url)
    assert len((await eia.history("US-CAL-CISO", DIRECT, hour(10), hour(15))).points) == 1
    assert [each.query["offset"] for each in upstream.asked] == ["0", str(ROWS_PER_PAGE), "0"]


async def test_what_flows_in_from_an_authority_has_its_mix_and_from_one_that_tells_nothing_is_unknown(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    def flow(other: str, value: object) -> dict[str, object]:
        return {"period": "2026-05-14T14", "fromba": "CISO", "toba": other, "value": value}

    rows = [a_row("2026-05-14T14", "NG", "60"), a_row("2026-05-14T14", "SUN", "40")]
    theirs = [
        a_row("2026-05-14T14", "COL", "500"),
        a_row("2026-05-14T14", "WAT", "500"),
        a_row("2026-05-14T14", "PS", 9),
    ]
    fuels = [{"response": {"data": each}} for each in (rows, theirs, [])]
    upstream.answer("/electricity/rto/fuel-type-data/data/", *fuels)
    flows = [flow("BPAT", "-100"), flow("CFE", -11), flow("AZPS", "50"), flow("NEVP", None)]
    upstream.answer(INTERCHANGE, {"response": {"data": flows}})
    eia = built(EIA, http, lambda: NOW_S, watch.pacing(), key="secret", url=upstream.url)
    (point,) = (await eia.history("US-CAL-CISO", DIRECT, hour(13), hour(14))).points
    assert point.gco2_per_kwh == pytest.approx((60 * 370 + 50 * 760) / 200)
    assert not point.is_estimated  # 11 of 211 MW are unknown
    asked = [each.query.get("facets[respondent][0]") or each.query["facets[fromba][0]"] for each in upstream.asked]
    assert asked == ["CISO", "CISO", "BPAT", "CFE"]


class Areas(MixProvider[LiveSettings]):
    """Areas with mixes and flows; an area whose mixes are None cannot be asked."""

    def __init__(self, mixes: dict[str, list[Mix] | None], flows: dict[str, dict[float, float]] | None) -> None:
        self._feed = Feed("", "", 1.0, 1.0, 1.0, 1.0)
        self._now_s = lambda: 10.0
        self._mixes, self._flows = mixes, flows

    def area(self, zone: str) -> str | None:
        return zone

    async def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        found = self._mixes.get(area, [])
        if found is None:
            raise ProviderError("away")
        for mix in found:
            yield mix

    async def inflows(self, area: str, start_s: float, end_s: float) -> dict[str, dict[float, float]]:
        if self._flows is None:
            raise ProviderError("away")
        return self._flows


POWER = st.dictionaries(
    st.sampled_from([*FACTORS, STORED, UNKNOWN]), st.floats(-50.0, 1e4) | st.just(0.0), min_size=1, max_size=5
)


@given(own=POWER, others=st.lists(st.tuples(POWER, st.floats(0.0, 1e4)), max_size=4), signal=st.sampled_from(SIGNALS))
def test_what_is_used_is_a_mean_of_what_is_generated_there_and_next_door(
    own: dict[str, float], others: list[tuple[dict[str, float], float]], signal: Signal
) -> None:
    mixes: dict[str, list[Mix] | None] = {f"n{at}": [Mix(0.0, power)] for at, (power, _) in enumerate(others)}
    flows = {f"n{at}": {0.0: mw} for at, (_, mw) in enumerate(others)}
    areas = Areas({"own": [Mix(0.0, own)], **mixes}, flows)
    found = asyncio.run(areas.history("own", signal, 0.0, 1.0)).points
    alone, _ = intensity(own, signal)
    known = [value for power, mw in others if mw > 0 and (value := intensity(power, signal)[0]) is not None]
    known += [] if alone is None else [alone]
    assert bool(found) == bool(known)
    if found:
        assert min(known) * (1 - 1e-9) <= found[0].gco2_per_kwh <= max(known) * (1 + 1e-9)
        if not any(mw for _, mw in others):
            assert found[0].gco2_per_kwh == pytest.approx(alone)


def test_flows_or_mixes_that_cannot_be_had_leave_the_zones_own_as_an_estimate() -> None:
    coal, wind, gap = {"coal": 100.0}, {"wind": 50.0, "gas": 50.0}, {"wind": 50.0}

    def found(theirs: list[Mix] | None, flows: dict[str, dict[float, float]] | None) -> list[tuple[float, bool]]:
        areas = Areas({"own": [Mix(0.0, coal), Mix(1.0, coal)], "n": theirs}, flows)
        made = asyncio.run(areas.history("own", DIRECT, 0.0, 2.0)).points
        return [(round(point.gco2_per_kwh, 6), point.is_estimated) for point in made]

    flows = {"n": {0.0: 100.0, 1.0: 100.0}}
    assert found([Mix(0.0, wind), Mix(1.0, wind)], flows) == [((760 + 185) / 2, False)] * 2
    assert found([Mix(0.0, wind), Mix(1.0, gap)], flows)[1] == (760.0, True)
    assert found([Mix(0.0, wind)], {"n": {0.0: 100.0, 1.0: 5.0}})[1] == (760.0, False)
    assert found(None, flows) == found([], flows) == [(760.0, True)] * 2
    assert found([], None) == [(760.0, True)] * 2
    assert found(None, {"n": {0.0: 0.0}}) == [(760.0, False)] * 2


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


async def test_flows_of_entsoe_are_asked_for_by_border(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    def answered(query: dict[str, str]) -> bytes:
        spain = query["in_Domain"] == AREAS["ES"]
        if query["documentType"] == "A75":
            return a_document(a_series("B14" if spain else "B05", {1: 700, 2: 700, 3: 700}))
        flow = a_series("", {1: 0, 2: 300, 3: 0}).replace("inBiddingZone_Domain", "in_Domain")
        return a_document(flow) if query["out_Domain"] == AREAS["ES"] else a_document()

    upstream.answer("/api", answered)
    entsoe = built(ENTSOE, http, lambda: NOW_S, watch.pacing(), token="secret", url=upstream.url)
    found = await entsoe.history("PT", DIRECT, hour(10), hour(13))
    assert [point.gco2_per_kwh for point in found.points] == pytest.approx([760.0, 532.0, 760.0])
    borders = [each.query["out_Domain"] for each in upstream.asked if each.query["documentType"] == "A11"]
    assert borders == [AREAS["ES"]]
    zones = {zone for pair in BORDERS.split() for zone in pair.split("/")}
    assert zones == set(AREAS) - {"IE", "SE"}
    germany = await entsoe.inflows(AREAS["DE"], hour(10), hour(13))
    assert len(germany) == 11
    assert upstream.asked[-1].query["in_Domain"] == "10Y1001A1001A82H"


async def test_wind_and_sun_of_entsoe_are_means_of_hours_by_source(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    quarters: dict[int, float] = {1: 0, 2: 40, 3: 80, 4: 120, 5: 8}
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
