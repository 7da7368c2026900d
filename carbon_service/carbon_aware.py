"""The Green Software Foundation's Carbon Aware Web API, for tools that already speak it.

The routes and formats of carbon-aware-sdk: camelCase, g/kWh, durations in minutes. A location is a zone or one of its
aliases. Only the default signal is available. Errors are problem documents; where .NET would answer 400, the answer
here is 400 too.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from carbon_service.curve import as_curve
from carbon_service.endpoints import Service
from carbon_service.repository import at
from carbon_service.service import CarbonService, Knowledge
from services.contracts import carbon_aware
from services.contracts.codes import ProblemCode
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError, validation_problem
from services.kit.routes import for_all_users

LONGEST_RANGE_S = 366 * 86_400.0
COORDINATES = {
    "DE": (51.17, 10.45),
    "GB": (54.0, -2.5),
    "SE": (62.2, 17.64),
    "US-CAL-CISO": (37.25, -119.75),
    "US-MIDA-PJM": (39.95, -77.0),
}


class _Route(APIRoute):
    """Answers a request with invalid fields with 400, as the clients of this API expect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_400(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                problem = validation_problem(error.errors())
                raise ProblemError(400, problem.problem_code, problem.detail, errors=problem.errors) from error

        return handle_with_400


router = APIRouter(route_class=_Route, tags=["carbon-aware"], dependencies=[Depends(for_all_users)])


NO_CONTENT: dict[int | str, dict[str, Any]] = {204: {"description": "Nothing was measured in that period."}}
NO_FORECAST: dict[int | str, dict[str, Any]] = {501: {"description": "There is no forecast: `no_forecast`."}}


@router.get("/emissions/bylocation", response_model=list[carbon_aware.EmissionsData], responses=NO_CONTENT)
async def list_emissions_by_location(query: Annotated[carbon_aware.OneLocation, Query()], service: Service) -> Any:
    """List what was measured at a location."""
    return await _emissions(service, [query.location], query) or Response(status_code=204)


@router.get("/emissions/bylocations", response_model=list[carbon_aware.EmissionsData], responses=NO_CONTENT)
async def list_emissions_by_locations(query: Annotated[carbon_aware.Locations, Query()], service: Service) -> Any:
    """List what was measured at several locations."""
    return await _emissions(service, _named(query), query) or Response(status_code=204)


@router.get("/emissions/bylocations/best", response_model=list[carbon_aware.EmissionsData], responses=NO_CONTENT)
async def list_best_emissions(query: Annotated[carbon_aware.Locations, Query()], service: Service) -> Any:
    """List the intervals with the lowest carbon intensity."""
    found = await _emissions(service, _named(query), query)
    lowest = min((one.rating for one in found), default=0.0)
    return [one for one in found if one.rating == lowest] or Response(status_code=204)


@router.get("/emissions/forecasts/current", responses=NO_FORECAST)
async def get_current_emissions_forecasts(
    query: Annotated[carbon_aware.ForecastsQuery, Query()], service: Service
) -> list[carbon_aware.EmissionsForecast]:
    """Get current forecasts as sliding windows."""
    now_s = service.now_s()
    return [
        await _forecast(
            service,
            carbon_aware.ForecastRequest(
                requested_at=at(now_s),
                location=location,
                data_start_at=query.dataStartAt,
                data_end_at=query.dataEndAt,
                window_size=query.windowSize,
            ),
            "?dataStartAt",
        )
        for location in dict.fromkeys(query.location)
    ]


@router.post("/emissions/forecasts/batch", responses=NO_FORECAST)
async def get_earlier_emissions_forecasts(
    requests: Annotated[carbon_aware.ForecastRequests, Body()], service: Service
) -> list[carbon_aware.EmissionsForecast]:
    """Get forecasts as they stood at earlier times."""
    return [await _forecast(service, one, f"/{index}/dataStartAt") for index, one in enumerate(requests.root)]


@router.get("/emissions/average-carbon-intensity", response_model=carbon_aware.CarbonIntensity, responses=NO_CONTENT)
async def get_average_carbon_intensity(query: Annotated[carbon_aware.OneLocation, Query()], service: Service) -> Any:
    """Get the mean carbon intensity of a period."""
    start, end = query.startTime or query.time, query.endTime or query.toTime
    if start is None or end is None:
        raise _bad("?endTime" if start else "?startTime", "Both startTime and endTime are needed.")
    asked = carbon_aware.IntensityRequest(location=query.location, start_time=start, end_time=end)
    found = await _average(service, asked)
    return Response(status_code=204) if found.carbon_intensity is None else found


@router.post("/emissions/average-carbon-intensity/batch")
async def get_average_carbon_intensities(
    requests: Annotated[carbon_aware.IntensityRequests, Body()], service: Service
) -> list[carbon_aware.CarbonIntensity]:
    """Get the mean carbon intensities of several periods."""
    return [await _average(service, one, f"/{index}/startTime") for index, one in enumerate(requests.root)]


@router.get("/locations")
async def list_locations(service: Service) -> dict[str, carbon_aware.Location]:
    """List locations."""
    zones = {zone.zone: zone.zone for zone in service.zones().items}
    places = ((name, COORDINATES.get(zone, (None, None))) for name, zone in {**zones, **service.aliases}.items())
    return {name: carbon_aware.Location(name=name, latitude=north, longitude=east) for name, (north, east) in places}


async def _emissions(
    service: CarbonService, names: list[str], period: carbon_aware.Period
) -> list[carbon_aware.EmissionsData]:
    found: list[carbon_aware.EmissionsData] = []
    for name in names:
        zone = service.zone_of(name)
        start_s, end_s = _range_s(period, service.now_s(), service.feed(zone).day_s)
        for point in await service.measured(zone, start_s, max(end_s, start_s + 1e-6)):
            duration_s = point.end_s - point.start_s
            found.append(
                carbon_aware.EmissionsData(
                    location=name, time=at(point.start_s), rating=point.gco2_per_kwh, duration=time_span(duration_s)
                )
            )
    return found


def _range_s(asked: carbon_aware.Period, now_s: float, day_s: float) -> tuple[float, float]:
    """Return the requested range, UTC seconds; by default the grid's last day."""
    start, end = asked.time or asked.startTime, asked.toTime or asked.endTime
    if start is None and end is not None:
        raise _bad("?time", "An end needs a start.")
    end_s = end.timestamp() if end else now_s
    start_s = start.timestamp() if start else end_s - day_s
    if start_s > end_s:
        raise _bad("?time", "The range starts after it ends.")
    if end_s - start_s > LONGEST_RANGE_S:
        raise _bad("?time", "The range is longer than a year.")
    return start_s, end_s


def _named(asked: carbon_aware.Locations) -> list[str]:
    found = list(dict.fromkeys(asked.location + asked.locations))
    if not found:
        raise _bad("?location", "At least one location is needed.")
    return found


async def _average(
    service: CarbonService, asked: carbon_aware.IntensityRequest, pointer: str = "?startTime"
) -> carbon_aware.CarbonIntensity:
    start_s, end_s = asked.start_time.timestamp(), asked.end_time.timestamp()
    if start_s >= end_s:
        raise _bad(pointer, "The period starts at or after its end.")
    if end_s - start_s > LONGEST_RANGE_S:
        raise _bad(pointer, "The period is longer than a year.")
    mean = await service.mean(service.zone_of(asked.location), start_s, end_s)
    return carbon_aware.CarbonIntensity(
        location=asked.location, start_time=asked.start_time, end_time=asked.end_time, carbon_intensity=mean
    )


async def _forecast(
    service: CarbonService, asked: carbon_aware.ForecastRequest, pointer: str
) -> carbon_aware.EmissionsForecast:
    if asked.data_start_at and asked.data_end_at and asked.data_start_at >= asked.data_end_at:
        raise _bad(pointer, "The data starts at or after its end.")
    known = await service.known_at(service.zone_of(asked.location), asked.requested_at.timestamp())
    as_of_s = known.now_s
    start_s, end_s = as_of_s, as_of_s + _reach_s(known)
    if asked.data_start_at:
        start_s = min(max(start_s, asked.data_start_at.timestamp()), end_s)
    if asked.data_end_at:
        end_s = max(min(end_s, asked.data_end_at.timestamp()), start_s)
    window_s = known.feed.step_s if asked.window_size is None else asked.window_size * 60.0
    issue = known.issue
    points = _windows(known, asked.location, start_s, end_s, window_s)
    lowest = min((point.value for point in points), default=0.0)
    return carbon_aware.EmissionsForecast(
        generated_at=at(issue.generated_s if issue else as_of_s),
        requested_at=asked.requested_at,
        location=asked.location,
        data_start_at=at(start_s),
        data_end_at=at(end_s),
        window_size=_minutes(window_s),
        optimal_data_points=[point for point in points if point.value == lowest],
        forecast_data=points,
    )


def _reach_s(known: Knowledge) -> float:
    """Return how far a forecast reaches: as far as the provider's, at least two days of the grid."""
    told_s = known.issue.points[-1].end_s - known.now_s if known.issue and known.issue.points else 0.0
    return max(told_s, known.feed.horizon_s)


def _windows(
    known: Knowledge, location: str, start_s: float, end_s: float, window_s: float
) -> list[carbon_aware.EmissionsForecastPoint]:
    """Return the means of the windows that begin with each step and end no later than ``end_s``."""
    steps = known.steps(known.now_s, known.now_s + _reach_s(known))
    if not steps:
        detail = f"There is no forecast for {known.source.key.zone} at that time, nor enough history to make one."
        raise ProblemError(501, ProblemCode.NO_FORECAST, detail)
    starts_s = np.array([max(step.start_s, start_s) for step in steps if step.end_s > start_s], dtype=np.float64)
    starts_s = starts_s[starts_s + window_s <= end_s + 1e-6]
    means = as_curve(steps).means(starts_s, window_s) if starts_s.size else starts_s
    return [
        carbon_aware.EmissionsForecastPoint(
            location=location,
            timestamp=at(float(begins_s)),
            duration=_minutes(window_s),
            value=round(float(value), 6),
        )
        for begins_s, value in zip(starts_s, means, strict=True)
    ]


def _minutes(duration_s: float) -> float:
    minutes = duration_s / 60
    return int(minutes) if minutes.is_integer() else minutes


def time_span(duration_s: float) -> str:
    """Return a duration in .NET's format: ``[d.]hh:mm:ss[.fffffff]``."""
    ticks = round(duration_s * 10_000_000)
    whole_s, fraction = divmod(ticks, 10_000_000)
    days, rest = divmod(whole_s, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return (f"{days}." if days else "") + clock + (f".{fraction:07d}" if fraction else "")


def _bad(pointer: str, detail: str) -> ProblemError:
    return ProblemError(400, ProblemCode.INVALID_REQUEST, detail, errors=[FieldError(pointer=pointer, detail=detail)])
