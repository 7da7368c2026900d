"""Every operation of the public API, of the services behind it and of the router, fuzzed by everybody who can ask.

Each run has an installation and a process of its own: to make the cases takes ten seconds, which not every worker of a
run need spend, and what one run leaves behind is no surprise to another. One of them then has a random walk over the
services together (`walk.py`).
"""

import os
import re
import subprocess
import sys

import pytest

from gateway.routes import read_routes
from tests.support.servers import ROOT

RUNS = {
    "router": (("router.py",), 30),
    "gate": (("gate.py", "walk.py"), len(read_routes())),
    "services": (("services.py",), 150),
    "admin": (("operations.py", "stands.py"), len(read_routes())),
}
"""Files, and how many operations they ask at least."""


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "examples", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(14_400)])], ids=["few", "many"]
)
def test_every_answer_was_promised_and_is_for_who_asks(examples: int, run: str) -> None:
    names, operations = RUNS[run]
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *(f"tests/fuzz/{name}" for name in names)]
    environment = os.environ | {"FUZZ_EXAMPLES": str(examples)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= operations
