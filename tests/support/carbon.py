"""A carbon service to be: answers over real HTTP with the curve it is given, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.test_utils import TestServer

from services.contracts.carbon import IntensityHistory, IntensityOutlook, IntensityPoint, OutlookPoint
from services.contracts.codes import ProblemCode
from services.contracts.problems import MEDIA_TYPE, Problem
from services.core.domain.carbon import Signal


@dataclass
class FakeCarbon:
    """Steps of ``(start, end, gCO2/kWh, kind)``, UTC seconds; ``outlook_from_s`` is how far the outlook goes back."""

    steps: list[tuple[float, float, float, str]] = field(default_factory=list)
    now_s: float | None = None
    outlook_from_s: float = 0.0
    is_down: bool = False
    is_stale: bool = False
    has_zone: bool = True
    signal: Signal = Signal.AVERAGE_DIRECT
    asked: int = 0
    url: str = ""

    def flat(self, intensity: float) -> None:
        """Hold one measured intensity for ever."""
        self.steps = [(0.0, 4e9, intensity, "measured")]

    def outlook(self, zone: str) -> IntensityOutlook:
        """Return what the service answers."""
        now = datetime.fromtimestamp(self.now_s, UTC) if self.now_s is not None else datetime.now(UTC)
        points = [
            OutlookPoint(start_at=_at(start), end_at=_at(end), gco2_per_kwh=value, kind=kind)  # type: ignore[arg-type]
            for start, end, value, kind in self.steps
            if end > self.outlook_from_s
        ]
        return IntensityOutlook(
            zone=zone,
            signal=self.signal,
            provider="fake",
            now=now,
            grid_now=now,
            time_scale=1,
            is_stale=self.is_stale,
            measured_until=None,
            forecast_generated_at=None,
            points=points,
        )

    async def _answer_outlook(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.is_down:
            return _problem(503, ProblemCode.UNAVAILABLE)
        if not self.has_zone:
            return _problem(404, ProblemCode.UNKNOWN_ZONE)
        if not self.steps:
            return _problem(404, ProblemCode.NO_DATA)
        return web.json_response(text=self.outlook(request.match_info["zone"]).model_dump_json())

    async def _answer_history(self, request: web.Request) -> web.Response:
        if self.is_down:
            return _problem(503, ProblemCode.UNAVAILABLE)
        start = datetime.fromisoformat(request.query["start"]).timestamp()
        end = datetime.fromisoformat(request.query["end"]).timestamp()
        points = [
            IntensityPoint(start_at=_at(begin), end_at=_at(until), gco2_per_kwh=value)
            for begin, until, value, kind in self.steps
            if kind == "measured" and until > start and begin < end
        ]
        answer = IntensityHistory(zone=request.match_info["zone"], signal=self.signal, provider="fake", points=points)
        return web.json_response(text=answer.model_dump_json())

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeCarbon]:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_get("/v1/carbon/{zone}/outlook", self._answer_outlook)
        app.router.add_get("/v1/carbon/{zone}/history", self._answer_history)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _problem(status: int, code: ProblemCode) -> web.Response:
    problem = Problem(type=f"/problems/{code}", title="-", status=status, detail="as told", code=code)
    return web.json_response(text=problem.model_dump_json(), status=status, content_type=MEDIA_TYPE)
