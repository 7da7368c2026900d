"""Output that goes to files too: the program keeps its process, its status and its streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.commands import CliError
from services.cli.jobs.copied_output import copying
from services.contracts.launchers import is_launcher, options_at

BOTH = ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]
JOB = {"WATTSHIFT_JOB_ID": "job_1", "WATTSHIFT_GENERATION": "1", "NODE_RANK": "0"}


def ran(command: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | JOB | variables, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_both_streams_go_to_the_file_and_where_they_went(tmp_path: Path) -> None:
    command = copying(BOTH, "my job", "%x-%j %%'$(id).out", None)

    assert ran(command, tmp_path) == (3, "out\n", "err\n")
    (file,) = tmp_path.iterdir()
    assert file.name == "my job-job_1 %'$(id).out"
    assert sorted(file.read_text().splitlines()) == ["err", "out"]
    assert ran(command, tmp_path) == (3, "out\n", "err\n")
    assert len(file.read_text().splitlines()) == 2, "another job begins the file anew"
    ran(command, tmp_path, WATTSHIFT_GENERATION="2")
    assert len(file.read_text().splitlines()) == 4, "the same job goes on with it"


@pytest.mark.parametrize(
    ("out", "err", "files"),
    [("%A_%a.o", "%A_%a.e", {"array_1_3.o": "out\n", "array_1_3.e": "err\n"}), (None, "e", {"e": "err\n"})],
)
def test_errors_may_have_a_file_of_their_own(tmp_path: Path, out: str | None, err: str, files: dict[str, str]) -> None:
    command = copying(BOTH, "a", out, err)
    ran(command, tmp_path, WATTSHIFT_ARRAY_ID="array_1", WATTSHIFT_ARRAY_INDEX="3")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


@pytest.mark.parametrize("other", [{"NODE_RANK": "1"}, {"LOCAL_RANK": "1"}])
def test_of_several_processes_the_first_writes_the_file(tmp_path: Path, other: dict[str, str]) -> None:
    assert ran(copying(BOTH, "a", "o", None), tmp_path, **other) == (3, "out\n", "err\n")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_before_the_program_runs(tmp_path: Path) -> None:
    code, out, err = ran(copying(BOTH, "a", "missing/o", None), tmp_path)
    assert code != 0
    assert out == ""
    assert "missing/o" in err


def test_what_is_printed_after_a_signal_to_all_processes_is_in_the_file(tmp_path: Path) -> None:
    program = (
        "import signal, time\n"
        "def stop(*_):\n    print('saved', flush=True)\n    raise SystemExit(5)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    command = copying([sys.executable, "-c", program], "a", "o", None)
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | JOB, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        os.killpg(job.pid, signal.SIGTERM)
        assert job.stdout.read() == "saved\n"
        assert job.wait() == 5
    assert (tmp_path / "o").read_text() == "ready\nsaved\n"


def test_a_launcher_behind_it_is_known_as_one() -> None:
    command = copying(["accelerate", "launch", "a.py"], "a", "o", None)
    assert is_launcher(command)
    assert options_at(command) == ("accelerate", 5)
    assert not is_launcher(copying(["python3", "a.py"], "a", "o", None))


def test_other_patterns_are_refused() -> None:
    with pytest.raises(CliError, match=r"'%s\.out' is no name of a file with the patterns"):
        copying(BOTH, "a", "%s.out", None)
