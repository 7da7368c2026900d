"""The carbon service as other processes use it: its answers are read, paged and bounded only here."""

from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel

from services.contracts.carbon import (
    CurrentIntensity,
    IntensityForecast,
    IntensityHistory,
    IntensityOutlook,
    IntensityPoint,
    ZoneList,
)
from services.contracts.codes import ProblemCode
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError

PAGE_POINTS = 10_000
MOST_POINTS = 200_000  #: Of one history

Params = dict[str, str | float]
M = TypeVar("M", bound=BaseModel)


class TooManyPointsError(ProblemError):
    """A history has more than ``MOST_POINTS`` values."""


class Carbon:
    """Asks for zones and their intensities; every method raises ``ProblemError`` as ``ServiceClient`` does."""

    def __init__(self, client: ServiceClient, *, attempts: int = 4, timeout_s: float | None = None) -> None:
        """Take the client, the most attempts per question, and the time-out of each; None: the client's own."""
        self._client = client
        self._limits = {"attempts": attempts, "timeout_s": timeout_s}

    async def zones(self) -> ZoneList:
        return await self._ask("zones", ZoneList)

    async def current(self, zone: str, signal: str | None = None) -> CurrentIntensity:
        """Return the intensity in force; here and below, the signal is by default the zone's own."""
        return await self._ask(f"{zone}/current", CurrentIntensity, signal)

    async def forecast(self, zone: str, horizon_s: float, signal: str | None = None) -> IntensityForecast:
        """Return the forecast for ``horizon_s``, seconds of real time."""
        return await self._ask(f"{zone}/forecast", IntensityForecast, signal, horizon_s=horizon_s, clock="real")

    async def outlook(self, zone: str, *, past_s: float, ahead_s: float, signal: str | None = None) -> IntensityOutlook:
        """Return history and forecast as one curve.

        Durations are in the grid's own seconds: a day is a day, however fast a recording is replayed.
        """
        params: Params = {"past_s": past_s, "ahead_s": ahead_s, "clock": "grid"}
        return await self._ask(f"{zone}/outlook", IntensityOutlook, signal, **params)

    async def history(self, zone: str, start_s: float, end_s: float, signal: str | None = None) -> IntensityHistory:
        """Return the measured steps that overlap ``[start_s, end_s)``, oldest first, or ``TooManyPointsError``."""
        period = {
            name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in (("start", start_s), ("end", end_s))
        }
        params: Params = {**period, "limit": PAGE_POINTS}
        points: list[IntensityPoint] = []
        while True:
            page = await self._ask(f"{zone}/history", IntensityHistory, signal, **params)
            points += page.points
            if len(points) > MOST_POINTS:
                detail = f"{zone} has more than {MOST_POINTS} values in this period."
                raise TooManyPointsError(422, ProblemCode.INVALID_REQUEST, detail)
            if page.next_cursor is None:
                return page.model_copy(update={"points": points})
            params["cursor"] = page.next_cursor

    async def _ask(self, what: str, answer: type[M], signal: str | None = None, **params: str | float) -> M:
        params |= {"signal": str(signal)} if signal else {}
        return await self._client.call("GET", f"/v1/carbon/{what}", answer, params=params, **self._limits)
