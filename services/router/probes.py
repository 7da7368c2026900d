"""Probes of servers over the data path's own connections: is it there, and how far away."""

from __future__ import annotations

import time

from services.router.fleet import Server
from services.router.upstream import Connection, Limits, UpstreamError

PROBE_S = 2.0
LARGEST = 4 * 1024 * 1024


async def probe(server: Server, limits: Limits) -> bool:
    """Ask a server for its models; what it answers is nobody's concern but that it answers.

    An answer takes back an ejected server on trial; none counts as a failure.
    """
    connection: Connection | None = None
    origin = server.origin
    try:
        connection = await origin.connection(Limits(min(PROBE_S, limits.connect_s), PROBE_S, PROBE_S, PROBE_S))
        request = b"GET %s/health HTTP/1.1\r\nhost: %s\r\nuser-agent: wattshift-router\r\n\r\n"
        connection.send(request % (origin.path, origin.authority))
        connection.limit(PROBE_S)
        await connection.whole(LARGEST)
        if connection.status < 500:
            server.breaker.reachable(time.monotonic())
    except UpstreamError as error:
        if server.breaker.opened_s is None:
            server.breaker.failed(time.monotonic(), is_certain=error.reason == "connect")
        return False
    finally:
        if connection is not None:
            connection.release()
    return True
