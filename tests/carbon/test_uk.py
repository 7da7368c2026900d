"""The UK's Carbon Intensity API, in the shapes its documentation shows."""

from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.providers.protocol import ProviderError
from carbon_service.providers.uk import ENTRY, UkCarbonIntensity
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

SIGNAL = Signal.AVERAGE_DIRECT
NOW_S = datetime(2018, 1, 20, 12, 10, tzinfo=UTC).timestamp()


def a_period(start: str, end: str, forecast: object, actual: object) -> dict[str, object]:
    day = "2018-01-20T"
    intensity = {"forecast": forecast, "actual": actual, "index": "moderate"}
    return {"from": f"{day}{start}Z", "to": f"{day}{end}Z", "intensity": intensity}


@pytest.fixture
def uk(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> UkCarbonIntensity:
    return built(ENTRY, http, lambda: NOW_S, watch.pacing(), url=upstream.url)


def seconds(hour: int, minute: int) -> float:
    return datetime(2018, 1, 20, hour, minute, tzinfo=UTC).timestamp()


async def test_the_current_half_hour_is_measured_where_it_is(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    upstream.answer("/intensity", {"data": [a_period("12:00", "12:30", 266, 263)]})
    (point,) = (await uk.latest("GB", SIGNAL)).points
    assert (point.start_s, point.end_s) == (seconds(12, 0), seconds(12, 30))
    assert (point.gco2_per_kwh, point.is_estimated) == (263.0, False)


async def test_the_current_half_hour_is_estimated_until_measured(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    upstream.answer("/intensity", {"data": [a_period("12:00", "12:30", 266, None)]})
    (point,) = (await uk.latest("GB", SIGNAL)).points
    assert (point.gco2_per_kwh, point.is_estimated) == (266.0, True)


async def test_history_leaves_out_neighbours_the_future_and_nulls(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    periods = [
        a_period("10:30", "11:00", 1, 1),  # ends at the requested start: the API returns it
        a_period("11:00", "11:30", 270, "271.5"),
        a_period("11:30", "12:00", 268, None),  # measured later than usual
        a_period("12:00", "12:30", 266, 263),  # has not ended
    ]
    upstream.answer("/intensity/2018-01-20T11:00Z/2018-01-20T12:10Z", {"data": periods})
    found = await uk.history("GB", SIGNAL, seconds(11, 0), NOW_S)
    assert [(point.start_s, point.gco2_per_kwh) for point in found.points] == [(seconds(11, 0), 271.5)]
    assert found.skipped == 1


async def test_history_asks_for_no_more_than_the_api_gives(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    upstream.answer("/intensity/2018-01-07T12:10Z/2018-01-20T12:10Z", {"data": []})
    assert (await uk.history("GB", SIGNAL, 0.0, NOW_S)).points == ()


async def test_the_forecast_is_as_long_as_the_answer(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    periods = [
        a_period("12:00", "12:30", 266, None),
        a_period("12:30", "13:00", None, None),
        a_period("13:00", "13:30", 250, None),
    ]
    upstream.answer("/intensity/2018-01-20T12:10Z/fw48h", {"data": periods})
    (issue,) = await uk.forecast("GB", SIGNAL, 0.0)
    assert issue.generated_s == NOW_S
    assert [point.gco2_per_kwh for point in issue.points] == [266.0, 250.0]
    assert issue.points[0].end_s == seconds(12, 30)  # the gap stays a gap
    assert issue.skipped == 1


@pytest.mark.parametrize("body", [{"data": "none"}, {"error": {"code": "400 Bad Request"}}, [1, 2], None])
async def test_an_answer_of_another_shape_is_an_error(uk: UkCarbonIntensity, upstream: Upstream, body: object) -> None:
    upstream.answer("/intensity", Answer(body))
    with pytest.raises(ProviderError, match="no list at data"):
        await uk.latest("GB", SIGNAL)


async def test_rows_of_nonsense_are_counted(uk: UkCarbonIntensity, upstream: Upstream) -> None:
    upstream.answer("/intensity", {"data": [None, 7, {"from": "yesterday"}, a_period("12:00", "12:30", True, None)]})
    found = await uk.latest("GB", SIGNAL)
    assert (found.points, found.skipped) == ((), 4)


def test_it_knows_great_britain_only(uk: UkCarbonIntensity) -> None:
    assert uk.feed("GB") is not None
    assert uk.feed("DE") is None
