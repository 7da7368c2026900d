"""``/v1/carbon`` as its callers see it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import pairwise

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from carbon_service.providers.recorded import load
from services.contracts.carbon import CurrentIntensity, IntensityForecast, IntensityHistory, IntensityOutlook, ZoneList
from services.contracts.problems import Problem
from tests.carbon.harness import NOW_S, Now, running

ZONE = "/v1/carbon/US-CAL-CISO"
START_S = datetime(2021, 8, 1, tzinfo=UTC).timestamp()


@pytest.fixture(scope="module")
async def api(database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    zones = ("US-CAL-CISO", "GB", "DE")
    async with running(database_url, Now(), zones=zones, replay_speed=600.0) as client:
        yield client


async def problem(api: httpx.AsyncClient, path: str) -> Problem:
    answer = await api.get(path)
    assert answer.headers["content-type"] == "application/problem+json", (path, answer.text)
    return Problem.model_validate_json(answer.content)


async def test_zones_say_who_is_to_be_named(api: httpx.AsyncClient) -> None:
    items = ZoneList.model_validate_json((await api.get("/v1/carbon/zones")).content).items
    zones = {zone.zone: zone for zone in items}
    assert zones["DE"].has_provider_forecast
    assert "DACF" in zones["DE"].attribution
    assert not zones["GB"].has_provider_forecast
    assert "CC BY 4.0" in zones["GB"].attribution
    assert zones["GB"].sources[0].step_s == 6.0


async def test_the_current_intensity(api: httpx.AsyncClient) -> None:
    current = CurrentIntensity.model_validate_json((await api.get(f"{ZONE}/current")).content)
    row = int((START_S - load("US-CAL-CISO").times_s[0]) // 3600)
    assert current.point.gco2_per_kwh == load("US-CAL-CISO").measured[row]
    assert not current.is_stale
    assert (current.time_scale, current.age_s) == (600.0, 0.0)
    assert current.grid_now == datetime(2021, 8, 1, tzinfo=UTC)


async def test_history_comes_in_pages_that_join(api: httpx.AsyncClient) -> None:
    whole = IntensityHistory.model_validate_json((await api.get(f"{ZONE}/history")).content)
    assert len(whole.points) == 25
    pages, cursor = [], None
    while True:
        query = {"limit": "7"} | ({"cursor": cursor} if cursor else {})
        page = IntensityHistory.model_validate_json((await api.get(f"{ZONE}/history", params=query)).content)
        pages.append(page.points)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert [len(page) for page in pages] == [7, 7, 7, 4]
    assert [point for page in pages for point in page] == whole.points


async def test_history_of_a_range_overlaps_it(api: httpx.AsyncClient) -> None:
    start, end = (datetime.fromtimestamp(NOW_S + offset, UTC).isoformat() for offset in (-15, -12))
    answer = await api.get(f"{ZONE}/history?start={start}&end={end}")  # the plus signs are not encoded
    (point,) = IntensityHistory.model_validate_json(answer.content).points
    assert point.start_at.timestamp() == NOW_S - 18


async def test_the_forecast_is_the_recorded_one_and_then_persistence(api: httpx.AsyncClient) -> None:
    answer = await api.get(f"{ZONE}/forecast", params={"horizon_s": 172_800, "clock": "grid"})
    forecast = IntensityForecast.model_validate_json(answer.content)
    assert forecast.method == "provider"
    assert forecast.generated_at.timestamp() == NOW_S
    assert forecast.persistence_from is not None
    assert forecast.persistence_from.timestamp() == NOW_S + 144
    assert forecast.points[-1].end_at.timestamp() == NOW_S + 288
    recording = load("US-CAL-CISO")
    assert recording.forecast is not None
    row = int((START_S - recording.times_s[0]) // 3600)
    assert forecast.points[5].gco2_per_kwh == recording.forecast[row + 5]


async def test_without_a_provider_forecast_it_is_the_same_hour_yesterday(api: httpx.AsyncClient) -> None:
    forecast = IntensityForecast.model_validate_json((await api.get("/v1/carbon/GB/forecast")).content)
    assert (forecast.method, forecast.persistence_from) == ("persistence", None)
    by_start = {point.start_at.timestamp(): point.gco2_per_kwh for point in forecast.points}
    yesterday = START_S + 5 * 3600 - 86_400
    assert by_start[NOW_S + 30] == load("GB").measured[np.searchsorted(load("GB").times_s, yesterday)]
    history = IntensityHistory.model_validate_json((await api.get("/v1/carbon/GB/history")).content)
    then = {point.start_at.timestamp(): point.gco2_per_kwh for point in history.points}
    assert by_start[NOW_S + 30] == then[NOW_S + 30 - 144]


@pytest.mark.parametrize("clock", ["real", "grid"])
async def test_the_outlook_is_one_contiguous_curve(api: httpx.AsyncClient, clock: str) -> None:
    scale = 600 if clock == "grid" else 1
    query = {"past_s": 144 * scale, "ahead_s": 288 * scale, "clock": clock}
    outlook = IntensityOutlook.model_validate_json((await api.get(f"{ZONE}/outlook", params=query)).content)
    assert all(one.end_at == following.start_at for one, following in pairwise(outlook.points))
    assert outlook.points[0].start_at.timestamp() == NOW_S - 144
    assert outlook.points[-1].end_at.timestamp() == NOW_S + 288
    kinds = [point.kind for point in outlook.points]
    assert [kinds.count(kind) for kind in ("measured", "provider", "persistence")] == [25, 23, 24]
    domain = outlook.as_domain()
    assert domain.curve.at(NOW_S) == outlook.points[24].gco2_per_kwh
    assert not domain.stale


async def test_an_outlook_of_no_length_still_knows_now(api: httpx.AsyncClient) -> None:
    answer = await api.get(f"{ZONE}/outlook", params={"past_s": 0, "ahead_s": 0})
    (point,) = IntensityOutlook.model_validate_json(answer.content).points
    assert point.kind == "measured"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/carbon/XX/current", "unknown_zone"),
        ("/v1/carbon/%00/history", "unknown_zone"),
        (f"{ZONE}/current?signal=marginal", "no_data"),
        (f"{ZONE}/outlook?signal=average_lifecycle", "no_data"),
        (f"{ZONE}/nothing", "not_found"),
    ],
)
async def test_what_is_not_there_is_404(api: httpx.AsyncClient, path: str, code: str) -> None:
    found = await problem(api, path)
    assert (found.status, found.code) == (404, code)


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("current?signal=red", "?signal"),
        ("current?singal=marginal", "?singal"),
        ("history?start=soon", "?start"),
        ("history?start=5", "?start"),
        ("history?start=2026-01-01T00:00:00", "?start"),
        ("history?start=9999-12-31T23:59:59-14:00", "?start"),
        ("history?start=0001-01-01T00:00:00%2B14:00", "?start"),
        ("history?end=2026-02-30T00:00:00Z", "?end"),
        ("history?end=%00", "?end"),
        ("history?start=2026-02-02T00:00:00Z&end=2026-02-01T00:00:00Z", "?start"),
        ("history?limit=0", "?limit"),
        ("history?limit=10001", "?limit"),
        ("history?limit=many", "?limit"),
        ("history?cursor=AAAA", "?cursor"),
        ("history?cursor=f_gAAAAAAAA", "?cursor"),
        ("history?cursor=%00%00", "?cursor"),
        ("forecast?horizon_s=0", "?horizon_s"),
        ("forecast?horizon_s=nan", "?horizon_s"),
        ("forecast?horizon_s=1e12", "?horizon_s"),
        ("forecast?horizon_s=31000000", "?horizon_s"),
        ("forecast?clock=mine", "?clock"),
        ("outlook?past_s=-1", "?past_s"),
        ("outlook?past_s=inf", "?past_s"),
        ("outlook?past_s=31000000&ahead_s=0", "?past_s"),
    ],
)
async def test_a_wrong_question_is_422_and_says_where(api: httpx.AsyncClient, path: str, pointer: str) -> None:
    found = await problem(api, f"{ZONE}/{path}")
    assert found.status == 422
    assert [error.pointer for error in found.errors] == [pointer]


_QUERY = st.dictionaries(
    st.sampled_from(["signal", "start", "end", "limit", "cursor", "horizon_s", "clock", "past_s", "ahead_s", "x"]),
    st.one_of(
        st.text(max_size=20),
        st.integers().map(str),
        st.floats().map(str),
        st.datetimes().map(lambda at: at.isoformat() + "Z"),
        st.sampled_from(["real", "grid", "marginal", "average_direct", "-0", "1e308", "\0"]),
    ),
    max_size=4,
)


@given(
    st.sampled_from(["US-CAL-CISO", "GB", "%00", "ü"]),
    st.sampled_from(["current", "history", "forecast", "outlook"]),
    _QUERY,
)
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_question_breaks_it(api: httpx.AsyncClient, zone: str, what: str, query: dict[str, str]) -> None:
    answer = await api.get(httpx.URL(f"/v1/carbon/{zone}/{what}", params=query))
    assert answer.status_code in (200, 404, 422), answer.text


async def test_only_the_other_services_are_let_in(api: httpx.AsyncClient) -> None:
    answer = await api.get(f"{ZONE}/current", headers={"authorization": "Bearer of bad news"})
    assert answer.status_code == 401


async def test_many_may_ask_at_once(api: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(api.get(f"{ZONE}/outlook") for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
