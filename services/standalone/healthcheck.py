"""Exit 0 if the service on a port of this machine is ready: `python -m services.standalone.healthcheck PORT`."""

import sys

from services.standalone.process import http_ready

if __name__ == "__main__":
    sys.exit(not http_ready(int(sys.argv[1])))
