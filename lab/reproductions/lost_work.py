"""Work lost to stops, with and without a guaranteed run: ``python -m lab.reproductions.lost_work PAGE``.

A week of GREEN's year, on its cluster and on one that is full, whose nodes fail once in ``MTBF_S`` each, under the
product's policies that stop jobs. Makes the table ``lost-work`` of PAGE anew, in five minutes.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from lab.reproductions.marked import fill
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import ClusterSpec

START, DAYS, MTBF_S = "2023-10-02", 7, 14 * 86_400.0
CLUSTERS = ("32x2:RTX3090", "12x2:RTX3090")
PREEMPTING = ("green", "joint", "las", "powerflow")
RUNS_S = (0.0, 3_600.0)


def row(cluster: str, policy: str, min_run_s: float) -> str:
    """Return a line of the table: stops, what each cost, and what the whole emitted and took."""
    trace = read_carbon("GB", start=START, days=DAYS + 33.0, forecast="issued")
    options = EngineOptions(min_run_s=min_run_s, node_mtbf_s=MTBF_S, rigid=policy == "las")
    jobs = predicted("none", read_jobs("green-year", start=START, days=DAYS))
    run = Simulation(build_policy(policy, {}), jobs, ClusterSpec.parse(cluster), trace, options)
    result, gangs = run.run({}), run.gangs
    if result.completed != result.jobs:
        raise RuntimeError(f"{policy}: {result.completed} of {result.jobs} jobs ended")
    lost_s = gangs.lost_gpu_s / max(gangs.stopped_gpus, 1)
    figures = f"{result.preemptions:,} | {result.failures} | {lost_s:.1f} | {gangs.lost_gpu_s / 3_600:.1f}"
    head = f"| {cluster.removesuffix(':RTX3090')} | {policy} | {min_run_s:,.0f}"
    return f"{head} | {figures} | {result.carbon_kg:.1f} | {result.avg_jct_s / 3_600:.3f} |"


def table() -> str:
    """Return a row per cluster, policy and guaranteed run."""
    lines = ["| nodes | policy | run, s | stops by it | by lost nodes | lost, s per GPU and stop |"]
    lines[0] += " GPU h in all | carbon, kg | mean JCT, h |"
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    return "\n".join([*lines, *(row(*each) for each in product(CLUSTERS, PREEMPTING, RUNS_S))])


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"lost-work": table})
