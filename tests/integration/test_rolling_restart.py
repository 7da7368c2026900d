"""Each process is restarted in turn, as an upgrade does, while jobs are submitted: all end, once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.integration.conftest import Installation
from tests.integration.test_kills import VICTIMS, check_events, check_ledger, check_no_twins, submit_once
from tests.support.servers import wait_until

MOST_JOBS = 60
"""The ledger's check reads one page of a report."""


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing(installation: Installation) -> None:
    job_ids: list[str] = []
    over = threading.Event()

    def submit() -> None:
        while len(job_ids) < MOST_JOBS and not over.wait(0.5):
            job_ids.append(submit_once(installation, 1_000 + len(job_ids), steps=40))

    submitter = threading.Thread(target=submit)
    submitter.start()
    try:
        for name in VICTIMS:
            before = installation.process(name)
            if before.state == "asleep":
                continue
            assert before.pid
            os.kill(before.pid, signal.SIGINT if name == "postgres" else signal.SIGTERM)
            wait_until(lambda name=name, old=before: installation.process(name).pid not in (old.pid, None), 60)
            wait_until(lambda name=name: installation.process(name).state == "running", 60)
    finally:
        over.set()
        submitter.join()

    assert len(job_ids) > len(VICTIMS)
    jobs = installation.wait_for_ends(job_ids, 240)
    assert {(job["name"], job["state"], job["detail"]) for job in jobs if job["state"] != "succeeded"} == set()
    for job in jobs:
        check_no_twins(installation.folder, job)
        check_events(installation, job["id"])
    check_ledger(installation)
