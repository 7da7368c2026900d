"""The main job, on real processes: submitted by REST, run under a policy, ended with its energy and its gCO2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import CliError
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until

TRAIN = [sys.executable, str(ROOT / "examples" / "train.py")]


def a_spec(name: str, *words: str, **spec: Any) -> dict[str, Any]:
    return {"name": name, "command": [*TRAIN, *words], "grace_s": 5, **spec}


def submit(installation: Installation, spec: dict[str, Any], key: str | None = None) -> str:
    return installation.gateway.call("POST", "/v1/jobs", body=spec, key=key)["id"]


def wattshift(installation: Installation, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WATTSHIFT_DATA_DIR": str(installation.folder)}
    command = [str(Path(sys.executable).parent / "wattshift"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_a_job_runs_and_ends_with_its_energy_and_its_gco2(installation: Installation) -> None:
    work = {"work": {"total": 60, "unit": "steps"}, "gpus": {"min": 2}}
    job_id = submit(installation, a_spec("sums", "--steps", "60", "--step-seconds", "0.1", **work))

    (job,) = installation.wait_for_ends([job_id], 60)

    assert (job["state"], job["exit_code"], job["progress"]["done"]) == ("succeeded", 0, 60)
    wait_until(lambda: installation.job(job_id)["footprint"]["gpu_s"] > 3)
    report = installation.gateway.get(f"/v1/jobs/{job_id}/footprint")
    footprint = report["footprint"]
    recomputed = sum(
        interval["energy_j"] / 3.6e6 * interval["intensity_gco2_per_kwh"] * report["pue"]
        for interval in report["intervals"]
    )
    assert footprint["carbon_gco2"] == pytest.approx(recomputed, rel=1e-6)
    # Two A100 at a load of 0.9 draw between idle and peak: some hundred watts each while the job ran.
    assert 100 < footprint["gpu_energy_j"] / footprint["gpu_s"] < 400
    assert "done" in wattshift(installation, "logs", job_id).stdout or job["progress"]["done"] == 60


def test_a_gang_over_two_nodes_meets(installation: Installation) -> None:
    job_id = submit(
        installation, a_spec("pair", "--steps", "100", "--step-seconds", "0.1", gpus={"min": 6}, work={"total": 100})
    )
    job = installation.wait_for(job_id, lambda job: job["state"] == "running")
    assert {share["node_id"] for share in job["placement"]} == {"node-1", "node-2"}

    (job,) = installation.wait_for_ends([job_id], 60)

    assert job["state"] == "succeeded"


def test_a_running_job_is_held_released_and_goes_on(installation: Installation) -> None:
    job_id = submit(installation, a_spec("pause", "--steps", "80", "--step-seconds", "0.1", work={"total": 80}))
    installation.wait_for(job_id, lambda job: (job["progress"] or {"done": 0})["done"] > 10)

    installation.gateway.call("POST", f"/v1/jobs/{job_id}/hold")
    held = installation.wait_for(job_id, lambda job: job["state"] == "held")
    installation.gateway.call("POST", f"/v1/jobs/{job_id}/release")
    (job,) = installation.wait_for_ends([job_id], 60)

    assert held["progress"]["done"] > 10
    assert (job["state"], job["generation"]) == ("succeeded", 2)


def test_a_cancelled_job_stops_and_a_failing_one_says_why(installation: Installation) -> None:
    endless = submit(installation, a_spec("endless", "--steps", "1000000"))
    missing = submit(installation, {"name": "missing", "command": ["/no/such/program"]})
    installation.wait_for(endless, lambda job: job["state"] == "running")
    installation.gateway.call("POST", f"/v1/jobs/{endless}/cancel")

    cancelled, failed = installation.wait_for_ends([endless, missing], 60)

    assert cancelled["state"] == "cancelled"
    assert failed["state"] == "failed"
    assert failed["exit_code"] in (None, 127)
    assert "/no/such/program" in failed["detail"]


def test_the_same_key_is_the_same_job(installation: Installation) -> None:
    spec = a_spec("once", "--steps", "1")
    assert submit(installation, spec, "once-1") == submit(installation, spec, "once-1")
    with pytest.raises(CliError, match="idempotency_key_reused"):
        submit(installation, a_spec("other", "--steps", "1"), "once-1")


def test_events_tell_a_jobs_story_in_order(installation: Installation) -> None:
    job_id = submit(installation, a_spec("story", "--steps", "5"))
    installation.wait_for_ends([job_id], 60)
    with installation.gateway.stream(f"/v1/jobs/{job_id}/events") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    types = [json.loads(line[5:])["type"] for line in lines]
    assert [word for word in types if word != "job.profiling"] == [  # the policy in force may measure the job
        *("job.submitted", "job.starting", "job.running", "job.succeeded")
    ]


def test_the_command_line_does_what_it_says(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps([a_spec("cli", "--steps", "10"), a_spec("cli", "--steps", "10")]))

    submitted = wattshift(installation, "submit", str(tmp_path / "jobs.json"), "--wait", "--json")
    failed = wattshift(installation, "submit", "--workdir", "/tmp", "--command", "false", "--wait")
    listed = wattshift(installation, "jobs", "--state", "succeeded", "--limit", "5", "--json")

    assert submitted.returncode == 0, submitted.stderr
    assert [job["state"] for job in json.loads(submitted.stdout)] == ["succeeded"] * 2
    assert failed.returncode == 1
    assert {job["state"] for job in json.loads(listed.stdout)} == {"succeeded"}
    for words in (["nodes"], ["policy"], ["carbon"], ["carbon", "US-CAL-CISO"], ["report", "--by", "job"], ["check"]):
        shown = wattshift(installation, *words)
        assert (shown.returncode, shown.stderr) == (0, ""), (words, shown.stdout, shown.stderr)
    assert wattshift(installation, "job", "job_none").returncode == 3
    assert wattshift(installation, "carbon", "NOWHERE").returncode == 3
    assert wattshift(installation, "policy", "set", "green", "-p", "mu=0").returncode == 4
