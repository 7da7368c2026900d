"""The program of a profiling job: it starts a model server, sends it one request after another, and times them.

It follows ``own_server`` in the job's program, and keeps to the standard library of Python 3.8, too. Its only argument
is a JSON object, and its standard output one JSON line. Requests go over one connection on loopback, as long as the
server keeps it open.

Instances that are measured together meet at a loopback port once their servers are ready, and begin at the same moment.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import time
from typing import Any

from services.cli.serving.own_server import GaveUp, running

SLOWEST = 8
"""Instances beside this one take at most so many times as long for a request."""


def send_for(seconds: float, port: int, request: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Send one request after another; return when they began and ended, UTC, and how long each took, in seconds."""
    body = request["body"].encode()
    headers = {"content-type": request["content_type"]} if body else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=request["timeout_s"])
    took_s: list[float] = []
    started, began = time.time(), time.perf_counter()
    now = began
    try:
        while now - began < seconds:
            before = now
            connection.request(request["method"], request["path"], body, headers)
            answer = connection.getresponse()
            answer.read()
            now = time.perf_counter()
            if not 200 <= answer.status < 300:
                raise GaveUp(f"request {len(took_s) + 1} was answered with {answer.status}")
            took_s.append(now - before)
    except (OSError, http.client.HTTPException) as error:
        raise GaveUp(f"request {len(took_s) + 1} failed: {error or type(error).__name__}") from error
    finally:
        connection.close()
    return started, started + now - began, took_s


def meet(port: int, token: str, rank: int, instances: int, within_s: float) -> float:
    """Wait for all instances and return when they begin, UTC seconds; the one of rank 0 lets the others in.

    Raises:
        GaveUp: Some do not arrive in time, or the port is in use.
    """
    deadline = time.monotonic() + within_s
    return _let_in(port, token, instances, deadline) if rank == 0 else _come_in(port, token, deadline)


def _let_in(port: int, token: str, instances: int, deadline: float) -> float:
    door = socket.socket()
    inside: list[socket.socket] = []
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", port))
        door.listen(instances)
        while len(inside) < instances - 1:
            door.settimeout(max(deadline - time.monotonic(), 0.001))
            guest, _ = door.accept()
            guest.settimeout(5)
            try:
                known = guest.recv(len(token)).decode() == token
            except (OSError, ValueError):
                known = False
            if known:
                inside.append(guest)
            else:
                guest.close()
        begins = time.time() + 0.5
        for guest in inside:
            guest.sendall(f"{begins!r}\n".encode())
        return begins
    except socket.timeout:  # noqa: UP041  it is no TimeoutError before Python 3.10
        raise GaveUp(f"only {len(inside) + 1} of {instances} instances were ready in time") from None
    except OSError as error:
        raise GaveUp(f"the instances cannot meet at port {port}: {error}") from error
    finally:
        for each in [door, *inside]:
            each.close()


def _come_in(port: int, token: str, deadline: float) -> float:
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise GaveUp("the other instances were not ready in time")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=left_s) as way:
                way.sendall(token.encode())
                return float(way.makefile().readline())
        except (OSError, ValueError):  # nobody lets in yet, or no more
            time.sleep(0.1)


def percentile(ordered: list[float], share: float) -> float:
    """Return a percentile of sorted values, interpolated between the two nearest."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the server, measure it and end it."""
    together = plan.get("together")
    with running(plan) as port:
        if together is not None:
            begins = meet(within_s=plan["ready_timeout_s"], **together)
            time.sleep(max(begins - time.time(), 0.0))
        send_for(plan["warmup_s"], port, plan["request"])
        started, ended, took_s = send_for(plan["seconds"], port, plan["request"])
        if together is not None:  # so that no instance loses its neighbours while it is still measured
            send_for(min(max(1.0, SLOWEST * max(took_s)), plan["seconds"]), port, plan["request"])
    took_s.sort()
    return {
        "start_s": started,
        "end_s": ended,
        "requests": len(took_s),
        "mean_ms": 1000 * sum(took_s) / len(took_s),
        "p50_ms": 1000 * percentile(took_s, 0.5),
        "p95_ms": 1000 * percentile(took_s, 0.95),
    }


def main() -> int:
    """Measure as the argument says."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the server ends, too
    try:
        print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    except (GaveUp, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
