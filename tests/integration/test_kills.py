"""Kill -9, of everything, while jobs run: every job ends exactly once, no gang runs twice, the ledger adds up."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_UNAVAILABLE, CliError
from services.cli.jobs.names import ENDED
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until

VICTIMS = [
    "gateway", "carbon", "admission", "scheduler", "optimizer", "serving", "simulator", "telemetry", "worker",
    "plan-solver", "simulator-worker", "agent-node-1", "agent-node-2", "postgres", "valkey",
]  # fmt: skip

GANGS: list[dict[str, Any]] = [{"min": 1, "max": 2}, {"min": 2}, {"min": 1}, {"min": 6}, {"min": 1, "max": 4}]


def a_spec(number: int, steps: int) -> dict[str, Any]:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", str(steps), "--step-seconds", "0.05"]
    return {
        "name": f"victim-{number}",
        "project": "chaos",
        "command": [*train, "--checkpoint-every", "1", "--seed", str(number)],
        "gpus": GANGS[number % len(GANGS)],
        "processes": "per_node",
        "work": {"total": steps},
        "grace_s": 5,
        "max_restarts": 3,
    }


def submit_once(installation: Installation, number: int, steps: int) -> str:
    """Submit as a careful client does: again with the same key until there is an answer."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            body, key = a_spec(number, steps), f"victim-{number}"
            return installation.gateway.call("POST", "/v1/jobs", body=body, key=key)["id"]
        except CliError as error:
            if error.exit_code != EXIT_UNAVAILABLE or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def check_no_twins(folder: Path, job: dict[str, Any]) -> None:
    """The program itself tells of a twin; its ledger must hold every step once, and its gangs in order."""
    checkpoints = folder / "checkpoints" / job["id"]
    assert not (checkpoints / "twins.log").exists(), (checkpoints / "twins.log").read_text()
    lives = [json.loads(line) for line in (checkpoints / "steps.jsonl").read_text().splitlines()]
    assert [life["first"] for life in lives] == [0, *(life["last"] for life in lives[:-1])]
    assert lives[-1]["last"] == job["spec"]["work"]["total"]
    generations = [life["generation"] for life in lives]
    assert generations == sorted(set(generations))


def check_events(installation: Installation, job_id: str) -> None:
    with installation.gateway.stream(f"/v1/jobs/{job_id}/events") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    types = [json.loads(line[5:])["type"].removeprefix("job.") for line in lines]
    assert types.count("submitted") == 1
    assert [word for word in types if word in ENDED] == ["succeeded"], types
    assert types[-1] == "succeeded"


def check_ledger(installation: Installation) -> None:
    found = installation.gateway.get("/v1/invariants")
    assert found["holds"], [entry for entry in found["invariants"] if not entry["holds"]]
    report = installation.gateway.get("/v1/reports/footprint", group_by="job")
    of_jobs = sum(line["footprint"]["gpu_energy_j"] for line in report["lines"])
    whole = of_jobs + report["idle"]["gpu_energy_j"]
    assert whole == pytest.approx(report["metered_gpu_energy_j"], rel=1e-3)


def test_every_process_may_be_killed_while_jobs_run(installation: Installation) -> None:
    job_ids = [submit_once(installation, number, steps=400) for number in range(10)]
    wait_until(lambda: sum(installation.job(job_id)["state"] == "running" for job_id in job_ids) >= 3)
    for number, victim in enumerate(VICTIMS, start=10):
        installation.kill(victim)
        job_ids.append(submit_once(installation, number, steps=100))
    installation.kill_supervisor()
    assert any(installation.job(job_id)["state"] not in ENDED for job_id in job_ids), "it ended before the last kill"

    jobs = installation.wait_for_ends(job_ids, 240)

    assert len(set(job_ids)) == 10 + len(VICTIMS)
    assert {(job["name"], job["state"], job["detail"]) for job in jobs if job["state"] != "succeeded"} == set()
    for job in jobs:
        check_no_twins(installation.folder, job)
        check_events(installation, job["id"])
    wait_until(lambda: all(installation.job(job_id)["footprint"]["energy_j"] > 0 for job_id in job_ids))
    check_ledger(installation)
