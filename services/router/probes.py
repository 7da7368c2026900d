"""Probes of servers over the data path's own connections: is it there, and how far away."""

from __future__ import annotations

import time

from services.router.fleet import Server
from services.router.upstream import Connection, Limits, UpstreamError

PROBE_S = 2.0
LARGEST = 4 * 1024 * 1024


async def get(server: Server, path: str, *, connect_s: float, total_s: float) -> tuple[int, bytes]:
    """Return status and body of what a server answers to a GET of a path below its address.

    Raises:
        UpstreamError: It does not answer in time, or with too much.
    """
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

    503 ejects it, as it says itself that it cannot serve (vLLM's engine is dead, llama.cpp loads its model). Any other
    answer but an error takes back an ejected server on trial; none counts as a failure.
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
