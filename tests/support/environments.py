"""Environments of their own for packages that are too large, or too foreign, for the one that tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import ROOT


def programs_of(name: str, *wanted: str, variable: str) -> Path:
    """Return the folder of programs of an environment with the wanted packages.

    The environment that the variable names is taken as it is. Otherwise one is made below ``build/``, and later runs
    use it again; an installation that was interrupted is repeated.

    Raises:
        Skipped: The packages cannot be installed here.
    """
    if given := os.environ.get(variable):
        return Path(given) / "bin"
    folder = ROOT / "build" / name
    complete = folder / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8").split("\n") != list(wanted):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "-q", *wanted]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            pytest.skip(f"{name} cannot be installed: {reason}")
        complete.write_text("\n".join(wanted), encoding="utf-8")
    return folder / "bin"


def torch_programs() -> Path:
    """Return the programs of a Python with PyTorch and Accelerate, or skip."""
    return programs_of("torch", "torch", "numpy", "accelerate", variable="WATTSHIFT_TORCH_ENVIRONMENT")
