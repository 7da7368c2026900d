"""What the router reports in windows of time: requests used to the ledger, arrivals and applications to serving.

A window is reported once it is over and again until it is accepted; a later report of it replaces the earlier one.
"""

import math
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from services.contracts.apps import LATENCY_BOUNDS_MS, AppObservation, AppObservations, AppServerObservation
from services.contracts.identity import Identity, ResolvedKey, Role
from services.contracts.routing import RequestUsage, UsageReport
from services.contracts.serving import MAX_WINDOW_REQUESTS, TrafficReport, TrafficWindow
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.router.fleet import Fleet, Pool, Server
from services.router.streams import Footprint
from services.router.turn import Tokens

log = Log(__name__)

USAGE_S, WINDOW_S = 60, 5  #: Lengths of the windows of usage, and of those of arrivals and applications
REFUSED = frozenset({400, 413, 422})
"""Statuses of a report that will not be accepted later either, and must not hold up the others. Any other may pass: a
token is refused (401) while two clocks differ."""
MOST_USAGE_WINDOWS = 1_440  #: Kept while telemetry does not answer: a day
MOST_APP_WINDOWS = 60  #: Kept while serving does not answer: five minutes, after which a plan has no use for them
KEPT_S = 900.0  #: How long a window of arrivals is sent again, until it is accepted and its answers' lengths are known
MOST_SILENT_S = 300  #: How far back silence is reported, after serving was away
MOST_WINDOWS, MOST_REQUESTS = 720, 50_000  #: Of one report of arrivals

Key = tuple[str, str, str, str, str]  #: Job, tenant, key, model, class


def _start_s(at_s: float, length_s: int = WINDOW_S) -> int:
    return int(at_s // length_s * length_s)


async def _deliver(service: ServiceClient, path: str, report: UsageReport | AppObservations, what: str) -> None:
    """Send the report of a window; one that will never be accepted counts as sent.

    Raises:
        ProblemError: The service does not answer, or refuses the token.
    """
    try:
        await service.request("POST", path, body=report, retry=True, attempts=2, timeout_s=5)
    except ProblemError as error:
        if error.status not in REFUSED:
            raise
        log.error(f"{what}.refused", start_at=report.start_at.isoformat(), error=error.detail)


class UsageReporter:
    """Adds up what requests used, by server, key, model and class, and reports each minute once it is over.

    Energy is not added to the ledger but divided: a server's job has its ledger lines already, and the requests' shares
    of the server's time tell whose they were (``services/telemetry/reports.py``). After the clock was set back, minutes
    come a second time: from the first that was reported before, reports are those of another router by name.
    """

    def __init__(self, telemetry: ServiceClient, router: str) -> None:
        self._telemetry, self._router = telemetry, router
        self._windows: OrderedDict[tuple[str, int], dict[Key, list[float]]] = OrderedDict()
        self._times_back, self._reported_s = 0, 0

    def served(
        self,
        server: Server,
        key: ResolvedKey,
        model: str,
        request_class: str,
        share_s: float,
        tokens: Tokens,
        footprint: Footprint,
        now_s: float | None = None,
    ) -> None:
        """Add a request that has just ended; ``share_s`` is its share of the server's time."""
        start_s = _start_s(time.time() if now_s is None else now_s, USAGE_S)
        if start_s <= self._reported_s:
            self._times_back, self._reported_s = self._times_back + 1, 0
        name = f"{self._router}.{self._times_back}" if self._times_back else self._router
        window = self._windows.get((name, start_s))
        if window is None:
            window = self._windows[name, start_s] = {}
            if len(self._windows) > MOST_USAGE_WINDOWS:
                (_, lost_s), lost = self._windows.popitem(last=False)
                log.error("usage.lost", start_s=lost_s, lines=len(lost))
        identity = key.identity
        line = (server.spec.job_id or server.id, identity.tenant_id, identity.key_id, model, request_class)
        sums = window.get(line)
        if sums is None:
            sums = window[line] = [0.0] * 7
        sums[0] += 1.0
        sums[1] += tokens.input
        sums[2] += tokens.output
        sums[3] += not tokens.are_stated
        sums[4] += share_s
        sums[5] += footprint.energy_j or 0.0
        sums[6] += footprint.carbon_gco2 or 0.0

    async def send(self, now_s: float | None = None, *, all_windows: bool = False) -> None:
        """Report the windows that are over; at the end of the process, also the current one.

        Raises:
            ProblemError: Telemetry does not answer, or refuses the token; what was not accepted is reported next time.
        """
        now_s = time.time() if now_s is None else now_s
        for name, start_s in list(self._windows):
            if start_s + USAGE_S > now_s and not all_windows:
                continue  # not the last one, if the clock was set back
            self._reported_s = max(self._reported_s, start_s)
            lines = self._windows.get((name, start_s), {})  # empty if it was lost while the others were sent
            report = UsageReport(
                router=name,
                start_at=datetime.fromtimestamp(start_s, UTC),
                usages=[_usage(key, sums) for key, sums in lines.items()],
            )
            await _deliver(self._telemetry, "/internal/request-usage", report, "usage")
            self._windows.pop((name, start_s), None)  # it may have been lost meanwhile


def _usage(key: Key, sums: list[float]) -> RequestUsage:
    values = (*key, *map(int, sums[:4]), *sums[4:])
    return RequestUsage.model_validate(dict(zip(RequestUsage.model_fields, values, strict=True)))


class _Arrivals:
    """The requests of a window, in arrays, which garbage collection passes over: a busy router keeps millions."""

    __slots__ = ("changes", "input_tokens", "output_tokens", "sent")

    def __init__(self) -> None:
        self.input_tokens, self.output_tokens = array("Q"), array("Q")
        self.changes, self.sent = 0, -1  #: How often it has changed, and had when it was last accepted

    def learn(self, at: int, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens[at], self.output_tokens[at] = input_tokens, output_tokens
        self.changes += 1


def unreported(input_tokens: int, output_tokens: int) -> None:
    """Take the lengths of a request that pools are not planned for."""


class TrafficReporter:
    """Counts the requests of pools at their arrival, and reports them to the planner.

    A window is reported with predicted lengths of the answers that are not complete yet, and again once they are. The
    source's name contains the process's start, so that a router that restarts within a window replaces nothing.
    """

    def __init__(self, serving: ServiceClient, fleet: Fleet, source: str) -> None:
        self._serving, self._fleet, self._source = serving, fleet, source
        self._windows: dict[str, dict[int, _Arrivals]] = {}
        self._reported: dict[str, int] = {}

    def arrived(self, pool: Pool, at_s: float, input_tokens: int, output_tokens: float) -> Callable[[int, int], None]:
        """Count a request with the predicted length of its answer; return what to call with both lengths once known."""
        if not pool.is_planned:
            return unreported
        windows = self._windows.setdefault(pool.spec.name, {})
        start_s = _start_s(at_s)
        window = windows.get(start_s)
        if window is None:
            window = windows[start_s] = _Arrivals()
        if (at := len(window.input_tokens)) >= MAX_WINDOW_REQUESTS:
            return unreported
        window.input_tokens.append(input_tokens)
        window.output_tokens.append(round(output_tokens))
        window.changes += 1
        return partial(window.learn, at)

    async def send(self, now_s: float | None = None) -> None:
        """Report the windows that are over and new or changed; what is not accepted is reported again next time."""
        now_s = time.time() if now_s is None else now_s
        for pool in [*self._fleet.pools.values()]:
            if pool.is_planned:
                try:
                    await self._send_pool(pool, now_s)
                except ProblemError as error:
                    log.warning("traffic.not_reported", pool=pool.spec.name, error=error.detail)
        for name in set(self._windows) - set(self._fleet.pools):
            del self._windows[name]
            self._reported.pop(name, None)
        for windows in self._windows.values():  # also those that were not accepted: they have no end
            for start_s in [start_s for start_s in windows if start_s < now_s - KEPT_S]:
                del windows[start_s]

    async def _send_pool(self, pool: Pool, now_s: float) -> None:
        name = pool.spec.name
        windows = self._windows.setdefault(name, {})
        last_s = _start_s(now_s) - WINDOW_S
        unreported_s = self._reported.get(name, last_s - WINDOW_S) + WINDOW_S
        for start_s in range(max(unreported_s, last_s - MOST_SILENT_S), last_s + 1, WINDOW_S):
            windows.setdefault(start_s, _Arrivals())  # a window without requests says that none came
        due: list[tuple[int, _Arrivals, int]] = []
        total = 0
        for start_s in sorted(each for each in windows if each <= last_s):
            window = windows[start_s]
            if window.changes == window.sent:
                continue
            total += len(window.input_tokens)
            if due and (total > MOST_REQUESTS or len(due) >= MOST_WINDOWS):
                break
            due.append((start_s, window, window.changes))
        if due:
            report = TrafficReport(
                source=self._source,
                windows=[
                    TrafficWindow(
                        start_at=datetime.fromtimestamp(start_s, UTC),
                        requests=list(zip(each.input_tokens, each.output_tokens, strict=True)),
                    )
                    for start_s, each, _ in due
                ],
            )
            caller = Identity(tenant_id=pool.spec.tenant_id, role=Role.USER, key_id="router")
            await self._serving.request(
                "POST", f"/v1/pools/{name}/traffic", body=report, identity=caller, retry=True, attempts=2
            )
            for _, window, changes in due:
                window.sent = changes
        self._reported[name] = last_s
        for start_s in [start_s for start_s, each in windows.items() if each.sent == 0]:
            del windows[start_s]


@dataclass(slots=True)
class _App:
    arrivals: int = 0
    failed: int = 0
    latencies_ms: list[float] = field(default_factory=list[float])
    servers: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class ObservationReporter:
    """Counts arrivals, answers and latencies of applications, and reports them to serving, which plans by them."""

    def __init__(self, serving: ServiceClient, router: str, waiting: Callable[[str], int]) -> None:
        """Take the function that returns how many requests wait in an application's queue."""
        self._waiting, self._serving, self._router = waiting, serving, router
        self._windows: OrderedDict[int, dict[str, _App]] = OrderedDict()
        self._last_s = 0

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
        return self._window(_start_s(now_s)).setdefault(app, _App())

    def _window(self, start_s: int) -> dict[str, _App]:
        if start_s not in self._windows:
            self._windows[start_s] = {}
            if len(self._windows) > MOST_APP_WINDOWS:
                self._windows.popitem(last=False)
        return self._windows[start_s]

    async def send(self, apps: Collection[str], now_s: float | None = None) -> None:
        """Report the windows that are over for these applications; one without requests is reported as such.

        Raises:
            ProblemError: Serving does not answer; what was not accepted is reported next time.
        """
        last_s = _start_s(time.time() if now_s is None else now_s) - WINDOW_S
        if apps:
            for start_s in range(max(self._last_s + WINDOW_S, last_s - WINDOW_S), last_s + 1, WINDOW_S):
                self._window(start_s)
        self._last_s = max(self._last_s, last_s)
        for start_s in sorted(each for each in self._windows if each <= last_s):
            window = self._windows.get(start_s, {})
            names = [name for name in {**dict.fromkeys(apps), **window} if name in window or start_s == last_s]
            report = AppObservations(
                router=self._router,
                start_at=datetime.fromtimestamp(start_s, UTC),
                apps=[_observation(name, window.get(name) or _App(), self._waiting(name)) for name in names],
            )
            if report.apps:
                await _deliver(self._serving, "/internal/apps/observations", report, "observations")
            self._windows.pop(start_s, None)


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
