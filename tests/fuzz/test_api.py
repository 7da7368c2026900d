"""Every operation of the public API, fuzzed against its own description: `operations.py`, in a process of its own."""

import re
import subprocess
import sys

from gateway.routes import ROUTES
from tests.support.servers import ROOT


def test_every_answer_was_promised() -> None:
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/fuzz/operations.py"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= len(ROUTES)
