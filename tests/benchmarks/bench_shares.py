"""How evenly tenants are served with and without ``fair+``: Jain's index of what those that wait have of their shares.

500 jobs of three tenants, 60, 30 and 10 % of them, arrive within a day on 16 GPUs that they would need 1.3 days of;
means over five draws of jobs and tenants. An index of 1 is to all alike; with three tenants a third is all to one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.core.policies.registry import FAIR, entry_of
from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ClusterSpec, Workload
from tests.benchmarks.results import write_result
from tests.support.workloads import a_wave, a_year

POLICIES = ("las", "joint", "green", "pollux")
SEEDS = range(1, 6)
TENANTS, PARTS = ("most", "some", "few"), (0.6, 0.3, 0.1)


def jobs_of(seed: int) -> Workload:
    """Return the jobs of a draw."""
    workload = a_year(500, days=1.0, gpus=16, load=1.3, seed=seed)
    tenants = np.random.default_rng(seed).choice(TENANTS, len(workload), p=PARTS)
    return replace(workload, tenants=tuple(tenants.tolist()))


def jain(policy: str, seed: int) -> float:
    """Return the index of one run."""
    entry = entry_of(policy)
    assert entry is not None
    options = EngineOptions(rigid=not entry.elastic)
    return simulate(policy, jobs_of(seed), ClusterSpec.parse("2x8:A100"), a_wave(3), options=options).jain


def main() -> int:
    """Print the table."""
    print("| policy | alone | with `fair+` |\n|---|---:|---:|")
    found: dict[str, list[float]] = {}
    for policy in POLICIES:
        means = [float(np.mean([jain(name, seed) for seed in SEEDS])) for name in (policy, FAIR + policy)]
        found[policy] = means
        print(f"| {policy} | {means[0]:.2f} | {means[1]:.2f} |", flush=True)
    write_result("shares", {"jain": found})
    return 0
