"""``/v1/carbon``: HTTP only."""

import base64
import binascii
import struct
from datetime import datetime
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
from services.contracts.codes import ProblemCode
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError, invalid
from services.kit.routes import for_all_users, from_state

router = APIRouter(prefix="/v1/carbon", tags=["carbon"], dependencies=[Depends(for_all_users)])


Service = Annotated[CarbonService, from_state("carbon")]


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
        detail = "The range starts after it ends."
        raise invalid("?start", detail)
    answer, next_s = await service.history(
        zone, query.signal, _seconds(query.start), _seconds(query.end), query.limit, _decoded(query.cursor)
    )
    return answer if next_s is None else answer.model_copy(update={"next_cursor": _encoded(next_s)})


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


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _encoded(start_s: float) -> str:
    return base64.urlsafe_b64encode(struct.pack(">d", start_s)).decode().rstrip("=")


def _decoded(cursor: str | None) -> float | None:
    if cursor is None:
        return None
    try:
        (start_s,) = struct.unpack(">d", base64.b64decode(cursor + "=", altchars=b"-_", validate=True))
        if 0 <= start_s < 7_258_118_400:  # the year 2200; also refuses what is not a number
            return start_s
    except (ValueError, binascii.Error, struct.error):
        pass
    detail = "This is not a cursor of this list."
    raise ProblemError(422, ProblemCode.INVALID_CURSOR, detail, errors=[FieldError(pointer="?cursor", detail=detail)])
