"""``/v1/carbon``: HTTP only."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from carbon_service.service import CarbonService
from services.contracts import queries
from services.contracts.carbon import (
    CurrentIntensity,
    ForecastBacktest,
    IntensityForecast,
    IntensityHistory,
    IntensityOutlook,
    ZoneList,
)
from services.kit.problems import invalid
from services.kit.routes import for_all_users, from_state, read_cursor, write_cursor

router = APIRouter(prefix="/v1/carbon", tags=["carbon"], dependencies=[Depends(for_all_users)])


Service = Annotated[CarbonService, from_state("carbon")]
POSITION = r"[0-9]{1,10}(\.[0-9]{1,6})?"  #: UTC seconds


@router.get("/zones")
async def list_zones(service: Service) -> ZoneList:
    """List grid zones."""
    return service.zones()


@router.get("/{zone}/current")
async def get_current_intensity(
    zone: str, query: Annotated[queries.SignalQuery, Query()], service: Service
) -> CurrentIntensity:
    """Get the current carbon intensity."""
    return await service.current(zone, query.signal)


@router.get("/{zone}/history")
async def list_past_intensities(
    zone: str, query: Annotated[queries.HistoryQuery, Query()], service: Service
) -> IntensityHistory:
    """List past carbon intensities, oldest first."""
    if query.start and query.end and query.start > query.end:
        raise invalid("?start", "The range starts after it ends.")
    after = read_cursor(query.cursor, POSITION)
    start_s, end_s = (instant and instant.timestamp() for instant in (query.start, query.end))
    after_s = None if after is None else float(after)
    answer, next_s = await service.history(zone, query.signal, start_s, end_s, query.limit, after_s)
    return answer if next_s is None else answer.model_copy(update={"next_cursor": write_cursor(repr(next_s))})


@router.get("/{zone}/forecast")
async def get_intensity_forecast(
    zone: str, query: Annotated[queries.ForecastQuery, Query()], service: Service
) -> IntensityForecast:
    """Get forecast carbon intensities."""
    return await service.forecast(zone, query.signal, query.horizon_s, query.clock)


@router.get("/{zone}/forecast/backtest")
async def get_forecast_backtest(
    zone: str, query: Annotated[queries.SignalQuery, Query()], service: Service
) -> ForecastBacktest:
    """Get the errors of our own forecasts on past data."""
    return await service.backtest(zone, query.signal)


@router.get("/{zone}/outlook")
async def get_intensity_outlook(
    zone: str, query: Annotated[queries.OutlookQuery, Query()], service: Service
) -> IntensityOutlook:
    """Get history, current value and forecast as one curve."""
    return await service.outlook(zone, query.signal, query.past_s, query.ahead_s, query.clock)
