"""The Carbon Aware API without a key, by the calls that the documentation of the Carbon Aware SDK shows."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from aiohttp import web

from tests.gateway.public import a_gateway, authorization
from tests.support.services import services

NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
EARLIER, LATER, LATEST = (f"{NOW + timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}" for hours in (-4, 1, 5))
PERIOD = {"time": EARLIER, "toTime": LATER}
FORECAST = {"dataStartAt": LATER, "dataEndAt": LATEST, "windowSize": 120}


@pytest.fixture(scope="module")
def client(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A caller without a key, before a gateway and a carbon service; admission is not there."""
    names = {"CARBON_ZONES": "GB,DE", "CARBON_LOCATION_ALIASES": "uksouth=GB"}
    folder = tmp_path_factory.mktemp("open")
    with (
        services(folder, database_url, redis_url, **names) as found,
        found.started("carbon_service.app"),
        found.started("gateway.app", "/healthz", GATEWAY_OPEN_EMISSIONS="true", GATEWAY_OPEN_BURST="1000"),
        httpx.Client(base_url=found.urls["GATEWAY"], timeout=30) as without_key,
    ):
        yield without_key


@pytest.mark.parametrize(
    ("path", "query", "fields"),
    [
        ("bylocation", {"location": "uksouth", **PERIOD}, {"location", "time", "rating", "duration"}),
        ("bylocations", {"location": ["uksouth", "DE"], **PERIOD}, {"location", "time", "rating", "duration"}),
        ("bylocations/best", {"location": ["uksouth", "DE"], **PERIOD}, {"location", "time", "rating", "duration"}),
        (
            "forecasts/current",
            {"location": "uksouth", **FORECAST},
            {"generatedAt", "requestedAt", "location", "windowSize", "optimalDataPoints", "forecastData"},
        ),
    ],
)
def test_its_clients_read_emissions_and_forecasts(
    client: httpx.Client, path: str, query: dict[str, str], fields: set[str]
) -> None:
    answer = client.get(f"/emissions/{path}", params=query)

    assert answer.status_code == 200, answer.text
    assert answer.json()
    assert all(fields <= set(each) for each in answer.json())


def test_its_clients_ask_for_averages_and_in_batches(client: httpx.Client) -> None:
    period = {"location": "uksouth", "startTime": EARLIER, "endTime": f"{NOW:%Y-%m-%dT%H:%M:%SZ}"}

    one = client.get("/emissions/average-carbon-intensity", params=period).json()
    several = client.post("/emissions/average-carbon-intensity/batch", json=[period]).json()
    forecasts = client.post(
        "/emissions/forecasts/batch", json=[{"requestedAt": LATER, "location": "uksouth", **FORECAST}]
    )

    assert one["carbonIntensity"] > 0
    assert several == [one]
    assert [each["location"] for each in forecasts.json()] == ["uksouth"]
    assert {"uksouth", "DE"} <= set(client.get("/locations").json())


def test_nothing_else_is_open(client: httpx.Client) -> None:
    answers = [client.get(path) for path in ("/v1/jobs", "/v1/carbon/zones", "/v1/carbon/GB/current", "/v1/keys")]
    wrong_key = client.get("/emissions/bylocation?location=GB", headers={"authorization": "Bearer ws_no"})

    assert [answer.status_code for answer in [*answers, wrong_key]] == [401] * 5


async def test_an_address_that_asks_too_often_is_refused() -> None:
    async with a_gateway(_unused, open_emissions=True, open_requests_per_s=0.001, open_burst=2) as opened:
        answers = [await opened.get("/locations") for _ in range(3)]
        with_key = await opened.get("/locations", headers=authorization())

    assert [answer.status_code for answer in answers] == [503, 503, 429]  # the carbon service is not there
    assert answers[2].json()["code"] == "rate_limited"
    assert with_key.status_code == 503


async def test_it_is_closed_by_default() -> None:
    async with a_gateway(_unused) as closed:
        answer = await closed.get("/emissions/bylocation?location=GB")
        with_key = await closed.get("/emissions/bylocation?location=GB", headers=authorization())

    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert with_key.status_code == 503


async def _unused(_: web.Request) -> web.StreamResponse:
    raise AssertionError("no service is asked")
