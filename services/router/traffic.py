"""What the router reports to the planner: the requests of each window of 5 seconds, by arrival.

A window is reported as soon as it is over, with predicted lengths of the answers that are not complete yet, and again
once they are: the later report replaces the earlier one. The source's name contains the process's start, so that a
router that restarts within a window adds to it and replaces nothing.
"""

import time
from datetime import UTC, datetime

from services.contracts.identity import Identity, Role
from services.contracts.serving import MAX_WINDOW_REQUESTS, TrafficReport, TrafficWindow
from services.core.domain.serving import WINDOW_S
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.router.fleet import Fleet, Pool

log = Log(__name__)

KEPT_S = 900.0  #: How long a window is sent again when its answers' lengths become known
MOST_SILENT_S = 300  #: How far back silence is reported, after serving was away
MOST_WINDOWS = 720
MOST_REQUESTS = 50_000  #: Of one report


class _Window:
    __slots__ = ("requests", "sent")

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.sent: list[tuple[int, int]] | None = None


class TrafficReporter:
    """Counts requests at their arrival, and reports them."""

    def __init__(self, serving: ServiceClient, fleet: Fleet, source: str) -> None:
        self._serving = serving
        self._fleet = fleet
        self._source = source
        self._windows: dict[str, dict[int, _Window]] = {}
        self._reported: dict[str, int] = {}

    def arrived(self, pool: Pool, at_s: float, input_tokens: int, output_tokens: float) -> list[int]:
        """Count a request; return its lengths, the second of which the caller replaces once it is known.

        Args:
            pool: The pool that serves its model.
            output_tokens: Predicted length of its answer.
        """
        lengths = [input_tokens, round(output_tokens)]
        if not pool.is_planned:
            return lengths
        windows = self._windows.setdefault(pool.spec.name, {})
        start_s = int(at_s // WINDOW_S * WINDOW_S)
        window = windows.get(start_s)
        if window is None:
            window = windows[start_s] = _Window()
        if len(window.requests) < MAX_WINDOW_REQUESTS:
            window.requests.append(lengths)
        return lengths

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

    async def _send_pool(self, pool: Pool, now_s: float) -> None:
        name = pool.spec.name
        windows = self._windows.setdefault(name, {})
        last_s = int(now_s // WINDOW_S * WINDOW_S - WINDOW_S)
        step_s = int(WINDOW_S)
        unreported_s = self._reported.get(name, last_s - step_s) + step_s
        for start_s in range(max(unreported_s, last_s - MOST_SILENT_S), last_s + 1, step_s):
            windows.setdefault(start_s, _Window())  # a window without requests says that none came
        due: list[tuple[int, _Window, list[tuple[int, int]]]] = []
        total = 0
        for start_s in sorted(windows):
            if start_s > last_s:
                break
            window = windows[start_s]
            found = [(lengths[0], lengths[1]) for lengths in window.requests]
            if found == window.sent:
                continue
            if due and (total + len(found) > MOST_REQUESTS or len(due) >= MOST_WINDOWS):
                break
            total += len(found)
            due.append((start_s, window, found))
        if due:
            report = TrafficReport(
                source=self._source,
                windows=[
                    TrafficWindow(start_at=datetime.fromtimestamp(start_s, UTC), requests=found)
                    for start_s, _, found in due
                ],
            )
            caller = Identity(tenant_id=pool.spec.tenant_id, role=Role.USER, key_id="router")
            await self._serving.request(
                "POST", f"/v1/pools/{name}/traffic", body=report, identity=caller, retry=True, attempts=2
            )
            for _, window, found in due:
                window.sent = found
        self._reported[name] = last_s
        for start_s in [start_s for start_s, window in windows.items() if self._is_over(start_s, window, now_s)]:
            del windows[start_s]

    @staticmethod
    def _is_over(start_s: int, window: _Window, now_s: float) -> bool:
        if window.sent is not None and not window.sent:
            return True
        return start_s < now_s - KEPT_S
