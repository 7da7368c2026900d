"""What agents need to set the clocks of their devices: each second, the latencies that clients of their servers saw.

A stream shows its tokens as they come. Of an answer that comes all at once, only its time and its number of tokens are
seen, which give a bound; a server that has histograms of the time between tokens is asked for them instead.

There is a stream for each node in Redis, and an agent reads its own. A report that is lost is not sent again: the next
one follows within a second, and an agent that hears nothing returns to default clocks.
"""

import math
import time
from collections.abc import Mapping
from datetime import datetime

from redis.asyncio import Redis

from services.contracts.routing import LatencyReport, ServerLatency
from services.contracts.streams import LATENCY_FIELD, LATENCY_MAX_LENGTH, latency_stream
from services.kit.ids import utc_now
from services.router.fleet import Fleet
from services.router.lanes import Lanes
from services.router.metrics import Metrics
from services.router.probes import Measured, ServerTimes

STREAM_KEPT_S = 3_600


class _Second:
    """One server's and class's latencies since the last report."""

    __slots__ = (
        *("began_s", "e2e_s", "ended", "ended_tokens", "gap_max_s", "gap_s", "gaps", "max_e2e_s", "ttft_max_s"),
        *("ttft_s", "ttfts", "wait_s"),
    )

    def __init__(self) -> None:
        self.ttft_s, self.ttft_max_s, self.wait_s, self.ttfts = 0.0, 0.0, 0.0, 0
        self.forget_tokens()
        self.e2e_s, self.max_e2e_s, self.ended, self.ended_tokens = 0.0, 0.0, 0, 0

    def forget_tokens(self) -> None:
        self.gap_s, self.gap_max_s, self.gaps, self.began_s = 0.0, 0.0, 0, math.inf

    def measured(self, own: Measured, now_s: float) -> None:
        self.gap_s, self.gap_max_s, self.gaps = own.tbt_s * own.tokens, own.tbt_s, own.tokens
        self.began_s = now_s - own.window_s


class LatencyReporter:
    """Collects latencies, and sends them once a second."""

    def __init__(self, redis: Redis, fleet: Fleet, lanes: Lanes, router: str, metrics: Metrics) -> None:
        self._redis, self._fleet, self._lanes, self._router = redis, fleet, lanes, router
        self._blind = metrics.blind
        self._reported_s = math.inf
        self._found: dict[tuple[str, str], _Second] = {}
        self._times = ServerTimes()

    def first(self, server: str, request_class: str, ttft_s: float, wait_s: float) -> None:
        """Note a first token, and how much of the time until then its request waited in the queue."""
        second = self._of(server, request_class)
        second.wait_s += wait_s
        second.ttft_s += ttft_s
        second.ttfts += 1
        second.ttft_max_s = max(second.ttft_max_s, ttft_s)

    def gap(self, server: str, request_class: str, gap_s: float, tokens: int) -> None:
        """Note tokens that came after a pause."""
        second = self._of(server, request_class)
        second.gap_s += gap_s
        second.gaps += tokens
        second.gap_max_s = max(second.gap_max_s, gap_s / tokens)

    def whole(self, server: str, request_class: str, began_s: float, ended_s: float, tokens: int) -> None:
        """Note an answer that came all at once, with the tokens of each of its choices, as its server counts them.

        Its time at the server divided by its tokens is an upper bound for one token: it includes waiting at the server
        and the prefill.
        """
        self.gap(server, request_class, ended_s - began_s, tokens)
        second = self._of(server, request_class)
        second.began_s = min(second.began_s, began_s)

    def end(self, server: str, request_class: str, e2e_s: float, tokens: int) -> None:
        second = self._of(server, request_class)
        second.ended += 1
        second.e2e_s += e2e_s
        second.ended_tokens += tokens
        second.max_e2e_s = max(second.max_e2e_s, e2e_s)

    def _of(self, server: str, request_class: str) -> _Second:
        key = (server, request_class)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _Second()
        return found

    async def measured(self) -> dict[str, Measured]:
        """Ask servers whose clocks need it for their own measurements; return these by server.

        These are the servers of answers that are not streamed: the bounds from such answers describe the past, and
        there are none until one ends.
        """
        following = [each for each in self._fleet.every_server() if each.spec.clocks is not None]
        self._times.keep(each.id for each in following)
        whole = {server for (server, _), second in self._found.items() if second.began_s < math.inf}
        seen = {server for (server, _), second in self._found.items() if second.gaps} - whole
        return await self._times.since_last(
            each for each in following if each.id in whole or (each.held and each.id not in seen)
        )

    def reports(self, at: datetime, now_s: float, measured: Mapping[str, Measured]) -> dict[str, LatencyReport]:
        """Return the reports of the time since the last call, by node, including what servers measured themselves."""
        found, self._found = self._found, {}
        passed_s, self._reported_s = max(0.0, now_s - self._reported_s), now_s
        showed = {server for (server, _), second in found.items() if second.gaps or second.ttfts} | measured.keys()
        by_node: dict[str, list[ServerLatency]] = {}
        waiting = {lane.name: len(lane.queue) for lane in self._lanes.all()}
        for server in self._fleet.every_server():
            node = server.spec.node_id
            if node is None:
                continue
            if server.spec.clocks is not None and server.held and server.id not in showed:
                self._blind.add((server.id, server.location), passed_s)
            classes = {name for each, name in found if each == server.id} or {server.spec.request_class or ""}
            if (own := measured.get(server.id)) is not None:
                for name in classes:
                    found.setdefault((server.id, name), _Second()).forget_tokens()
                found[server.id, min(classes)].measured(own, now_s)
            for request_class in sorted(classes):
                second = found.get((server.id, request_class)) or _Second()
                by_node.setdefault(node, []).append(
                    ServerLatency(
                        server=server.id,
                        job_id=server.spec.job_id,
                        request_class=request_class,
                        held=server.held,
                        waiting=waiting.get(f"{server.spec.pool}\n{request_class}", 0),
                        first_tokens=second.ttfts,
                        mean_ttft_ms=1e3 * second.ttft_s / second.ttfts if second.ttfts else None,
                        max_ttft_ms=1e3 * second.ttft_max_s if second.ttfts else None,
                        mean_wait_ms=1e3 * second.wait_s / second.ttfts if second.ttfts else None,
                        tokens=second.gaps,
                        mean_tbt_ms=1e3 * second.gap_s / second.gaps if second.gaps else None,
                        max_tbt_ms=1e3 * second.gap_max_s if second.gaps else None,
                        ended=second.ended,
                        mean_e2e_s=second.e2e_s / second.ended if second.ended else None,
                        max_e2e_s=second.max_e2e_s if second.ended else None,
                        ended_tokens=second.ended_tokens,
                        oldest_s=max(now_s - second.began_s, 0.0),
                        clocks=server.spec.clocks,
                    )
                )
        return {node: LatencyReport(router=self._router, at=at, servers=servers) for node, servers in by_node.items()}

    async def send(self) -> None:
        """Send what was seen since the last call; ``RedisError`` if Redis does not answer, and it is lost."""
        reports = self.reports(utc_now(), time.monotonic(), await self.measured())
        if not reports:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for node, report in reports.items():
            stream, document = latency_stream(node), report.model_dump_json()
            pipeline.xadd(stream, {LATENCY_FIELD: document}, maxlen=LATENCY_MAX_LENGTH, approximate=True)
            pipeline.expire(stream, STREAM_KEPT_S)
        await pipeline.execute()
