"""What `./test` runs where no test is named: ruff, then every test with pyright beside them; each may fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

LINTERS = (("ruff", "check", "--quiet", "."), ("ruff", "format", "--quiet", "--check", "."))
COVERAGE = ("--cov", "--cov-report=")
"""Where and how is in pyproject.toml; the table at the end is ``tests/support/covered.py``."""
_BESIDE = 10  # niceness: pyright must not take the processor from tests that wait for processes


def main(arguments: Sequence[str]) -> int:
    """Run the gates; ``arguments`` are pytest's, and ``--cov`` first where coverage and mutants are wanted."""
    for linter in LINTERS:
        if subprocess.run([sys.executable, "-m", *linter]).returncode != 0:
            print(f"test: {' '.join(linter[:2])} has found something; no test was run", file=sys.stderr)
            return 1
    covered = [*COVERAGE] if "--cov" in arguments else []
    rest = [argument for argument in arguments if argument != "--cov"]
    with tempfile.TemporaryFile("w+") as output:
        pyright = _start_pyright(output)
        try:
            tests = subprocess.run([sys.executable, "-m", "pytest", *covered, *rest]).returncode
            if covered:
                subprocess.run([sys.executable, "-m", "tests.support.covered"], check=True)
            types = pyright.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            pyright.kill()
            pyright.wait()
        output.seek(0)
        print(f"pyright: {output.read().strip()}")
    mutants = subprocess.run([sys.executable, "-m", "tests.mutation"]).returncode if covered else 0
    return tests or types or mutants


def _start_pyright(output: IO[str]) -> subprocess.Popen[bytes]:
    """Start pyright from its wheel, with Node from its own: nothing is fetched, and no newer version asked for."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("PYRIGHT_PYTHON_")}
    return subprocess.Popen(
        ["nice", "-n", str(_BESIDE), sys.executable, "-m", "pyright"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=unset | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
