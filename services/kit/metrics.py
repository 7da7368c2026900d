"""A process's metrics for Prometheus: counted as things happen, or read when somebody asks.

Names begin with ``wattshift_`` and end with their unit; counters end with ``_total``. What is counted goes into
``REGISTRY``, by ``counter`` and ``histogram``. State of the database or of this process is read by a source when
``/metrics`` is requested, and kept for ``KEPT_S``: no other request waits for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.kit.identity import Operator
from services.kit.logging import Log
from services.kit.release import RELEASE

log = Log(__name__)

KEPT_S = 5.0  #: How long what was read is shown again: several Prometheus servers cost no more than one
READ_WITHIN_S = 5.0
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 10_800.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0)
"""Bounds for what lasts from seconds to a week."""

Labels = tuple[str, ...]
Read = Callable[[], Awaitable[Iterable[Metric]]]  #: Returns what is so now

disable_created_metrics()  # pyright: ignore[reportUnknownMemberType]
REGISTRY = CollectorRegistry()
ProcessCollector(namespace="wattshift", registry=REGISTRY)


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """Return a new counter of this process; its name ends with ``_total``."""
    return Counter(name, help_text, labels, registry=REGISTRY)


def histogram(name: str, help_text: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS) -> Histogram:
    return Histogram(name, help_text, labels, registry=REGISTRY, buckets=bounds)


def gauge(name: str, help_text: str, labels: Sequence[str], rows: Iterable[tuple[Labels, float | None]]) -> Metric:
    """Return current values by the values of ``labels``; a row without a number is left out, as unknown is not 0."""
    found = GaugeMetricFamily(name, help_text, labels=labels)
    for values, number in rows:
        if number is not None:
            found.add_metric(values, number)
    return found


def single(name: str, help_text: str, number: float | None) -> Metric:
    """Return a metric of one number without labels; it is empty if the number is not known."""
    return gauge(name, help_text, (), [((), number)])


class Bounded:
    """Limits the number of values of a label: after the first ``most``, all others become ``other``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[Labels] = set()

    def __call__(self, *values: str) -> Labels:
        """Return the values themselves, or ``other`` in place of each."""
        if values not in self._known:
            if len(self._known) >= self._most:
                return ("other",) * len(values)
            self._known.add(values)
        return values


class _Source:
    """Metrics that are read on request, once for all simultaneous requests."""

    def __init__(self, name: str, read: Read, clock_s: Callable[[], float]) -> None:
        self.name, self._read, self._clock_s = name, read, clock_s
        self._kept: list[Metric] = []
        self._until_s = -1.0
        self._lock = asyncio.Lock()
        self.answers = True

    async def families(self) -> list[Metric]:
        """Return the metric families; if they cannot be read now, log that and return none."""
        async with self._lock:
            if self._clock_s() >= self._until_s:
                try:
                    async with asyncio.timeout(READ_WITHIN_S):
                        self._kept = list(await self._read())
                    self.answers = True
                except Exception as error:  # whatever is the matter, the other figures are shown
                    log.warning("metrics.not_read", source=self.name, error=str(error) or type(error).__name__)
                    self._kept, self.answers = [], False
                self._until_s = self._clock_s() + KEPT_S
            return self._kept


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock_s = registry, clock_s
        self._sources: list[_Source] = []

    def add(self, name: str, read: Read) -> None:
        """Add a source to be read on request; the log refers to it by ``name`` if it cannot be read."""
        self._sources.append(_Source(name, read, self._clock_s))

    async def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        read = await asyncio.gather(*(source.families() for source in self._sources))
        families = [family for each in read for family in each]
        families.append(gauge("wattshift_build_info", "The release that runs.", ["version"], [((RELEASE,), 1.0)]))
        families.append(
            gauge(
                "wattshift_metrics_source_up",
                "1 for figures that could be read, 0 for those that are missing.",
                ["source"],
                [((source.name,), float(source.answers)) for source in self._sources],
            )
        )
        return await asyncio.to_thread(self._written, families)

    def _written(self, families: list[Metric]) -> bytes:
        shown: Any = SimpleNamespace(collect=lambda: families)
        return generate_latest(shown) + generate_latest(self._registry)


router = APIRouter()


@router.get("/metrics")
async def read_metrics(_: Operator, request: Request) -> Response:
    """Return the process's metrics, in Prometheus's text format."""
    metrics: Metrics = request.app.state.metrics
    return Response(await metrics.text(), media_type=MEDIA_TYPE)


REQUESTS = histogram(
    "wattshift_http_request_duration_seconds",
    "From a request's arrival to the end of its answer, by route; streams of events are left out.",
    ("method", "route", "status"),
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def note_request(method: str, route: str, status: int, began_s: float) -> None:
    """Record an answered request; ``began_s`` is from ``time.perf_counter``."""
    known = method if method in METHODS else "other"
    REQUESTS.labels(known, route, str(status)).observe(time.perf_counter() - began_s)


class RequestTimes:
    """Records every request to a FastAPI app; one that no route matches has the route ``none``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, is_stream = time.perf_counter(), 0, False

        async def noting(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if not is_stream and status:
                note_request(scope["method"], getattr(scope.get("route"), "path", "none"), status, began_s)
