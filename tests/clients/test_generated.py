"""A client that openapi-python-client makes of the published description works against a running gateway."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Front
from tests.support.environments import programs_of
from tests.support.servers import ROOT

PROGRAM = Path(__file__).parent / "programs" / "use_generated.py"
VERSION = "0.29.1"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of_python() -> Path:
    """The folder of a Python with the generator."""
    return programs_of("generator", f"openapi-python-client=={VERSION}", variable="WATTSHIFT_GENERATOR_ENVIRONMENT")


@pytest.fixture(scope="module")
def generated(folder_of_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the generated package; the generator left nothing out."""
    folder = tmp_path_factory.mktemp("client")
    config = folder / "config.json"
    config.write_text(json.dumps({"post_hooks": []}))
    command = [folder_of_python / "openapi-python-client", "generate", "--meta", "none", "--fail-on-warning"]
    given = ["--path", ROOT / "deploy" / "openapi.json", "--output-path", folder / "generated", "--config", config]
    done = subprocess.run([*command, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def found(generated: Path, folder_of_python: Path, front: Front) -> dict[str, Any]:
    """What a program with the generated client found."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(generated)}
    command = [folder_of_python / "python", PROGRAM, front.url, front.key]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_submits_and_reads_jobs(found: dict[str, Any]) -> None:
    assert len(set(found["ids"])) == 1
    assert (found["listed"], found["state"], found["code"]) == (["generated"], "cancelled", "not_found")


def test_it_follows_events(found: dict[str, Any]) -> None:
    events = [line.removeprefix("event: ") for line in found["events"].splitlines() if line.startswith("event: ")]

    assert (events[0], events[-1]) == ("job.submitted", "job.cancelled")


def test_it_reads_footprints_and_emissions(found: dict[str, Any]) -> None:
    assert (found["energy_j"], found["lines"]) == (0, 0)
    assert len(found["ratings"]) > 0
    assert min(found["ratings"]) > 0
    assert len(found["forecast"]) == 1
    assert found["forecast"][0] > 0
