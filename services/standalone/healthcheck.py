"""Exit 0 if a process of a container is well: `python -m services.standalone.healthcheck PORT|pulse`.

With a port, the service on it has to be ready; with `pulse`, the event loop of a worker has to turn.
"""

import os
import sys
from pathlib import Path

from services.kit.pulse import PULSE_FILE, is_beating
from services.kit.tls import Tls
from services.standalone.process import http_ready


def is_well(what: str) -> bool:
    """Return whether the process is well."""
    if what == "pulse":
        return is_beating(Path(os.environ[PULSE_FILE]))
    tls = Tls.of_environment(os.environ)
    return http_ready(int(what), context=tls.client() if tls.certificate else None)


if __name__ == "__main__":
    sys.exit(not is_well(sys.argv[1]))
