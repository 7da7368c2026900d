"""A bridge's metrics at ``/metrics``: its exchanges with the control plane, and how long they take."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel

from services.contracts.engines import EngineDecision, EngineJobState, EngineReply, EngineReport
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log
from services.kit.metrics import MEDIA_TYPE, Metrics, counter, gauge, histogram, single
from services.kit.problems import ProblemError

log = Log(__name__)

M = TypeVar("M", bound=BaseModel)

DECISIONS = counter("wattshift_engine_decisions_total", "Decisions that reached the bridge, each once.", ["action"])
CARRIED_OUT = histogram(
    "wattshift_engine_decision_seconds",
    "From a decision's arrival at the bridge to the report that it was carried out.",
)
REFUSALS = counter("wattshift_engine_refusals_total", "Decisions that the engine would not carry out.")
IDLED = counter(
    "wattshift_engine_idled_gpu_seconds_total",
    "GPU seconds that were free while jobs that the engine might have started with them were held by the bridge.",
    ["reason"],
)
REPORTS = counter(
    "wattshift_engine_reports_total", "Reports to the control plane: taken, refused, or not answered.", ["outcome"]
)


class BridgeFigures:
    """What is known about an engine from the exchanges between its bridge and the control plane."""

    def __init__(self, metrics: Metrics, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._states: dict[str, EngineJobState] = {}
        self._pending: dict[str, tuple[int, float]] = {}
        self._revisions: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._heard_at_s: float | None = None
        self._is_up: bool | None = None
        metrics.add("engine", self._read)

    def note_report(self, report: EngineReport) -> None:
        """Record a report that the control plane has accepted."""
        self._heard_at_s = now_s = self._clock_s()
        self._is_up = report.problem is None
        for job in report.jobs:
            name, (revision, since_s) = job.external_id, self._pending.get(job.external_id, (0, now_s))
            if revision and job.revision >= revision:
                CARRIED_OUT.observe(now_s - since_s)
                del self._pending[name]
            if job.refused and self._refused.get(name) != self._revisions.get(name, 0):
                self._refused[name] = self._revisions.get(name, 0)
                REFUSALS.inc()
            self._states[name] = job.state
            if job.state.is_over:
                self._forget([name])
        if report.present is not None:  # what came late, of jobs that are over, is of no job any more
            self._forget((self._states.keys() | self._revisions.keys()).difference(report.present))

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            for known in (self._states, self._pending, self._revisions, self._refused):
                known.pop(name, None)

    def note_decisions(self, decisions: Sequence[EngineDecision]) -> None:
        """Record decisions; a repeated decision counts once."""
        for decision in decisions:
            if self._revisions.get(decision.external_id, 0) < decision.revision:
                self._revisions[decision.external_id] = decision.revision
                self._pending[decision.external_id] = decision.revision, self._clock_s()
                DECISIONS.labels(decision.action.value).inc()

    async def _read(self) -> Iterable[Metric]:
        counts = dict.fromkeys((state for state in EngineJobState if not state.is_over), 0)
        for state in self._states.values():
            counts[state] += 1
        heard_s = None if self._heard_at_s is None else self._clock_s() - self._heard_at_s
        is_up = None if self._is_up is None else float(self._is_up)
        jobs = [((state.value,), float(count)) for state, count in counts.items()]
        what = "Jobs with GPUs that wait or run in the engine, by its own word."
        return [
            gauge("wattshift_engine_jobs", what, ["state"], jobs),
            single("wattshift_engine_up", "1 while the engine answers the bridge, 0 while it does not.", is_up),
            single("wattshift_engine_silence_seconds", "Since the control plane has last taken a report.", heard_s),
            single(
                "wattshift_engine_decisions_pending",
                "Decisions that no report says to be carried out yet; in a dry run, all stay so.",
                float(len(self._pending)),
            ),
        ]


class NotedControlPlane(ControlPlane):
    """The control plane of a bridge, which records what is exchanged."""

    figures: BridgeFigures

    async def call(self, what: str, body: BaseModel, answer: type[M], timeout_s: float) -> M:
        try:
            found = await super().call(what, body, answer, timeout_s)
        except ProblemError as error:
            if isinstance(body, EngineReport):
                REPORTS.labels("silent" if error.status >= 500 else "refused").inc()
            raise
        if isinstance(body, EngineReport):
            REPORTS.labels("taken").inc()
            self.figures.note_report(body)
        if isinstance(found, EngineReply):
            self.figures.note_decisions(found.decisions)
        return found


@asynccontextmanager
async def shown_at(address: str, metrics: Metrics) -> AsyncGenerator[None]:
    """Serve the metrics at ``HOST:PORT``, if given, during the block; ``OSError`` if something else listens there."""
    if not address:
        yield
        return

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await metrics.text(), headers={"content-type": MEDIA_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with served(app, address):
        log.info("metrics.shown", address=address)
        yield


@asynccontextmanager
async def served(app: web.Application, address: str) -> AsyncGenerator[None]:
    """Serve an app at ``HOST:PORT`` until the end of the block; ``OSError`` if something else listens there."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        yield
    finally:
        await runner.cleanup()
