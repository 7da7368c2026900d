"""Two real jobs on one simulated GPU: Gandiva packs them, both work, and the ledger splits what they draw."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until


def submit(installation: Installation, name: str, gpus: int, **spec: Any) -> str:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", "1000000", "--step-seconds", "0.05"]
    document = {
        "name": name,
        "command": [*train, "--gpu-load", "0.3"],
        "gpus": {"min": gpus, "memory_gib": 10},
        "processes": "per_node",
        "work": {"total": 1_000_000},
        "grace_s": 5,
        **spec,
    }
    headers = {"idempotency-key": f"{name}-{time.monotonic_ns()}"}
    return installation.gateway.call("POST", "/v1/jobs", body=document, headers=headers)["id"]


def place(installation: Installation, job_id: str) -> tuple[str, Any]:
    job = installation.job(job_id)
    return job["state"], job["placement"]


def test_two_jobs_run_on_one_gpu_at_once_and_share_its_energy(installation: Installation) -> None:
    active = installation.gateway.get("/v1/policies/active")
    body = {"name": "gandiva", "parameters": {"quantum_s": 1}}
    fillers = [submit(installation, f"filler-{gpus}", gpus, preemptible=False) for gpus in (4, 3)]
    pair: list[str] = []
    try:
        wait_until(lambda: all(installation.job(job)["state"] == "running" for job in fillers), 120)
        installation.gateway.call("PUT", "/v1/policies/active", body=body)
        pair += [submit(installation, name, 1, may_share_gpu=True) for name in ("one", "other")]

        def both_run() -> bool:
            (first, here), (second, there) = (place(installation, job) for job in pair)
            return first == second == "running" and here == there != []

        wait_until(both_run, 300)
        before = [installation.job(job)["footprint"]["energy_j"] for job in pair]
        wait_until(lambda: all(
            installation.job(job)["footprint"]["energy_j"] > had for job, had in zip(pair, before, strict=True)
        ), 120)  # fmt: skip
        found = installation.gateway.get("/v1/invariants")
        assert found["holds"], [entry for entry in found["invariants"] if not entry["holds"]]
    finally:
        for job in [*fillers, *pair]:
            installation.gateway.call("POST", f"/v1/jobs/{job}/cancel")
        installation.wait_for_ends([*fillers, *pair], 120)
        body = {"name": active["name"], "parameters": active["parameters"]}
        installation.gateway.call("PUT", "/v1/policies/active", body=body)
