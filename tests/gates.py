"""What `./test` runs where no test is named: ruff, then every test with pyright beside them; each may fail the run.

A few tests that fail beside hundreds of processes on every core run once more, alone, when the rest is over: what fails
again fails the run, and what passes then is named as unsteady, since the test or the code has a race to be mended.

The lab's tests are left out where neither the lab nor what its policies and simulations are made of has changed since
the branch that this one is to join; continuous integration runs them always.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from tests import costs
from tools.bootstrap import ALL_TESTS

LINTERS = (("ruff", "check", "--quiet", "."), ("ruff", "format", "--quiet", "--check", "."))
COVERAGE = ("--cov", "--cov-report=")
"""Where and how is in pyproject.toml; the table at the end is ``tests/support/covered.py``."""
SECOND_CHANCES = 3
"""With more failures than these something is broken, and none runs again."""
LAB = "tests/lab"
_MADE_OF = ("lab", LAB, "services/core", "services/simulator")
_JOINED = ("@{upstream}", "main")
_QUICK = "not slow and not live"
"""What `./test` runs where no other tests are asked for: those whose costs are written down."""
_BESIDE = 10  # niceness: pyright must not take the processor from tests that wait for processes


def main(arguments: Sequence[str]) -> int:
    """Run the gates.

    Args:
        arguments: Pytest's, ``--cov`` where coverage and mutants are wanted, and ``--lab`` for the lab's tests.
    """
    for linter in LINTERS:
        if subprocess.run([sys.executable, "-m", *linter]).returncode != 0:
            print(f"test: {' '.join(linter[:2])} has found something; no test was run", file=sys.stderr)
            return 1
    covered = [*COVERAGE] if "--cov" in arguments else []
    rest = [argument for argument in arguments if argument not in ("--cov", "--lab")]
    if "--lab" not in arguments and not lab_changed(Path.cwd()):
        print(f"test: neither the lab nor the core has changed; {LAB} runs with --lab", flush=True)
        rest.append(f"--ignore={LAB}")
    with tempfile.TemporaryFile("w+") as output:
        pyright = _start_pyright(output)
        try:
            tests = subprocess.run([sys.executable, "-m", "pytest", *covered, *rest]).returncode
            if covered:
                subprocess.run([sys.executable, "-m", "tests.support.covered"], check=True)
            types = pyright.wait()
            has_grown = (
                _QUICK in rest and tests in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and costs.failed()
            )
            if tests == pytest.ExitCode.TESTS_FAILED:
                tests = _failed_again(rest)
        except KeyboardInterrupt:
            return 130
        finally:
            pyright.kill()
            pyright.wait()
        output.seek(0)
        print(f"pyright: {output.read().strip()}")
    mutants = subprocess.run([sys.executable, "-m", "tests.mutation"]).returncode if covered else 0
    return tests or types or mutants or int(has_grown)


def lab_changed(checkout: Path) -> bool:
    """Whether a checkout has changes to the lab or to what it is made of, committed or not; true where none can say."""

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return done.stdout.strip() if done.returncode == 0 else None

    bases = [base for name in _JOINED if (base := git("merge-base", "HEAD", name))]
    changed = git("diff", "--name-only", bases[0] if bases else "HEAD", "--", *_MADE_OF)
    new = git("ls-files", "--others", "--exclude-standard", "--", *_MADE_OF)
    return not bases or changed is None or new is None or bool(changed or new)


def _failed_again(arguments: Sequence[str]) -> int:
    """Run the few tests that failed once more, one after the other; return the exit status of the whole."""
    failed = _last_failed()
    if not 0 < len(failed) <= SECOND_CHANCES:
        return 1
    print(f"test: {len(failed)} failed beside others and run once more, alone", flush=True)
    alone = [argument for argument in arguments if argument not in ALL_TESTS]
    again = [sys.executable, "-m", "pytest", *alone, "--last-failed", "--last-failed-no-failures=none"]
    status = subprocess.run(again).returncode
    for test in failed - _last_failed():
        print(f"test: UNSTEADY {test}: failed beside others, passed alone; it has a race to be mended")
    return status


def _last_failed() -> set[str]:
    kept = Path(".pytest_cache", "v", "cache", "lastfailed")
    return set(json.loads(kept.read_text())) if kept.is_file() else set()


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
