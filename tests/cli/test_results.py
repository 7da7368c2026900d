"""Files of a job that come here when it ends: the job stays for them, and for nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs import forward
from services.cli.jobs.specs import SpecOptions
from services.cli.jobs.specs import spec_of as made
from services.contracts.launchers import is_launcher
from tests.cli.test_foreign import spec_of
from tests.cli.test_forward import JOB, Running

JOBS = {"NODE_RANK": "0", "WATTSHIFT_GENERATION": "1"}


class Gateway(Running):
    """A gateway whose job is a command on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.job: subprocess.Popen[bytes] | None = None

    def begin(self, text: str, **variables: str) -> subprocess.Popen[bytes]:
        command = forward.staying(["/bin/sh", "-c", text])
        self.job = subprocess.Popen(command, cwd=self.folder, env=os.environ | variables, start_new_session=True)
        return self.job

    def get(self, _: str) -> Any:
        assert self.job
        code = self.job.poll()
        return {"state": "running" if code is None else "failed" if code else "succeeded", "generation": 1}


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    for folder in ("job", "here", "checkpoints"):
        (tmp_path / folder).mkdir()
    for name, value in (JOBS | {"WATTSHIFT_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(forward, "POLL_S", 0.05)
    found = Gateway(tmp_path / "job")
    yield found
    if found.job:
        found.job.kill()
        found.job.wait()


def test_what_a_job_leaves_comes_here_whatever_its_status_and_the_job_is_gone_then(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = gateway.begin("mkdir -p out/deep; echo model >out/deep/m; echo x >-rf; exit 3")

    forward.fetch(gateway, JOB, ["out", "-rf"], tmp_path / "here")  # type: ignore[arg-type]

    assert (tmp_path / "here" / "out" / "deep" / "m").read_text() == "model\n"
    assert (tmp_path / "here" / "-rf").read_text() == "x\n"
    assert job.wait() == 3
    assert len(gateway.commands) == 1, "what came is not fetched again while the job ends"
    assert capsys.readouterr().err == f"wattshift: --results: 2 files came to {tmp_path / 'here'}\n"
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_missing_is_said_and_the_rest_comes(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.begin("echo x >a")
    forward.fetch(gateway, JOB, ["a", "b"], tmp_path / "here")  # type: ignore[arg-type]
    assert (tmp_path / "here" / "a").exists()
    assert "b: Cannot stat" in capsys.readouterr().err


def test_a_job_stays_only_as_long_as_somebody_fetches(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_STAY", forward._STAY.replace(str(forward.PATIENCE_S), "1"))
    assert gateway.begin("exit 5").wait(60) == 5
    (tmp_path / "checkpoints" / ".results.1.fetcher").write_text("7")  # it was killed
    assert gateway.begin("exit 6").wait(60) == 6


@pytest.mark.parametrize("other", [{"NODE_RANK": "1"}, {"LOCAL_RANK": "1"}])
def test_only_the_first_process_stays(gateway: Gateway, tmp_path: Path, other: dict[str, str]) -> None:
    assert gateway.begin("exit 4", **other).wait(60) == 4
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_program_that_is_told_to_stop_saves_its_work_and_that_comes(gateway: Gateway, tmp_path: Path) -> None:
    job = gateway.begin("trap 'echo saved >a; exit 0' TERM; echo >ready; while :; do sleep 0.05; done")
    while not (tmp_path / "job" / "ready").exists():
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGTERM)

    forward.fetch(gateway, JOB, ["a"], tmp_path / "here")  # type: ignore[arg-type]

    assert (tmp_path / "here" / "a").read_text() == "saved\n"
    assert job.wait() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--results", "/etc", "--wait"], "is no path in the job's folder"),
        (["--results", "a/../..", "--wait"], "is no path in the job's folder"),
        (["--results", "a"], "goes with --wait or --follow"),
        (["--results", "a", "--array", "0-1", "--wait"], "files of one job"),
    ],
)
def test_results_that_cannot_come_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError, match=says) as refused:
        spec_of(monkeypatch, *words, "true")
    assert refused.value.exit_code == EXIT_USAGE


def test_a_job_whose_files_travel_stays_and_another_does_not() -> None:
    options, source = SpecOptions(results=["out"], output="o"), {"upload": "0" * 64}
    travels = made(options, ["torchrun", "a.py"], "a", {}, source)
    assert forward.staying(["torchrun", "a.py"]) == travels.command[4:]
    assert is_launcher(travels.command)
    assert made(SpecOptions(results=["out"]), ["true"], "a", {}).command == ["true"]
