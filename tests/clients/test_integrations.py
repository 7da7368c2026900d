"""The callbacks with the real libraries on CPU: stopped in the third step, and going on where they stopped."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import programs_of
from tests.support.servers import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PACKAGE = ROOT / "clients" / "python"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of_python() -> Path:
    """The folder of a Python with the package and all its extras."""
    return programs_of(
        "callbacks", "-e", f"{PACKAGE}[transformers,lightning]", variable="WATTSHIFT_CALLBACKS_ENVIRONMENT"
    )


class Job:
    """A job's environment, and runs in it."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self._progress = folder / "progress.jsonl"
        self._bin = bin_folder
        self._environment = {
            "PATH": f"{bin_folder}:{os.defpath}",
            "HOME": str(folder),
            "PYTHONPATH": str(PACKAGE / "src"),
            "OMP_NUM_THREADS": "1",
            "WATTSHIFT_JOB_ID": "job_1",
            "WATTSHIFT_CHECKPOINT_DIR": str(self.checkpoints),
            "WATTSHIFT_PROGRESS_FILE": str(self._progress),
        }

    def run(self, library: str, stop_at: int = 0, launcher: tuple[str, ...] = ("python",)) -> list[str]:
        """Run a program; return the words that it printed last."""
        program = PROGRAMS / f"train_{library}.py"
        command = [str(self._bin / launcher[0]), *launcher[1:], str(program)]
        environment = self._environment | {"STOP_AT": str(stop_at)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1].split()

    def reports(self) -> list[dict[str, float]]:
        """Return the progress in all reports so far; those of a save repeat the last."""
        lines = map(json.loads, self._progress.read_text().splitlines())
        return [{name: line[name] for name in ("done", "total", "local_batch")} for line in lines]


@pytest.fixture
def job(folder_of_python: Path, tmp_path: Path) -> Job:
    """A job of its own for each test."""
    return Job(folder_of_python, tmp_path)


@pytest.mark.parametrize("library", ["transformers", "lightning", "torch"])
def test_training_stops_with_a_checkpoint_and_goes_on_from_it(job: Job, library: str) -> None:
    stopped = job.run(library, stop_at=3)
    before = job.reports()
    at_stop = before[-1]
    ended = job.run(library)

    assert stopped[:2] == ["steps", "3"]
    assert at_stop == {"done": 3, "total": 8, "local_batch": 4}
    assert ended[:2] == ["steps", "8"]
    assert job.reports()[-1] == {"done": 8, "total": 8, "local_batch": 4}
    assert all(report["done"] > 3 for report in job.reports() if report not in before)
    assert job.reports()[: len(before)] == before


def test_an_interrupted_loop_computes_what_an_uninterrupted_one_does(
    job: Job, folder_of_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job.run("torch", stop_at=3)

    assert job.run("torch") == Job(folder_of_python, tmp_path_factory.mktemp("whole")).run("torch")


def test_all_ranks_stop_at_the_step_that_one_of_them_notices(job: Job) -> None:
    two = ("torchrun", "--nproc-per-node", "2")

    assert job.run("torch", stop_at=3, launcher=two)[:2] == ["steps", "3"]
    assert job.run("torch", launcher=two)[:2] == ["steps", "8"]
    done = [report["done"] for report in job.reports()]
    assert done == sorted(done)
