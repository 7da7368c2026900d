"""Probes of servers over the data path's own connections: is it there, does it answer again, and how far away is it?"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import orjson

from services.kit.scraping import metric_sum
from services.kit.tasks import end_tasks
from services.router.fleet import Fleet, Server
from services.router.lanes import Lanes
from services.router.outgoing import RequestWriter
from services.router.upstream import Connection, Limits, UpstreamError

PROBE_S = 2.0
TRIAL_S = 20.0  #: Within which a server on trial has to make a token
LARGEST = 4 * 1024 * 1024


async def get(server: Server, path: str, *, connect_s: float, total_s: float) -> tuple[int, bytes]:
    """Return status and body of a server's answer to a GET; ``UpstreamError`` if it is too late, or too large."""
    origin = server.origin
    connection: Connection | None = None
    try:
        connection = await origin.connection(Limits(connect_s, total_s, total_s, total_s))
        request = b"GET %s%s HTTP/1.1\r\nhost: %s\r\nuser-agent: wattshift-router\r\n\r\n"
        connection.send(request % (origin.path, path.encode(), origin.authority))
        connection.limit(total_s)
        content = await connection.whole(LARGEST)
        return connection.status, content
    finally:
        if connection is not None:
            connection.release()


async def probe(server: Server, limits: Limits) -> bool:
    """Ask a server for its health.

    503 ejects it, because the server itself says that it cannot serve (vLLM's engine is dead, llama.cpp is loading its
    model). Any other answer except an error puts an ejected server on trial; none counts as a failure.
    """
    try:
        status, _ = await get(server, "/health", connect_s=min(PROBE_S, limits.connect_s), total_s=PROBE_S)
    except UpstreamError as error:
        if server.breaker.opened_s is None:
            server.breaker.failed(time.monotonic(), is_certain=error.reason == "connect")
        return False
    if status == 503:
        server.breaker.refused(time.monotonic())
    elif status < 500:
        server.breaker.reachable(time.monotonic())
    return True


class Trials:
    """Tries ejected servers while others serve, so that no user's request has to."""

    def __init__(self, fleet: Fleet, lanes: Lanes, writer: RequestWriter) -> None:
        self._fleet, self._lanes, self._writer = fleet, lanes, writer
        self.running: dict[str, asyncio.Task[None]] = {}  #: The trials in progress, by server

    def begin(self, limits: Limits, now_s: float) -> None:
        """Try the servers whose pause is over."""
        for server in self._fleet.servers.values():
            if server.breaker.opened_s is None or not server.breaker.passes(now_s) or server.id in self.running:
                continue
            if (model := self._model(server)) is not None:
                task = asyncio.get_running_loop().create_task(self._try(server, model, limits))
                self.running[server.id] = task
                task.add_done_callback(lambda _, name=server.id: self.running.pop(name, None))

    async def end(self) -> None:
        await end_tasks(list(self.running.values()))

    def _model(self, server: Server) -> str | None:
        """Return the model to ask a server for; None if no other server of its pools is serving meanwhile."""
        for pool in self._fleet.pools.values():
            if server in pool.servers and any(each.breaker.opened_s is None for each in pool.servers):
                own = server.spec.models or pool.spec.models
                return server.spec.upstream_model or next(each for each in pool.spec.models if each in own)
        return None

    async def _try(self, server: Server, model: str, limits: Limits) -> None:
        """Ask for one token. A server that has no completions says so (4xx), which counts as an answer."""
        breaker, connection, is_well = server.breaker, None, False
        body = orjson.dumps({"model": model, "prompt": "1", "max_tokens": 1})
        try:
            connection = await server.origin.connection(replace(limits, connect_s=min(PROBE_S, limits.connect_s)))
            head = self._writer.head(server, "/v1/completions")
            connection.send(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            connection.limit(TRIAL_S)
            await connection.whole(LARGEST)
            is_well = connection.status < 500 and connection.status not in (401, 403)
        except UpstreamError:
            pass
        finally:
            if connection is not None:
                connection.release()
        if breaker is not server.breaker or breaker.opened_s is None or breaker.trial is not None:
            return  # a request was the trial meanwhile, as no other server was left
        if is_well:
            breaker.succeeded()
            self._lanes.room_at(server)
        else:
            breaker.sent(self)
            breaker.failed(time.monotonic(), self)


HISTOGRAMS = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)
"""The first of these that a server has counts."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
QUEUED = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
"""Requests that a server works on, and that wait inside it; the share of its KV cache in use."""
MOST_REQUESTS = 1e6  #: That a server is believed to hold; fewer than none would make it look as fast as none is
READ_S = 0.5  #: A server that takes longer to state its metrics is not waited for: reports are due every second


MOST_TBT_S, MOST_TOKENS = 600.0, 10**8  #: That a server is believed to have measured: a mean time, since last asked


@dataclass(frozen=True, slots=True)
class Measured:
    """What a server measured between two readings: mean time per token, number of tokens, and length of the window."""

    tbt_s: float
    tokens: int
    window_s: float


class ServerTimes:
    """Reads servers' metrics, and remembers the last reading of each."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, float, float]] = {}

    async def since_last(self, servers: Iterable[Server]) -> dict[str, Measured]:
        """Read these servers; return, by id, what was measured by those that made tokens since their last reading."""
        asked = list(servers)
        read = dict(zip([each.id for each in asked], await asyncio.gather(*map(_sums, asked)), strict=True))
        now_s = time.monotonic()
        found: dict[str, Measured] = {}
        for server, sums in read.items():
            before = self._read.pop(server, None)
            if sums is None:
                continue
            self._read[server] = (*sums, now_s)
            if before is None:
                continue
            seconds, tokens = sums[0] - before[0], sums[1] - before[1]
            if 0 < seconds <= MOST_TBT_S * tokens and 1 <= tokens <= MOST_TOKENS:
                found[server] = Measured(seconds / tokens, round(tokens), now_s - before[2])
        return found

    def keep(self, servers: Iterable[str]) -> None:
        """Forget all servers but these."""
        names = set(servers)
        self._read = {name: each for name, each in self._read.items() if name in names}


async def read_load(server: Server) -> None:
    """Ask a server what it holds and how full its memory is; if it does not say, what routers hold there counts."""
    metrics = await _metrics(server) or ""
    running = metric_sum(metrics, RUNNING)
    server.tells_load = running is not None
    if running is None:
        server.costs.tell(0, server.held_elsewhere, 0, 0)
    else:
        queued, kv_use = metric_sum(metrics, QUEUED) or 0.0, metric_sum(metrics, KV_USE) or 0.0
        running, queued = (min(max(each, 0.0), MOST_REQUESTS) for each in (running, queued))
        server.costs.tell(server.held, running, queued, kv_use)


async def _metrics(server: Server) -> str | None:
    """Return the metrics of a server; None if it does not provide them in time."""
    if server.spec.load_path is None:
        return None
    try:
        async with asyncio.timeout(READ_S):
            status, content = await get(server, server.spec.load_path, connect_s=READ_S, total_s=READ_S)
    except (UpstreamError, TimeoutError):
        return None
    return content.decode(errors="replace") if status == 200 else None


async def _sums(server: Server) -> tuple[float, float] | None:
    """Return the total seconds and number of tokens that a server has made; None if it does not say in time."""
    metrics = await _metrics(server)
    if metrics is None:
        return None
    for name in HISTOGRAMS:
        seconds, tokens = metric_sum(metrics, {f"{name}_sum"}), metric_sum(metrics, {f"{name}_count"})
        if seconds is not None and tokens is not None:
            return seconds, tokens
    return None
