"""What the router reports to serving about applications: arrivals, answers and their latencies, in windows of 5 s.

Plans are based on it. A window is sent once it is over, again until it is accepted, and sending it twice replaces it.
"""

import math
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from services.contracts.apps import LATENCY_BOUNDS_MS, AppObservation, AppObservations, AppServerObservation
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

WINDOW_S = 5
MOST_WINDOWS = 60
"""Windows kept while serving does not answer: five minutes, after which a plan has no use for them."""


class _App:
    __slots__ = ("arrivals", "failed", "latencies_ms", "servers")

    def __init__(self) -> None:
        self.arrivals = 0
        self.failed = 0
        self.latencies_ms: list[float] = []
        self.servers: dict[str, list[float]] = {}


class ObservationReporter:
    """Counts requests of applications, and reports them."""

    def __init__(self, serving: ServiceClient, router: str, waiting: Callable[[str], int]) -> None:
        """Take the function that returns how many requests wait in an application's queue."""
        self._waiting = waiting
        self._serving = serving
        self._router = router
        self._windows: OrderedDict[int, dict[str, _App]] = OrderedDict()
        self._last_s = 0
        self._is_away = False

    def arrived(self, app: str, now_s: float) -> None:
        """Count a request's arrival, UTC seconds."""
        self._of(app, now_s).arrivals += 1

    def answered(self, app: str, server: str, latency_s: float, service_s: float, now_s: float) -> None:
        """Count an answer, with its latency since the arrival and its time at the instance."""
        found = self._of(app, now_s)
        found.latencies_ms.append(1e3 * latency_s)
        found.servers.setdefault(server, []).append(1e3 * service_s)

    def failed(self, app: str, now_s: float) -> None:
        """Count a request that no instance answered."""
        self._of(app, now_s).failed += 1

    def _of(self, app: str, now_s: float) -> _App:
        start_s = int(now_s // WINDOW_S * WINDOW_S)
        window = self._windows.get(start_s)
        if window is None:
            window = self._windows[start_s] = {}
            if len(self._windows) > MOST_WINDOWS:
                self._windows.popitem(last=False)
        found = window.get(app)
        if found is None:
            found = window[app] = _App()
        return found

    async def send(self, apps: Collection[str], now_s: float | None = None) -> None:
        """Report the windows that are over for these applications; one without requests is reported as such."""
        now_s = time.time() if now_s is None else now_s
        last_s = int(now_s // WINDOW_S * WINDOW_S) - WINDOW_S
        if apps:
            for start_s in range(max(self._last_s + WINDOW_S, last_s - WINDOW_S), last_s + 1, WINDOW_S):
                self._windows.setdefault(start_s, {})
        self._last_s = max(self._last_s, last_s)
        for start_s in sorted(self._windows):
            if start_s > last_s:
                break
            window = self._windows[start_s]
            names = [name for name in {**dict.fromkeys(apps), **window} if name in window or start_s == last_s]
            report = AppObservations(
                router=self._router,
                start_at=datetime.fromtimestamp(start_s, UTC),
                apps=[_observation(name, window.get(name) or _App(), self._waiting(name)) for name in names],
            )
            try:
                if report.apps:
                    await self._serving.request(
                        "POST", "/internal/apps/observations", body=report, retry=True, attempts=2, timeout_s=5
                    )
            except ProblemError as error:
                if not self._is_away:
                    log.warning("observations.not_reported", error=error.detail)
                self._is_away = True
                if error.status >= 500:
                    return
            else:
                self._is_away = False
            del self._windows[start_s]


def _observation(app: str, found: _App, waiting: int) -> AppObservation:
    latencies_ms = sorted(found.latencies_ms)
    return AppObservation(
        app=app,
        arrivals=found.arrivals,
        answered=len(latencies_ms),
        failed=found.failed,
        waiting=waiting,
        p50_ms=_quantile(latencies_ms, 0.50),
        p95_ms=_quantile(latencies_ms, 0.95),
        latency=_counts(latencies_ms),
        servers=[
            AppServerObservation(
                server=server,
                answered=len(times_ms),
                mean_service_ms=sum(times_ms) / len(times_ms),
                p95_service_ms=_quantile(sorted(times_ms), 0.95),
            )
            for server, times_ms in found.servers.items()
        ],
    )


def _quantile(increasing: list[float], share: float) -> float | None:
    """Return the smallest value that at least this share of all values does not exceed."""
    return increasing[max(0, math.ceil(share * len(increasing)) - 1)] if increasing else None


def _counts(values_ms: list[float]) -> list[int]:
    """Return how many values fall into each bucket, up to the last one with any."""
    counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
    for value_ms in values_ms:
        counts[bisect_left(LATENCY_BOUNDS_MS, value_ms)] += 1
    while counts and not counts[-1]:
        counts.pop()
    return counts
