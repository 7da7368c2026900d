"""The Carbon Aware Web API, as its existing clients see it."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest

from carbon_service.carbon_aware import time_span
from carbon_service.providers.recorded import load
from tests.carbon.harness import NOW_S, Now, running

NOW = datetime.fromtimestamp(NOW_S, UTC)
HOUR = timedelta(hours=1)
# At speed 1 the grid's hours are everyone's; the replay starts at midnight, which is now.
START = datetime(2021, 8, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
async def api(database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    zones = ("US-CAL-CISO", "GB")
    chosen: dict[str, Any] = {"zones": zones, "replay_start": START, "location_aliases": {"westus": "US-CAL-CISO"}}
    async with running(database_url, Now(), **chosen) as client:
        yield client


def row(zone: str, at: datetime) -> int:
    return int(np.searchsorted(load(zone).times_s, (START + (at - NOW)).timestamp()))


async def get(api: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await api.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_emissions_of_a_location(api: httpx.AsyncClient) -> None:
    start = NOW - 3 * HOUR
    found = await get(api, "/emissions/bylocation", location="westus", time=start.isoformat(), toTime=NOW.isoformat())
    measured = load("US-CAL-CISO").measured
    assert found == [
        {
            "location": "westus",
            "time": f"{start + back * HOUR:%Y-%m-%dT%H:%M:%SZ}",
            "rating": measured[row("US-CAL-CISO", start + back * HOUR)],
            "duration": "01:00:00",
        }
        for back in range(3)
    ]
    again = await get(
        api, "/emissions/bylocation", location="westus", startTime=start.isoformat(), endTime=NOW.isoformat()
    )
    assert again == found


async def test_emissions_without_a_period_are_those_of_the_last_day(api: httpx.AsyncClient) -> None:
    assert len(await get(api, "/emissions/bylocation", location="US-CAL-CISO")) == 24


async def test_emissions_of_several_locations_and_the_best_of_them(api: httpx.AsyncClient) -> None:
    query = {"location": ["US-CAL-CISO", "GB"], "time": (NOW - 5 * HOUR).isoformat(), "toTime": NOW.isoformat()}
    both = await get(api, "/emissions/bylocations", **query)
    assert [one["location"] for one in both] == ["US-CAL-CISO"] * 5 + ["GB"] * 5
    best = await get(api, "/emissions/bylocations/best", **query)
    assert {one["rating"] for one in best} == {min(one["rating"] for one in both)}
    assert await get(api, "/emissions/bylocations", locations=query["location"], **{**query, "location": []}) == both


@pytest.mark.parametrize("path", ["bylocation", "bylocations", "bylocations/best"])
async def test_a_period_without_values_is_204(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(f"/emissions/{path}?location=GB&time=2020-01-01&toTime=2020-01-02")
    assert (answer.status_code, answer.content) == (204, b"")


async def test_the_average_is_weighted_by_time(api: httpx.AsyncClient) -> None:
    start = NOW - 2.5 * HOUR
    found = await get(
        api, "/emissions/average-carbon-intensity", location="GB", startTime=start.isoformat(), endTime=NOW.isoformat()
    )
    measured = load("GB").measured
    first, second, third = (float(measured[row("GB", NOW - back * HOUR)]) for back in (3, 2, 1))
    assert found["carbonIntensity"] == pytest.approx((0.5 * first + second + third) / 2.5)
    assert found["startTime"] == f"{start:%Y-%m-%dT%H:%M:%SZ}"


async def test_averages_in_a_batch(api: httpx.AsyncClient) -> None:
    periods = [
        {"location": "GB", "startTime": (NOW - 2 * HOUR).isoformat(), "endTime": (NOW - HOUR).isoformat()},
        {"location": "westus", "startTime": "2020-01-01T00:00:00", "endTime": "2020-01-02T00:00:00"},
    ]
    answer = await api.post("/emissions/average-carbon-intensity/batch", json=periods)
    first, second = answer.json()
    assert first["carbonIntensity"] == load("GB").measured[row("GB", NOW - 2 * HOUR)]
    assert second["carbonIntensity"] is None
    single = await api.get(
        "/emissions/average-carbon-intensity?location=GB&startTime=2020-01-01&endTime=2020-01-02T00:00:00"
    )
    assert single.status_code == 204


async def test_the_current_forecast_in_sliding_windows(api: httpx.AsyncClient) -> None:
    (forecast,) = await get(
        api,
        "/emissions/forecasts/current",
        location="westus",
        dataStartAt=(NOW + HOUR).isoformat(),
        dataEndAt=(NOW + 7 * HOUR).isoformat(),
        windowSize=120,
    )
    recorded = load("US-CAL-CISO").forecast
    assert recorded is not None
    first = row("US-CAL-CISO", NOW) + 1
    means = [round(float(recorded[first + i] + recorded[first + i + 1]) / 2, 6) for i in range(5)]
    assert [point["value"] for point in forecast["forecastData"]] == pytest.approx(means)
    assert {point["duration"] for point in forecast["forecastData"]} == {120}
    assert [point["value"] for point in forecast["optimalDataPoints"]] == pytest.approx([min(means)])
    assert forecast["windowSize"] == 120
    assert forecast["location"] == "westus"
    assert forecast["generatedAt"] == f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
    assert set(forecast) >= {"requestedAt", "dataStartAt", "dataEndAt"}


async def test_a_forecast_by_default_in_windows_of_one_step(api: httpx.AsyncClient) -> None:
    forecasts = await get(api, "/emissions/forecasts/current", location=["GB", "US-CAL-CISO"])
    assert [one["location"] for one in forecasts] == ["GB", "US-CAL-CISO"]
    assert all(one["windowSize"] == 60 and len(one["forecastData"]) == 48 for one in forecasts)


async def test_windows_that_do_not_fit_leave_nothing(api: httpx.AsyncClient) -> None:
    (forecast,) = await get(
        api, "/emissions/forecasts/current", location="GB", dataEndAt=(NOW + HOUR).isoformat(), windowSize=90
    )
    assert (forecast["forecastData"], forecast["optimalDataPoints"]) == ([], [])


async def test_a_forecast_as_it_was_known_earlier(api: httpx.AsyncClient) -> None:
    asked = {"requestedAt": (NOW - 12 * HOUR).isoformat(), "location": "GB", "windowSize": 60}
    (forecast,) = (await api.post("/emissions/forecasts/batch", json=[asked])).json()
    ahead = forecast["forecastData"][3]
    assert ahead["timestamp"] == f"{NOW - 9 * HOUR:%Y-%m-%dT%H:%M:%SZ}"
    assert ahead["value"] == load("GB").measured[row("GB", NOW - 33 * HOUR)]


async def test_the_future_is_forecast_from_now(api: httpx.AsyncClient) -> None:
    asked = {"requestedAt": "2199-01-01T00:00:00Z", "location": "GB"}
    (forecast,) = (await api.post("/emissions/forecasts/batch", json=[asked])).json()
    assert forecast["dataStartAt"] == f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
    assert len(forecast["forecastData"]) == 48


async def test_no_forecast_from_before_anything_was_known_is_501(api: httpx.AsyncClient) -> None:
    asked = {"requestedAt": "2020-01-01T00:00:00Z", "location": "GB"}
    answer = await api.post("/emissions/forecasts/batch", json=[asked])
    assert (answer.status_code, answer.json()["code"]) == (501, "no_forecast")


async def test_locations_with_their_aliases(api: httpx.AsyncClient) -> None:
    found = await get(api, "/locations")
    assert set(found) == {"US-CAL-CISO", "GB", "westus"}
    assert found["westus"] == {"name": "westus", "latitude": 37.25, "longitude": -119.75}


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("/emissions/bylocation", "?location"),
        ("/emissions/bylocations", "?location"),
        ("/emissions/bylocation?location=GB&time=noon", "?time"),
        ("/emissions/bylocation?location=GB&toTime=2026-01-01", "?time"),
        ("/emissions/bylocation?location=GB&time=2026-01-02&toTime=2026-01-01", "?time"),
        ("/emissions/bylocation?location=GB&time=1971-01-01&toTime=2026-01-01", "?time"),
        ("/emissions/average-carbon-intensity?location=GB&startTime=2026-01-01", "?endTime"),
        ("/emissions/average-carbon-intensity?location=GB&startTime=2026-01-01&endTime=2026-01-01", "?startTime"),
        ("/emissions/forecasts/current", "?location"),
        ("/emissions/forecasts/current?location=GB&windowSize=0", "?windowSize"),
        ("/emissions/forecasts/current?location=GB&windowSize=99999999999", "?windowSize"),
        ("/emissions/forecasts/current?location=GB&dataStartAt=2026-01-02&dataEndAt=2026-01-01", "?dataStartAt"),
        ("/emissions/forecasts/current?location=GB&dataStartAt=9999-12-31T23:59:59Z", "?dataStartAt"),
    ],
)
async def test_a_wrong_question_is_400_and_says_where(api: httpx.AsyncClient, path: str, pointer: str) -> None:
    answer = await api.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{}", b"[]", b"[1]", b'[{"location":"GB"}]', b'[{"location":"GB","requestedAt":7}]', b"[null]"]
)
async def test_a_wrong_batch_is_400(api: httpx.AsyncClient, body: bytes) -> None:
    for path in ("/emissions/forecasts/batch", "/emissions/average-carbon-intensity/batch"):
        answer = await api.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (path, answer.text)


async def test_an_unknown_location_is_404(api: httpx.AsyncClient) -> None:
    for name in ("XX", "\0", "a" * 100):
        answer = await api.get("/emissions/bylocation", params={"location": name})
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_zone")


@pytest.mark.parametrize(
    ("seconds", "written"), [(3600, "01:00:00"), (90_061, "1.01:01:01"), (6, "00:00:06"), (0.5, "00:00:00.5000000")]
)
def test_time_spans_as_dotnet_writes_them(seconds: float, written: str) -> None:
    assert time_span(seconds) == written
