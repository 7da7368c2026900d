"""How fast the simulator is: jobs per second by policy and size, and its memory; on one core.

``python -m tests.benchmarks.bench_simulator [--full] [--pai FILE] [--only TEXT]``: without ``--full`` a month of the
bundled year instead of all of it, and no run of a million jobs; with ``--only`` the rows whose names have the text. The
sizes: the year (146,000 jobs on 64 GPUs) under GREEN and every baseline; 20,000 jobs on 6,500 GPUs under SJF, made up,
and with ``--pai`` (GAIA's ``pai_100k.csv.gz``) the first of Alibaba's as the peer was given them: one GPU each, lengths
times 0.62, a thousand a minute; 5,000 on 2,048 under LAS; two weeks of the year under ``joint``, as
``lab/examples/joint-weeks.toml`` has it; and jobs of the year at a load of 1.2 until the last is submitted,
when a long queue waits: the time per job says whether it grows with that. Jobs are stopped more often then; the time
per start, of jobs that ended or were stopped, is beside it, and so is the part of active rounds, which rank the queue,
without what they start and stop.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.contracts.simulations import TrainingOptions
from services.core.cycle.policy import Policy
from services.core.cycle.run_cycle import CycleResult, run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import Inputs, prepare
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload
from tests.benchmarks.jobs import pai_jobs, short_jobs
from tests.benchmarks.results import write_result
from tests.support.workloads import a_trace, a_year

PAPER = ClusterSpec.parse("32x2:RTX3090")
YEAR = (
    "green", "las", "fifo", "sjf", "srtf", "gaia", "ecovisor", "wait-awhile", "gandiva", "afs", "zeus+las", "pollux",
)  # fmt: skip


def timed(
    policy: str, workload: Workload, cluster: ClusterSpec, trace: CarbonTrace, *, until_s: float | None = None
) -> dict[str, Any]:
    """Return a run's figures: processor seconds, jobs per second, rounds."""
    options = EngineOptions(rigid=not POLICIES[policy].elastic, until_s=until_s)
    began_s = time.process_time()
    result = simulate(policy, workload, cluster, trace, options=options)
    cpu_s = time.process_time() - began_s
    return {
        "policy": policy,
        "jobs": len(workload),
        "gpus": cluster.gpus,
        "completed": result.completed,
        "rounds": result.rounds,
        "active_rounds": result.active_rounds,
        "preemptions": result.preemptions,
        "cpu_s": round(cpu_s, 2),
        "jobs_per_s": round(len(workload) / cpu_s),
        "us_per_job": round(1e6 * cpu_s / len(workload)),
        "us_per_start": round(1e6 * cpu_s / max(result.completed + result.preemptions, 1)),
        "us_per_round": round(1e6 * cpu_s / max(result.rounds, 1)),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def at_load(load: float, jobs: int) -> Workload:
    """Return that many jobs of the bundled year, arriving so fast that 64 GPUs are asked for so much of their time."""
    year = read_jobs("green-year", start="2023-01-01", days=jobs / 400, seed=1)
    asked = float((year.work_s * year.min_gpus).sum()) / PAPER.gpus
    first_s, last_s = float(year.submitted_s[0]), float(year.submitted_s[-1])
    return replace(year, submitted_s=first_s + (year.submitted_s - first_s) * asked / (last_s - first_s) / load)


def overloaded(jobs: int, grid: CarbonTrace) -> dict[str, Any]:
    """Return the figures of that many jobs under GREEN until the last one is submitted, when a long queue waits."""
    crowd = at_load(1.2, jobs)
    active_s = 0.0

    def timing(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> CycleResult[Any]:
        nonlocal active_s
        began_s = time.process_time()
        result = run_cycle(policy, snapshot, memory)
        if snapshot.trigger is Trigger.ACTIVE:
            active_s += time.process_time() - began_s
        return result

    with patch("services.simulator.engine.simulation.run_under_orders", timing):
        figures = timed("green", crowd, PAPER, grid, until_s=float(crowd.submitted_s[-1]))
    return {**figures, "active_us_per_job": round(1e6 * active_s / jobs)}


def joint_days(days: float) -> dict[str, Any]:
    """Return the figures of so many days from July on, with lengths unknown and forecasts as they were issued."""
    options = TrainingOptions(policy="joint", predictor="none", start="2023-07-01", days=days)
    run = prepare(options, Inputs("green-year", "GB", "issued"))
    figures = timed("joint", run.workload, run.cluster, run.trace)
    return {**figures, "cpu_s_per_day": round(figures["cpu_s"] / days, 3)}


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--pai", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT")
    given = parser.parse_args()
    full: bool = given.full
    days = 365.0 if full else 30.0
    grid = read_carbon("GB", start="2023-01-01")
    year = read_jobs("green-year", start="2023-01-01", days=days, seed=1)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        f"year, {name}": lambda name=name: timed(name, year, PAPER, grid) for name in YEAR
    }
    works["joint, two weeks" if full else "joint, four days"] = lambda: joint_days(14.0 if full else 4.0)
    pai = ClusterSpec.parse("812x8:V100,1x4:V100")
    works["20,000 jobs on 6,500 GPUs, sjf"] = lambda: timed(
        "sjf", short_jobs(20_000, 0.06, 5_000.0, (1,)), pai, a_trace()
    )
    if given.pai is not None:
        works["20,000 PAI jobs on 6,500 GPUs, sjf"] = lambda: timed("sjf", pai_jobs(given.pai, 20_000), pai, a_trace())
    tiresias = ClusterSpec.parse("256x8:V100")
    works["5,000 jobs on 2,048 GPUs, las"] = lambda: timed(
        "las", short_jobs(5_000, 12.0, 7_000.0, (1, 1, 2, 4, 8)), tiresias, a_trace()
    )
    for jobs in (10_000, 100_000, 1_000_000) if full else (10_000, 40_000):
        works[f"growth, {jobs:,} jobs, fifo"] = lambda jobs=jobs: timed(
            "fifo", a_year(jobs, days=jobs / 400), PAPER, a_trace()
        )
    for jobs in (10_000, 40_000) if full else (2_000, 8_000):
        works[f"load 1.2, {jobs:,} jobs, green"] = lambda jobs=jobs: overloaded(jobs, grid)
    runs = {name: work() for name, work in works.items() if given.only in name}
    for name, run in runs.items():
        speed = f"{run['jobs_per_s']:8,} jobs/s {run['us_per_job']:6} us a job"
        active = f", {run['active_us_per_job']} us of it in active rounds" if "active_us_per_job" in run else ""
        print(f"{name:40} {run['cpu_s']:8.2f} s {speed} {run['peak_rss_mb']:6} MB{active}")
    write_result("simulator", {"days": days, "runs": runs})


if __name__ == "__main__":
    main()
