"""The `wattshift` command: a client of the gateway, and of the installation on one machine.

Tables for people, `--json` for programs. Exit codes: 0 success; 1 a job waited for did not succeed, or a check failed;
2 the command line is wrong; 3 not found; 4 the request was refused; 5 the control plane does not answer.

It calls the gateway through the users' own package, ``clients/python``, which is installed from the same checkout.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_CLIENT = Path(__file__).parents[2] / "clients" / "python" / "src"

if find_spec("wattshift") is None and _CLIENT.is_dir():  # an environment that was made before there was a client
    sys.path.append(str(_CLIENT))
