"""Two real jobs on one simulated GPU: Gandiva packs them, both work, and the ledger splits what they draw."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from services.cli.commands import CliError
from tests.chaos.world import install
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, scratch_folder, wait_until

TICKS = 400
"""Work for longer than it takes until all that is killed has come back."""


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
    return installation.gateway.call("POST", "/v1/jobs", body=document, key=f"{name}-{time.monotonic_ns()}")["id"]


def place(installation: Installation, job_id: str) -> tuple[str, Any]:
    job = installation.job(job_id)
    return job["state"], job["placement"]


@contextmanager
def packed(installation: Installation, pair: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield two jobs that run on the one GPU that others leave, under Gandiva; end them, and put the policy back."""
    active = installation.gateway.get("/v1/policies/active")
    jobs = [submit(installation, f"filler-{gpus}", gpus, preemptible=False) for gpus in (4, 3)]
    try:
        wait_until(lambda: all(installation.job(job)["state"] == "running" for job in jobs), 120)
        body = {"name": "gandiva", "parameters": {"quantum_s": 1}}
        installation.gateway.call("PUT", "/v1/policies/active", body=body)
        jobs += [submit(installation, f"packed-{at}", 1, may_share_gpu=True, **spec) for at, spec in enumerate(pair)]
        wait_until(lambda: share_a_gpu(installation, jobs[2:]), 300)
        yield jobs[2:]
    finally:
        for job in jobs:
            with contextlib.suppress(CliError):  # it is over
                installation.gateway.call("POST", f"/v1/jobs/{job}/cancel")
        installation.wait_for_ends(jobs, 120)
        body = {"name": active["name"], "parameters": active["parameters"]}
        installation.gateway.call("PUT", "/v1/policies/active", body=body)


def share_a_gpu(installation: Installation, pair: list[str]) -> bool:
    (first, here), (second, there) = (place(installation, job) for job in pair)
    return first == second == "running" and here == there != []


def check_invariants(installation: Installation) -> None:
    found = installation.gateway.get("/v1/invariants")
    assert found["holds"], [entry for entry in found["invariants"] if not entry["holds"]]


def test_two_jobs_run_on_one_gpu_at_once_and_share_its_energy(installation: Installation) -> None:
    with packed(installation, [{}, {}]) as pair:
        before = [installation.job(job)["footprint"]["energy_j"] for job in pair]
        wait_until(lambda: all(
            installation.job(job)["footprint"]["energy_j"] > had for job, had in zip(pair, before, strict=True)
        ), 120)  # fmt: skip
        check_invariants(installation)


@pytest.mark.slow
def test_a_packed_pair_outlives_whoever_is_killed_and_each_ends_once(installation: Installation) -> None:
    with scratch_folder() as folder:
        notes = folder / "notes"
        notes.mkdir()
        notes.chmod(0o777)
        install(program := folder / "job.py")
        command = [sys.executable, "-I", "-S", str(program), str(TICKS), "0.1", "0", str(notes)]
        spec = {"command": command, "work": {"total": TICKS}}
        with packed(installation, [spec, spec]) as pair:
            node = installation.job(pair[0])["placement"][0]["node_id"]
            for name in (f"agent-{node}", "scheduler", "telemetry", f"agent-{node}"):
                installation.kill(name)
            ends = installation.wait_for_ends(pair, 300)
        assert [job["state"] for job in ends] == ["succeeded", "succeeded"], ends
        for job in pair:
            work = installation.folder / "checkpoints" / job
            assert (work / "done").exists()
            assert (work / "ticks").stat().st_size == TICKS, "each tick was done once"
        assert not (notes / "twin").exists()
        assert (notes / "device-held-twice").exists(), "they held one GPU at once"
    check_invariants(installation)
