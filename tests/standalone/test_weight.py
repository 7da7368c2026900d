"""What an install with few extras can do, and how much it weighs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from services.kit.extras import EXTRA_OF
from services.kit.release import RELEASE
from tests.support.extras import PROJECT, blocker, needs
from tests.support.servers import ROOT

AGENT_LIMIT_MB = 120


def python(folder: Path, *arguments: str, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{blocker(folder / 'blocker', *extras)}:{ROOT}", "COLUMNS": "120"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=folder)


def test_an_agent_needs_the_agent_extra_alone(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", "import gpu_agent.app, gpu_agent.shim, services.cli.main", extras=("agent",))

    assert done.returncode == 0, done.stderr


def test_the_command_line_explains_itself_with_the_base_alone(tmp_path: Path) -> None:
    commands = ("", "simulate training", "plan pools", "pools set", "carbon", "up")
    script = f"""
from typer.testing import CliRunner
from services.cli.main import app
for command in {commands}:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], catch_exceptions=False)
    assert shown.exit_code == 0 and "Usage" in shown.output, (command, shown.output)
"""
    done = python(tmp_path, "-c", script)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "extras", "says"),
    [
        ("plan pools jobs.json", (), "wattshift-control-plane[control]"),
        (
            "simulate training --policy fifo --jobs green-day --carbon GB",
            ("agent",),
            "wattshift-control-plane[control]",
        ),
        (
            "simulate training --policy fifo --jobs a.parquet --carbon GB",
            ("control",),
            "wattshift-control-plane[parquet]",
        ),
        ("up", ("agent", "control"), "wattshift-control-plane[standalone]"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, command: str, extras: tuple[str, ...], says: str) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    done = python(tmp_path, "-m", "services.cli.main", *command.split(), extras=extras)

    assert done.returncode != 0
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_extra_is_named_for_its_packages() -> None:
    """``services.kit.extras`` and ``pyproject.toml`` agree."""
    distributions = packages_distributions()
    base = needs()
    for package, extra in EXTRA_OF.items():
        assert extra in PROJECT["optional-dependencies"]
        names = {name.lower().replace("_", "-") for name in distributions.get(package, [])}
        assert not names & base, f"{package} is installed without any extra"
        if names:
            assert names & needs(extra), f"{package} does not come with {extra}"


PIP = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")


def wheels(folder: Path) -> tuple[Path, Path]:
    """Build the wheels of the product and of its client, from what a release has of the checkout."""
    source = folder / "source"
    source.mkdir()
    for name in ("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "migrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "clients/python", folder / "client", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, folder / "client"], check=True
    )
    (wheel,), (client,) = (list(folder.glob(f"{name}-*.whl")) for name in ("wattshift_control_plane", "wattshift"))
    return wheel, client


def installed(venv: Path, *packages: Path | str) -> None:
    """Install packages from the package index in an environment, which is made if there is none."""
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    subprocess.run([*PIP, "--python", venv / "bin/python", "install", *packages], check=True)


@pytest.mark.slow
def test_an_agent_install_is_light(tmp_path: Path) -> None:
    """Build the wheel and install it with the agent's extra from the package index, as a node's operator does."""
    wheel, client = wheels(tmp_path)
    installed(tmp_path / "venv", client, f"{wheel}[agent]")

    size = subprocess.check_output(["du", "-sm", tmp_path / "venv"], text=True)
    assert int(size.split()[0]) < AGENT_LIMIT_MB
    for command in (["venv/bin/wattshift", "--help"], ["venv/bin/python", "-c", "import gpu_agent.app"]):
        subprocess.run([tmp_path / command[0], *command[1:]], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_an_installed_wheel_simulates_and_starts(tmp_path: Path) -> None:
    """Install the wheel in an empty environment: alone, it says what `up` needs; with that, it starts."""
    wheel, client = wheels(tmp_path)
    venv, data = tmp_path / "venv", str(tmp_path / "data")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "PYTEST"))}

    def wattshift(*words: str) -> subprocess.CompletedProcess[str]:
        command = [venv / "bin/wattshift", *words]
        return subprocess.run(command, capture_output=True, text=True, env=own, cwd=tmp_path, timeout=300)

    installed(venv, client, wheel)
    assert wattshift("--version").stdout.split()[-1] == RELEASE
    refused = wattshift("up", "--nodes", "1x1", "--data-dir", data)
    assert (refused.returncode != 0, "wattshift-control-plane[standalone]" in refused.stderr) == (True, True)
    assert "Traceback" not in refused.stderr

    installed(venv, client, f"{wheel}[standalone]")
    day = ("--jobs", "green-day", "--carbon", "GB", "--start", "2023-08-15", "--days", "0.1", "--json")
    run = wattshift("simulate", "training", "--policy", "green", *day)
    assert json.loads(run.stdout)["completed"] > 0, run.stderr
    up = wattshift("up", "--nodes", "1x1", "--data-dir", data)
    try:
        assert up.returncode == 0, up.stderr
    finally:
        assert wattshift("down", "--data-dir", data).returncode == 0
