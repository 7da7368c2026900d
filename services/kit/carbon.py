"""The carbon service as other processes use it: its answers are read, paged and bounded only here."""

from datetime import UTC, datetime

from services.contracts.carbon import (
    Clock,
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

Params = dict[str, str | int | float]


class TooManyPointsError(ProblemError):
    """A history has more than ``MOST_POINTS`` values."""


class Carbon:
    """Asks for zones and their intensities; every method raises ``ProblemError`` as ``ServiceClient`` does."""

    def __init__(self, client: ServiceClient, *, attempts: int = 4, timeout_s: float | None = None) -> None:
        """Take the client, the most attempts per question, and the time-out of each; None: the client's own."""
        self._client = client
        self._limits = {"attempts": attempts, "timeout_s": timeout_s}

    async def zones(self) -> ZoneList:
        return await self._client.call("GET", "/v1/carbon/zones", ZoneList, **self._limits)

    async def current(self, zone: str, signal: str | None = None) -> CurrentIntensity:
        """Return the intensity in force; here and below, the signal is by default the zone's own."""
        path = f"/v1/carbon/{zone}/current"
        return await self._client.call("GET", path, CurrentIntensity, params=_params(signal), **self._limits)

    async def forecast(self, zone: str, horizon_s: float, clock: Clock, signal: str | None = None) -> IntensityForecast:
        """Return the forecast for ``horizon_s``, seconds of real time or of the grid's clock."""
        params = _params(signal) | {"horizon_s": horizon_s, "clock": clock}
        path = f"/v1/carbon/{zone}/forecast"
        return await self._client.call("GET", path, IntensityForecast, params=params, **self._limits)

    async def outlook(self, zone: str, *, past_s: float, ahead_s: float, signal: str | None = None) -> IntensityOutlook:
        """Return history and forecast as one curve.

        Durations are in the grid's own seconds: a day is a day, however fast a recording is replayed.
        """
        params = _params(signal) | {"past_s": past_s, "ahead_s": ahead_s, "clock": "grid"}
        path = f"/v1/carbon/{zone}/outlook"
        return await self._client.call("GET", path, IntensityOutlook, params=params, **self._limits)

    async def history(self, zone: str, start_s: float, end_s: float, signal: str | None = None) -> IntensityHistory:
        """Return all measured steps that overlap ``[start_s, end_s)``, UTC seconds, oldest first, from all pages.

        Raises:
            TooManyPointsError: There are more than ``MOST_POINTS``.
        """
        period = {
            name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in (("start", start_s), ("end", end_s))
        }
        params: Params = {**_params(signal), **period, "limit": PAGE_POINTS}
        points: list[IntensityPoint] = []
        while True:
            path = f"/v1/carbon/{zone}/history"
            page = await self._client.call("GET", path, IntensityHistory, params=params, **self._limits)
            points += page.points
            if len(points) > MOST_POINTS:
                detail = f"{zone} has more than {MOST_POINTS} values in this period."
                raise TooManyPointsError(422, ProblemCode.INVALID_REQUEST, detail)
            if page.next_cursor is None:
                return page.model_copy(update={"points": points})
            params["cursor"] = page.next_cursor


def _params(signal: str | None) -> Params:
    return {"signal": str(signal)} if signal else {}
