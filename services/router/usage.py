"""What the router reports to the ledger: requests by server, key, model and class, a minute at a time.

Energy is not added to the ledger but divided: a server's job has its ledger lines already, and the requests' shares of
the server's time tell whose they were (``services/telemetry/reports.py``).
"""

import time
from collections import OrderedDict
from datetime import UTC, datetime

from services.contracts.identity import ResolvedKey
from services.contracts.routing import RequestUsage, UsageReport
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.router.fleet import Server
from services.router.streams import Footprint
from services.router.turn import Tokens

log = Log(__name__)

WINDOW_S = 60
MOST_WINDOWS = 1_440  #: Windows kept while telemetry does not answer: a day

Key = tuple[str, str, str, str, str]  #: Job, tenant, key, model, class


class UsageReporter:
    """Adds up what requests used, and reports each minute once it is over."""

    def __init__(self, telemetry: ServiceClient, router: str) -> None:
        self._telemetry = telemetry
        self._router = router
        self._windows: OrderedDict[int, dict[Key, list[float]]] = OrderedDict()

    def add(
        self,
        key: Key,
        *,
        share_s: float,
        input_tokens: int,
        output_tokens: int,
        is_estimated: bool = False,
        energy_j: float | None,
        carbon_gco2: float | None,
        now_s: float | None = None,
    ) -> None:
        """Add a request that has just ended; ``is_estimated`` if its server did not state its tokens."""
        now_s = time.time() if now_s is None else now_s
        start_s = int(now_s // WINDOW_S * WINDOW_S)
        window = self._windows.get(start_s)
        if window is None:
            window = self._windows[start_s] = {}
            if len(self._windows) > MOST_WINDOWS:
                lost_s, lost = self._windows.popitem(last=False)
                log.error("usage.lost", start_s=lost_s, lines=len(lost))
        sums = window.get(key)
        if sums is None:
            sums = window[key] = [0.0] * 7
        sums[0] += 1.0
        sums[1] += input_tokens
        sums[2] += output_tokens
        sums[3] += is_estimated
        sums[4] += share_s
        sums[5] += energy_j or 0.0
        sums[6] += carbon_gco2 or 0.0

    def served(
        self,
        server: Server,
        key: ResolvedKey,
        model: str,
        request_class: str,
        share_s: float,
        tokens: Tokens,
        footprint: Footprint,
    ) -> None:
        """Add a request that has just ended; ``share_s`` is its share of the server's time."""
        self.add(
            (server.spec.job_id or server.id, key.identity.tenant_id, key.identity.key_id, model, request_class),
            share_s=share_s,
            input_tokens=tokens.input,
            output_tokens=tokens.output,
            is_estimated=not tokens.are_stated,
            energy_j=footprint.energy_j,
            carbon_gco2=footprint.carbon_gco2,
        )

    async def send(self, now_s: float | None = None, *, all_windows: bool = False) -> None:
        """Report the windows that are over; at the end of the process, also the current one.

        Raises:
            ProblemError: Telemetry does not answer; what was not accepted is reported next time.
        """
        now_s = time.time() if now_s is None else now_s
        for start_s in list(self._windows):
            if start_s + WINDOW_S > now_s and not all_windows:
                break
            report = UsageReport(
                router=self._router,
                start_at=datetime.fromtimestamp(start_s, UTC),
                usages=[_usage(key, sums) for key, sums in self._windows[start_s].items()],
            )
            try:
                await self._telemetry.request(
                    "POST", "/internal/request-usage", body=report, retry=True, attempts=2, timeout_s=5
                )
            except ProblemError as error:
                if error.status < 500:  # it will not be accepted later either, and must not hold up the others
                    log.error("usage.refused", start_s=start_s, error=error.detail)
                    del self._windows[start_s]
                raise
            del self._windows[start_s]


def _usage(key: Key, sums: list[float]) -> RequestUsage:
    requests, input_tokens, output_tokens, estimated, share_s, energy_j, carbon_gco2 = sums
    return RequestUsage(
        job_id=key[0],
        tenant_id=key[1],
        key_id=key[2],
        model=key[3],
        request_class=key[4],
        requests=int(requests),
        input_tokens=int(input_tokens),
        output_tokens=int(output_tokens),
        estimated_requests=int(estimated),
        share_s=share_s,
        energy_j=energy_j,
        carbon_gco2=carbon_gco2,
    )
