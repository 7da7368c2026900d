"""How long a round of GREEN takes: ten thousand jobs on five thousand GPUs, and the small rounds of a simulator.

A round is ``run_cycle``: decide and check. The targets are those an operator feels (a large active round well under a
second) and those a simulated year needs (a small passive round in well under a millisecond).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from services.core.cycle.policy import Policy
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import JobTable, NodeTable, Phase, Snapshot, Trigger
from services.core.domain.carbon import CarbonOutlook, Signal
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.policies.green.memory import GreenMemory
from services.core.policies.registry import build_policy
from tests.benchmarks.results import write_result
from tests.support.builders import NOON_S, hourly_curve

ACTIVE_LIMIT_S = 1.0
LARGE, SMALL = (10_000, 625, 8), (500, 32, 2)


def cluster(n_jobs: int, n_nodes: int, gpus_per_node: int, *, occupied: float) -> Snapshot:
    """Return a snapshot with jobs in every phase; so many of the GPUs are held, and the other jobs wait."""
    rng = np.random.default_rng(7)
    low = rng.choice([1, 1, 1, 2, 4, 8], n_jobs)
    phase, gpus = np.zeros(n_jobs, dtype=np.int64), np.zeros(n_jobs, dtype=np.int64)
    placements: list[Placement | None] = [None] * n_jobs
    devices = [(node, device) for node in range(n_nodes) for device in range(gpus_per_node)]
    taken = 0
    for job in range(n_jobs):
        size = int(low[job])
        if taken + size > occupied * len(devices):
            break
        shares: dict[int, list[int]] = {}
        for node, device in devices[taken : taken + size]:
            shares.setdefault(node, []).append(device)
        placements[job] = Placement(tuple(NodeShare(NodeId(f"n{node}"), tuple(on)) for node, on in shares.items()))
        phase[job], gpus[job] = rng.choice([Phase.RUNNING] * 8 + [Phase.STARTING, Phase.PREEMPTING]), size
        taken += size
    free = [[device for node, device in devices[taken:] if node == at] for at in range(n_nodes)]
    submitted = NOON_S - rng.uniform(0, 200_000, n_jobs)
    ran = rng.random(n_jobs) < 0.7
    return Snapshot(
        version=1,
        now_s=NOON_S,
        trigger=Trigger.ACTIVE,
        gpu_models=("A100",),
        jobs=JobTable(
            ids=tuple(JobId(f"job-{at:08x}") for at in rng.permutation(n_jobs)),
            tenants=tuple(f"tenant-{at % 20}" for at in range(n_jobs)),
            submitted_s=submitted,
            waiting_since_s=np.maximum(submitted, NOON_S - 40_000),
            phase=phase,
            min_gpus=low,
            max_gpus=low * rng.choice([1, 2, 4], n_jobs),
            step_gpus=np.ones(n_jobs, dtype=np.int64),
            gpus=gpus,
            eligible=np.ones((n_jobs, 1), dtype=np.bool_),
            preemptible=np.ones(n_jobs, dtype=np.bool_),
            priority=np.zeros(n_jobs, dtype=np.int64),
            deadline_s=np.full(n_jobs, np.inf),
            attained_gpu_s=np.where(ran, rng.uniform(0, 1e5, n_jobs), 0.0),
            energy_j=np.where(ran, rng.uniform(0, 1e7, n_jobs), 0.0),
            carbon_gco2=np.where(ran, rng.uniform(0, 1e3, n_jobs), 0.0),
            gpu_power_w=np.where(ran, rng.uniform(100, 400, n_jobs), np.nan),
            efficiency_base=np.where(ran, 1.0, np.nan),
            efficiency_now=np.where(ran, rng.uniform(0.6, 1.0, n_jobs), np.nan),
            progress=np.zeros(n_jobs),
            placements=tuple(placements),
        ),
        nodes=NodeTable(
            ids=tuple(NodeId(f"n{at}") for at in range(n_nodes)),
            gpu_model=np.zeros(n_nodes, dtype=np.int64),
            gpus=np.full(n_nodes, gpus_per_node, dtype=np.int64),
            schedulable=np.ones(n_nodes, dtype=np.bool_),
            free_devices=tuple(map(tuple, free)),
        ),
        outlooks=(CarbonOutlook("GB", Signal.AVERAGE_LIFECYCLE, hourly_curve(rng.uniform(100, 400, 72).tolist())),),
        tenant_gpu_quota={},
    )


def settled(policy: Policy[Any], snapshot: Snapshot) -> GreenMemory:
    """Return the memory of a cluster that has run for a while: most jobs have left the upper queue."""
    memory: GreenMemory = run_cycle(policy, snapshot, policy.initial()).memory
    rng = np.random.default_rng(11)
    in_lower = memory.lower | (rng.random(memory.lower.size) < 0.8)
    return run_cycle(policy, snapshot, replace(memory, lower=in_lower)).memory


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a call."""
    taken: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))


def measure() -> dict[str, float]:
    """Return the median seconds of each kind of round."""
    policy = build_policy("green", {})
    seconds: dict[str, float] = {}
    for size, shape, repeats in (("large", LARGE, 15), ("small", SMALL, 300)):
        crowded, full = cluster(*shape, occupied=0.9), cluster(*shape, occupied=1.0)
        # nothing free and nothing being released
        full = replace(full, jobs=replace(full.jobs, phase=np.where(full.jobs.gpus > 0, Phase.RUNNING, Phase.QUEUED)))
        for name, snapshot in (("crowded", crowded), ("full", full)):
            memory = settled(policy, snapshot)
            passive = replace(snapshot, trigger=Trigger.PASSIVE)
            for kind, each in (("active", snapshot), ("passive", passive)):
                seconds[f"{size} {name} {kind}"] = median_s(
                    lambda each=each, memory=memory: run_cycle(policy, each, memory), repeats
                )
    return seconds


def main() -> int:
    """Measure, print, write the results; 1 if a large active round takes too long."""
    seconds = measure()
    print(f"{'GREEN round':<24}{'median':>12}   (large: {LARGE[0]:,} jobs, {LARGE[1] * LARGE[2]:,} GPUs; ", end="")
    print(f"small: {SMALL[0]} jobs, {SMALL[1] * SMALL[2]} GPUs)")
    for name, taken in seconds.items():
        print(f"{name:<24}{taken * 1000:>9.3f} ms")
    write_result("green_round", {"median_s": {name: round(at, 6) for name, at in seconds.items()}})
    return int(max(taken for name, taken in seconds.items() if name.startswith("large")) > ACTIVE_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
