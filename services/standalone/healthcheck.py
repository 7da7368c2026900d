"""Exit 0 if a container's process is well: `python -m services.standalone.healthcheck PORT|pulse|tcp:ADDRESSES`.

With a port, the service on it has to be ready; with `pulse`, a worker's event loop has to be turning; with the
addresses of servers elsewhere, `HOST:PORT,HOST:PORT/...` as in URLs, one has to be reachable.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

from services.kit.pulse import PULSE_FILE, is_beating
from services.kit.tls import Tls
from services.standalone.probes import HttpProbe


def is_well(what: str) -> bool:
    if what == "pulse":
        return is_beating(Path(os.environ[PULSE_FILE]))
    if what.startswith("tcp:"):
        return any(map(is_reached, what.removeprefix("tcp:").partition("/")[0].split(",")))
    return asyncio.run(HttpProbe(("127.0.0.1", int(what)), Tls.of_environment(os.environ)).is_ready())


def is_reached(address: str) -> bool:
    """Return whether something listens at an address `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(not is_well(sys.argv[1]))
