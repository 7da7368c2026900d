"""What model servers say themselves, as Prometheus metrics: the time between tokens, and what they hold."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from services.kit.scraping import metric_sum
from services.router.fleet import Server
from services.router.probes import get
from services.router.upstream import UpstreamError

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
READ_S = 0.5  #: A server that takes longer to state its metrics is not waited for: reports are due every second


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
            if before is not None and sums[0] > before[0] and sums[1] >= before[1] + 1:
                tokens = sums[1] - before[1]
                found[server] = Measured((sums[0] - before[0]) / tokens, round(tokens), now_s - before[2])
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
        queued, kv_use = metric_sum(metrics, QUEUED), metric_sum(metrics, KV_USE)
        server.costs.tell(server.held, running, queued or 0.0, kv_use or 0.0)


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
