"""Electricity Maps v3, in the shapes its documentation shows."""

from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.providers.electricity_maps import ENTRY, ElectricityMaps
from carbon_service.providers.protocol import ProviderError
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

DIRECT, LIFECYCLE = Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE
NOW_S = datetime(2019, 5, 21, 0, 30, tzinfo=UTC).timestamp()
HOUR_S = 3600.0


def an_hour(at: str, value: object, *, estimated: bool = False) -> dict[str, object]:
    return {
        "zone": "DE",
        "carbonIntensity": value,
        "datetime": at,
        "updatedAt": "2019-05-21T00:29:00.000Z",
        "createdAt": "2019-05-20T20:00:00.000Z",
        "emissionFactorType": "lifecycle",
        "isEstimated": estimated,
        "estimationMethod": "TIME_SLICER_AVERAGE" if estimated else None,
        "temporalGranularity": "hourly",
    }


@pytest.fixture
def maps(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> ElectricityMaps:
    return built(ENTRY, http, lambda: NOW_S, watch.pacing(), token="a-token", url=f"{upstream.url}/v3")


async def test_the_latest_hour_with_the_token_and_the_factor(maps: ElectricityMaps, upstream: Upstream) -> None:
    upstream.answer("/v3/carbon-intensity/latest", an_hour("2019-05-21T00:00:00.000Z", 322, estimated=True))
    (point,) = (await maps.latest("DE", LIFECYCLE)).points
    assert (point.start_s, point.end_s) == (NOW_S - 1800, NOW_S + 1800)
    assert (point.gco2_per_kwh, point.is_estimated) == (322.0, True)
    (asked,) = upstream.asked
    assert asked.headers["auth-token"] == "a-token"
    assert asked.query == {"zone": "DE", "emissionFactorType": "lifecycle", "shouldUseFallbackCallerLookup": "false"}


async def test_recent_history_with_nulls_and_gaps(maps: ElectricityMaps, upstream: Upstream) -> None:
    hours = [
        an_hour("2019-05-20T20:00:00.000Z", 300),
        an_hour("2019-05-20T21:00:00.000Z", None),
        an_hour("2019-05-20T23:00:00.000Z", 310),
    ]
    upstream.answer("/v3/carbon-intensity/history", {"zone": "DE", "history": hours})
    found = await maps.history("DE", DIRECT, NOW_S - 6 * HOUR_S, NOW_S)
    assert [point.gco2_per_kwh for point in found.points] == [300.0, 310.0]
    assert found.points[0].end_s - found.points[0].start_s == HOUR_S
    assert found.skipped == 1


async def test_an_older_past_is_asked_of_the_commercial_route(maps: ElectricityMaps, upstream: Upstream) -> None:
    upstream.answer(
        "/v3/carbon-intensity/past-range", {"zone": "DE", "data": [an_hour("2019-05-19T00:00:00.000Z", 301)]}
    )
    found = await maps.history("DE", DIRECT, NOW_S - 72 * HOUR_S, NOW_S)
    assert [point.gco2_per_kwh for point in found.points] == [301.0]
    assert upstream.asked[0].query["start"] == "2019-05-18T00:30:00Z"


async def test_a_free_plan_gives_the_last_day_instead(maps: ElectricityMaps, upstream: Upstream) -> None:
    upstream.answer("/v3/carbon-intensity/past-range", Answer({"error": "not in your plan"}, status=401))
    upstream.answer(
        "/v3/carbon-intensity/history", {"zone": "DE", "history": [an_hour("2019-05-20T23:00:00.000Z", 310)]}
    )
    assert len((await maps.history("DE", DIRECT, NOW_S - 72 * HOUR_S, NOW_S)).points) == 1


async def test_the_forecast_says_when_it_was_made(maps: ElectricityMaps, upstream: Upstream) -> None:
    hours = [{"carbonIntensity": 326, "datetime": "2019-05-21T01:00:00.000Z"}]
    upstream.answer(
        "/v3/carbon-intensity/forecast", {"zone": "DE", "forecast": hours, "updatedAt": "2019-05-21T00:00:00.000Z"}
    )
    (issue,) = await maps.forecast("DE", DIRECT, 48 * HOUR_S)
    assert issue.generated_s == NOW_S - 1800
    assert [point.gco2_per_kwh for point in issue.points] == [326.0]
    assert upstream.asked[0].query["horizonHours"] == "48"


async def test_a_plan_without_forecasts_is_not_asked_for_them_again(maps: ElectricityMaps, upstream: Upstream) -> None:
    upstream.answer("/v3/carbon-intensity/forecast", Answer({"error": "not in your plan"}, status=403))
    assert maps.feed("DE").has_forecast
    assert await maps.forecast("DE", DIRECT, HOUR_S) == ()
    assert not maps.feed("DE").has_forecast


async def test_an_answer_for_another_zone_is_refused(maps: ElectricityMaps, upstream: Upstream) -> None:
    upstream.answer("/v3/carbon-intensity/latest", {**an_hour("2019-05-21T00:00:00.000Z", 20), "zone": "FR"})
    with pytest.raises(ProviderError, match="asked for zone DE"):
        await maps.latest("DE", DIRECT)
