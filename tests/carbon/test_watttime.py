"""WattTime v3, in the shapes its documentation shows."""

import asyncio
import base64
from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.providers.protocol import ProviderError
from carbon_service.providers.watttime import ENTRY, WattTime
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

ZONE, SIGNAL = "US-CAL-CISO", Signal.MARGINAL
NOW_S = datetime(2022, 7, 15, 0, 20, tzinfo=UTC).timestamp()
G_PER_LB = 0.45359237


def a_body(*points: tuple[str, object], units: str = "lbs_co2_per_mwh") -> dict[str, object]:
    return {
        "data": [{"point_time": f"2022-07-15T{at}:00+00:00", "value": value} for at, value in points],
        "meta": {
            "data_point_period_seconds": 300,
            "region": "CAISO_NORTH",
            "warnings": [],
            "signal_type": "co2_moer",
            "model": {"date": "2022-10-01"},
            "units": units,
            "generated_at_period_seconds": 300,
            "generated_at": "2022-07-15T00:15:00+00:00",
        },
    }


@pytest.fixture
def watttime(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> WattTime:
    upstream.answer("/login", {"token": "first"}, {"token": "second"})
    return built(
        ENTRY, http, lambda: NOW_S, watch.pacing(), username="someone", password="a-password", url=upstream.url
    )


async def test_it_logs_in_once_and_converts_pounds(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/historical", a_body(("00:10", 870.0), ("00:15", "916"), ("00:20", None)))
    found = await watttime.history(ZONE, SIGNAL, NOW_S - 3600, NOW_S + 1)
    assert [point.gco2_per_kwh for point in found.points] == pytest.approx([870 * G_PER_LB, 916 * G_PER_LB])
    assert found.points[1].end_s - found.points[1].start_s == 300
    assert found.skipped == 1
    login, historical = upstream.asked
    assert base64.b64decode(login.headers["authorization"].split()[1]) == b"someone:a-password"
    assert historical.headers["authorization"] == "Bearer first"
    assert historical.query["region"] == "CAISO_NORTH"
    assert historical.query["signal_type"] == "co2_moer"


async def test_a_refused_token_is_replaced_at_once(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/historical", Answer(status=401), a_body(("00:15", 900)))
    assert len((await watttime.latest(ZONE, SIGNAL)).points) == 1
    assert [one.headers["authorization"] for one in upstream.asked if one.path != "/login"] == [
        "Bearer first",
        "Bearer second",
    ]


async def test_a_token_is_renewed_before_it_ends(watttime: WattTime, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/v3/historical", a_body(("00:15", 900)))
    await watttime.latest(ZONE, SIGNAL)
    watch.now_s += 29 * 60
    await watttime.latest(ZONE, SIGNAL)
    assert upstream.paths().count("/login") == 2


async def test_many_at_once_share_one_log_in(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/historical", a_body(("00:15", 900)))
    await asyncio.gather(*(watttime.latest(ZONE, SIGNAL) for _ in range(5)))
    assert upstream.paths().count("/login") == 1


async def test_wrong_credentials_are_an_error_and_not_tried_over_and_over(
    watttime: WattTime, upstream: Upstream
) -> None:
    upstream.answer("/login", Answer(status=401))
    with pytest.raises(ProviderError, match="/login: answered 401"):
        await watttime.latest(ZONE, SIGNAL)
    assert upstream.paths() == ["/login"]


async def test_log_ins_have_a_limit_of_their_own(watttime: WattTime, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/login", *({"token": f"token {turn}"} for turn in range(101)))
    upstream.answer("/v3/historical", *[Answer(status=401), a_body(("00:15", 900))] * 100)
    started_s = watch.now_s
    for _ in range(100):
        await watttime.latest(ZONE, SIGNAL)
    assert upstream.paths().count("/login") == 101
    assert watch.now_s - started_s == pytest.approx(300.0)


async def test_the_forecast_is_marginal_too_and_dated(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/forecast", a_body(("00:20", 870.0), ("00:25", 850.0)))
    (issue,) = await watttime.forecast(ZONE, SIGNAL, 48 * 3600)
    assert issue.generated_s == NOW_S - 300
    assert [point.gco2_per_kwh for point in issue.points] == pytest.approx([870 * G_PER_LB, 850 * G_PER_LB])
    assert upstream.asked[-1].query["horizon_hours"] == "48"


async def test_no_more_is_asked_for_than_one_request_may(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/historical", a_body(("00:15", 900)))
    await watttime.history(ZONE, SIGNAL, NOW_S - 70 * 86_400, NOW_S)
    spans = [(one.query["start"], one.query["end"]) for one in upstream.asked if one.path == "/v3/historical"]
    assert spans == [("2022-06-15T00:20:00+00:00", "2022-07-15T00:20:00+00:00")]


async def test_another_unit_is_refused_rather_than_taken_for_pounds(watttime: WattTime, upstream: Upstream) -> None:
    upstream.answer("/v3/historical", a_body(("00:15", 51), units="percentile"))
    with pytest.raises(ProviderError, match="percentile"):
        await watttime.latest(ZONE, SIGNAL)


def test_a_zone_without_a_region_is_not_known(watttime: WattTime) -> None:
    assert watttime.feed("DE") is None
