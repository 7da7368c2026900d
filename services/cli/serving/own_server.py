"""A model server of a profiling job's own: started for it, waited for, and ended with it.

The first part of such a job's program (``program``), which runs on the node, by ``python3 -c`` and possibly in a
container, so that it uses only the standard library of Python 3.8.
"""

import http.client
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any, Iterator  # noqa: UP035  as Python 3.8 has it


class GaveUp(Exception):  # noqa: N818  not an error of the program
    """The server cannot be measured; the text says why."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], port: int, path: str, within_s: float) -> None:
    """Return once the server answers ``path`` with 2xx; ``GaveUp`` if it ended, or was not ready in time."""
    deadline = time.monotonic() + within_s
    last = "nothing listens"
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise GaveUp(f"the server ended with exit status {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
            if 200 <= status < 300:
                return
            last = f"{path} answers {status}"
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        finally:
            connection.close()
        time.sleep(0.1)
    raise GaveUp(f"the server is not ready after {within_s:g} s: {last}")


@contextmanager
def running(plan: dict[str, Any]) -> Iterator[int]:
    """Yield the port of the plan's server once it is ready; it gets SIGTERM afterwards, and SIGKILL if that is in vain.

    Everything that it prints goes to standard error.
    """
    port = free_port()
    environment = dict(os.environ, WATTSHIFT_PORT=str(port))
    server = subprocess.Popen(plan["command"], env=environment, stdout=sys.stderr)
    try:
        wait_until_ready(server, port, plan["health_path"], plan["ready_timeout_s"])
        yield port
    finally:
        server.terminate()
        try:
            server.wait(plan["grace_s"])
        except subprocess.TimeoutExpired:
            server.kill()
