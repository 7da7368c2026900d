"""Two real jobs on one simulated GPU: Gandiva packs them, both work, and the ledger splits what they draw.

Both outlive what is killed beneath them, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.conftest import Installation
from tests.integration.test_kills import check_events, check_ledger, check_no_twins
from tests.support.servers import ROOT, wait_until

PACKED = {"gpus": {"min": 1, "memory_gib": 10}, "may_share_gpu": True}


def submit(installation: Installation, name: str, steps: int = 1_000_000, **spec: Any) -> str:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", str(steps), "--step-seconds", "0.05"]
    document = {
        "name": name,
        "command": [*train, "--gpu-load", "0.3", "--checkpoint-every", "1"],
        "processes": "per_node",
        "work": {"total": steps},
        "grace_s": 5,
        **spec,
    }
    headers = {"idempotency-key": f"{name}-{time.monotonic_ns()}"}
    return installation.gateway.call("POST", "/v1/jobs", body=document, headers=headers)["id"]


def on_one_gpu(installation: Installation, pair: list[str]) -> bool:
    """Whether two jobs run, on the same GPU."""
    one, other = ((job["state"], job["placement"]) for job in map(installation.job, pair))
    return one == other and one[0] == "running"


@contextmanager
def gandiva_with_one_gpu(installation: Installation) -> Iterator[None]:
    """Put Gandiva in force, with turns of a second, while other jobs hold all GPUs but one."""
    active = installation.gateway.get("/v1/policies/active")
    body: dict[str, Any] = {"name": "gandiva", "parameters": {"quantum_s": 1}}
    sizes = {f"filler-{gpus}": {"min": gpus} for gpus in (4, 3)}
    fillers = [submit(installation, name, gpus=gpus, preemptible=False) for name, gpus in sizes.items()]
    try:
        wait_until(lambda: all(installation.job(job)["state"] == "running" for job in fillers), 120)
        installation.gateway.call("PUT", "/v1/policies/active", body=body)
        yield
    finally:
        for job in fillers:
            installation.gateway.call("POST", f"/v1/jobs/{job}/cancel")
        installation.wait_for_ends(fillers, 120)
        body = {"name": active["name"], "parameters": active["parameters"]}
        installation.gateway.call("PUT", "/v1/policies/active", body=body)


def test_two_jobs_run_on_one_gpu_at_once_and_share_its_energy(installation: Installation) -> None:
    with gandiva_with_one_gpu(installation):
        pair = [submit(installation, name, **PACKED) for name in ("one", "other")]
        try:
            wait_until(lambda: on_one_gpu(installation, pair), 300)
            before = [installation.job(job)["footprint"]["energy_j"] for job in pair]
            wait_until(lambda: all(
                installation.job(job)["footprint"]["energy_j"] > had for job, had in zip(pair, before, strict=True)
            ), 120)  # fmt: skip
            found = installation.gateway.get("/v1/invariants")
            assert found["holds"], [entry for entry in found["invariants"] if not entry["holds"]]
        finally:
            for job in pair:
                installation.gateway.call("POST", f"/v1/jobs/{job}/cancel")
            installation.wait_for_ends(pair, 120)


@pytest.mark.slow
def test_two_jobs_on_one_gpu_outlive_their_agent_and_the_scheduler_and_end_once(installation: Installation) -> None:
    with gandiva_with_one_gpu(installation):
        pair = [submit(installation, name, steps=5_000, **PACKED) for name in ("one", "other")]
        for victim in ("agent", "scheduler", "telemetry"):
            wait_until(lambda: on_one_gpu(installation, pair), 300)
            node = installation.job(pair[0])["placement"][0]["node_id"]
            installation.kill(f"agent-{node}" if victim == "agent" else victim)
        jobs = installation.wait_for_ends(pair, 600)

    assert [(job["state"], job["detail"]) for job in jobs if job["state"] != "succeeded"] == []
    for job in jobs:
        check_no_twins(installation.folder, job)
        check_events(installation, job["id"])
    wait_until(lambda: all(installation.job(job)["footprint"]["energy_j"] > 0 for job in pair))
    check_ledger(installation)
