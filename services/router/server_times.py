"""What model servers themselves measured of the time between tokens: the sums of their Prometheus histograms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from services.kit.metric_sums import metric_sum
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
READ_S = 0.5
"""A server that takes longer to state its metrics is not waited for: reports are due every second."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a server measured between two readings: its mean time per token, of how many, and over how long."""

    tbt_s: float
    tokens: int
    window_s: float


class ServerTimes:
    """Reads servers' metrics, and remembers the last reading of each."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, float, float]] = {}

    async def since_last(self, servers: Iterable[Server]) -> dict[str, Measured]:
        """Read these servers; return what those measured that made tokens since they were last read, by id."""
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


async def _sums(server: Server) -> tuple[float, float] | None:
    """Return the seconds and the number of all tokens that a server has made; None if it does not say in time."""
    if server.spec.load_path is None:
        return None
    try:
        async with asyncio.timeout(READ_S):
            status, content = await get(server, server.spec.load_path, connect_s=READ_S, total_s=READ_S)
    except (UpstreamError, TimeoutError):
        return None
    if status != 200:
        return None
    metrics = content.decode(errors="replace")
    for name in HISTOGRAMS:
        seconds, tokens = metric_sum(metrics, {f"{name}_sum"}), metric_sum(metrics, {f"{name}_count"})
        if seconds is not None and tokens is not None:
            return seconds, tokens
    return None
