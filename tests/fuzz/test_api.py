"""Every operation of the public API and of the services behind it, fuzzed against its own description.

`operations.py` and `services.py` run in processes of their own.
"""

import os
import re
import subprocess
import sys

import pytest

from gateway.routes import ROUTES
from tests.support.servers import ROOT


@pytest.mark.parametrize(
    ("program", "operations", "examples"),
    [
        ("operations.py", len(ROUTES), 4),
        ("services.py", 150, 2),
        pytest.param("services.py", 150, 40, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)]),
    ],
)
def test_every_answer_was_promised(program: str, operations: int, examples: int) -> None:
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/fuzz/{program}"]
    environment = os.environ | {"FUZZ_EXAMPLES": str(examples)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= operations
