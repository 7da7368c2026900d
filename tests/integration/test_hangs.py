"""Processes that hang are replaced while jobs run; a Valkey without its data heals; jobs outlive the supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil

from services.cli.commands import EXIT_DEGRADED
from services.standalone import stack
from tests.integration.conftest import UNUSED, Installation
from tests.integration.test_kills import check_events, check_ledger, check_no_twins, submit_once
from tests.support.servers import ROOT, scratch_folder, wait_until


def exit_status(installation: Installation) -> int:
    command = [sys.executable, "-m", "services.cli.main", "status", "--data-dir", str(installation.folder), "--json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def runs(installation: Installation) -> bool:
    return stack.read_status(installation.folder).state == "running"


def test_all_of_them_stopped_at_once_while_jobs_run(installation: Installation) -> None:
    wait_until(lambda: runs(installation))
    assert exit_status(installation) == 0
    job_ids = [submit_once(installation, 100 + number, steps=300) for number in range(3)]
    wait_until(lambda: any(installation.job(job_id)["state"] == "running" for job_id in job_ids))
    before = [each for each in stack.read_status(installation.folder).processes if each.state != "asleep"]
    for process in before:
        assert process.pid
        os.kill(process.pid, signal.SIGSTOP)

    wait_until(lambda: exit_status(installation) == EXIT_DEGRADED)
    wait_until(lambda: all(installation.process(each.name).restarts > each.restarts for each in before))
    wait_until(lambda: runs(installation), within_s=90)

    assert {job["state"] for job in installation.wait_for_ends(job_ids, 180)} == {"succeeded"}
    for job_id in job_ids:
        check_no_twins(installation.folder, installation.job(job_id))
        check_events(installation, job_id)
    check_ledger(installation)


def test_a_valkey_whose_data_was_wiped_heals(installation: Installation) -> None:
    wait_until(lambda: runs(installation))
    before = installation.process("valkey")
    shutil.rmtree(installation.folder / "valkey")
    installation.kill("valkey")
    job_id = submit_once(installation, 110, steps=20)
    assert [job["state"] for job in installation.wait_for_ends([job_id], 90)] == ["succeeded"]
    assert installation.process("valkey").restarts == before.restarts + 1
    wait_until(lambda: runs(installation))


def test_a_job_outlives_the_supervisor_and_is_adopted() -> None:
    """It keeps its process from before the supervisor's death to its end; the lease is longer than a start takes."""
    with scratch_folder() as folder:
        installation = Installation(folder / "data", without=(*UNUSED, "worker"), TELEMETRY_LEASE_TTL_S="120")
        installation.up()
        try:
            job_id = submit_once(installation, 122, steps=1_600)  # longer than it takes to start all of it again
            wait_until(lambda: bool(_programs_of(job_id)))
            (program,) = _programs_of(job_id)
            installation.kill_supervisor()
            assert program.is_running()
            (job,) = installation.wait_for_ends([job_id], 240)
            assert job["state"] == "succeeded"
            lives = (installation.folder / "checkpoints" / job_id / "steps.jsonl").read_text().splitlines()
            assert len(lives) == 1
            check_no_twins(installation.folder, job)
        finally:
            installation.down()


def _programs_of(job_id: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_it = "train.py" in " ".join(process.cmdline())
            if is_it and process.environ().get("WATTSHIFT_JOB_ID") == job_id:
                found.append(process)
    return found
