"""Exit 0 if a process of a container is well: `python -m services.standalone.healthcheck PORT|pulse`.

With a port, the service on it has to be ready; with `pulse`, the event loop of a worker has to turn.
"""

import os
import sys
from pathlib import Path

from services.kit.pulse import PULSE_FILE, is_beating
from services.standalone.process import http_ready


def is_well(what: str) -> bool:
    """Return whether the process is well."""
    return is_beating(Path(os.environ[PULSE_FILE])) if what == "pulse" else http_ready(int(what))


if __name__ == "__main__":
    sys.exit(not is_well(sys.argv[1]))
