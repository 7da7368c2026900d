"""Programs of Debian's that tests drive: installed by root, else skipped with what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

import pytest


@cache
def _missing(program: str, package: str) -> str:
    if shutil.which(program):
        return ""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return f"{program} is not installed, and only root of a Debian can install {package}"
    done = subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return "" if shutil.which(program) else f"{package} could not be installed: {done.stderr.strip()[-200:]}"


def needs_program(program: str, package: str) -> str:
    """Return where a program of a package of Debian's is; skip the test that calls where it cannot be had."""
    if why := _missing(program, package):
        pytest.skip(why)
    found = shutil.which(program)
    assert found
    return found
