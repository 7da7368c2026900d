"""Every operation of the public API, of the services behind it and of the router, fuzzed by everybody who can ask.

Each file has its own view; all ask one installation, in a process of their own: to make the cases takes ten seconds,
which not every worker of a run need spend.
"""

import os
import re
import subprocess
import sys

import pytest

from gateway.routes import ROUTES
from tests.support.servers import ROOT

FILES = ("router.py", "gate.py", "services.py", "operations.py", "stands.py")
"""In this order: the admin, who may change everything, asks last."""
OPERATIONS = 3 * len(ROUTES) + 150
"""Those of the public API are asked by the admin, by everybody else, and with hostile bodies."""


@pytest.mark.parametrize(
    "examples", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(14_400)])], ids=["few", "many"]
)
def test_every_answer_was_promised_and_is_for_who_asks(examples: int) -> None:
    files = [f"tests/fuzz/{name}" for name in FILES]
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"FUZZ_EXAMPLES": str(examples)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= OPERATIONS
