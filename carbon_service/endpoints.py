"""``/v1/carbon``: HTTP only."""

from __future__ import annotations

import base64
import binascii
import struct
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

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
from services.contracts.problems import FieldError, Problem
from services.kit.problems import ProblemError

PROBLEMS: dict[int | str, dict[str, object]] = {
    404: {"model": Problem, "description": "`unknown_zone`, or `no_data` for a signal the zone lacks."},
    422: {"model": Problem, "description": "`invalid_request`, with a pointer to what is wrong."},
}

router = APIRouter(prefix="/v1/carbon", tags=["carbon"], responses=PROBLEMS)


async def read_service(request: Request) -> CarbonService:
    """Return the service of this process."""
    return request.app.state.carbon


Service = Annotated[CarbonService, Depends(read_service)]


@router.get("/zones")
async def list_zones(service: Service) -> ZoneList:
    """List the zones, their signals, and whether their values are up to date."""
    return service.zones()


@router.get("/{zone}/current")
async def read_current(zone: str, query: Annotated[queries.SignalQuery, Query()], service: Service) -> CurrentIntensity:
    """Read the intensity in force now."""
    return await service.current(zone, query.signal)


@router.get("/{zone}/history")
async def read_history(
    zone: str, query: Annotated[queries.HistoryQuery, Query()], service: Service
) -> IntensityHistory:
    """Read past intensities, oldest first: the intervals that overlap the range."""
    if query.start and query.end and query.start > query.end:
        detail = "The range starts after it ends."
        raise ProblemError(
            422, ProblemCode.INVALID_REQUEST, detail, errors=[FieldError(pointer="?start", detail=detail)]
        )
    answer, next_s = await service.history(
        zone, query.signal, _seconds(query.start), _seconds(query.end), query.limit, _decoded(query.cursor)
    )
    return answer if next_s is None else answer.model_copy(update={"next_cursor": _encoded(next_s)})


@router.get("/{zone}/forecast")
async def read_forecast(
    zone: str, query: Annotated[queries.ForecastQuery, Query()], service: Service
) -> IntensityForecast:
    """Read forecast intensities: the provider's as far as they reach, then learned ones, then persistence."""
    return await service.forecast(zone, query.signal, query.horizon_s, query.clock)


@router.get("/{zone}/forecast/backtest")
async def read_backtest(
    zone: str, query: Annotated[queries.SignalQuery, Query()], service: Service
) -> ForecastBacktest:
    """Read the errors that our own forecasts would have made over the last part of the zone's history."""
    return await service.backtest(zone, query.signal)


@router.get("/{zone}/outlook")
async def read_outlook(
    zone: str, query: Annotated[queries.OutlookQuery, Query()], service: Service
) -> IntensityOutlook:
    """Read history, present and forecast as one curve of contiguous steps.

    With `clock=grid` the lengths are seconds of the grid's own clock: `past_s=86400` is the grid's last day, however
    fast a recording is replayed. Instants in the answer are always in real time.
    """
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
