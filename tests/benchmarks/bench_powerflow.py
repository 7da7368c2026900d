"""How long PowerFlow takes to re-plan, and how far its allocation is from the best one.

Speed: a whole active round (``run_cycle``: choices, both halves of the greedy, placement, watts, the plan's check) over
elastic jobs with fitted models and sixteen power limits, once on an empty cluster where all jobs have just arrived,
once an hour later, with a tenth of the jobs new and a limit that has fallen; evaluating the models at every size and
limit is timed apart and counted in. Every job has a model of its own, or a hundred models are shared. Distance: the
mean time to the end against an exhaustive search, over random cases of three jobs on eight GPUs (``gaps``), for the
greedy as printed and as it may be turned.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import numpy as np

from services.core.cycle.run_cycle import run_cycle
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.registry import build_policy
from services.core.profiles.profile import JobModel
from tests.benchmarks.results import write_result
from tests.support.powerflow import gaps
from tests.support.powerflow_clusters import an_hour_on, fitted_models, gangs_of, waiting_cluster

SIZES = {(1_000, 4_096): 1.0, (10_000, 16_384): 10.0}
"""(jobs, GPUs): the most CPU seconds a re-planning may take."""
GREEDIES = {
    "as printed": PowerflowConfig(),
    "per GPU of the step": PowerflowConfig(marginal="energy_and_gpu"),
    "per watt of the limit": PowerflowConfig(marginal="power"),
}
CASES = 400
PARTS = ("tables", "all_arrive", "busy")
ETAS = (0.8, 0.7)
"""Of the empty cluster's round and the busy one's."""
REPEATS = 3
Result = TypeVar("Result")


def whole(n_jobs: int, gpus: int, kinds: int) -> dict[str, float]:
    """Return seconds of processor time and by the clock of the models' tables and of each round, and the peak memory.

    Of three runs the median; meant to be called in a process of its own.
    """
    models = fitted_models(np.random.default_rng(3), kinds)
    middle = np.median([once(n_jobs, gpus, models) for _ in range(REPEATS)], axis=0).round(4).tolist()
    found: dict[str, float] = {"peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}
    for name, (cpu_s, wall_s) in zip(PARTS, middle, strict=True):
        found |= {f"{name}_cpu_s": cpu_s, f"{name}_wall_s": wall_s}
    return found


def once(n_jobs: int, gpus: int, models: list[JobModel]) -> list[tuple[float, float]]:
    """Return seconds of processor time and by the clock of each of ``PARTS``."""
    gangs, tables = timed(lambda: gangs_of(models))
    empty = waiting_cluster(n_jobs, gpus, gangs)
    before, after = (build_policy("powerflow", {"eta": eta}) for eta in ETAS)
    planned, arrival = timed(lambda: run_cycle(before, empty, before.initial()))
    busy = an_hour_on(empty, planned.plan, ended=0.1)
    _, again = timed(lambda: run_cycle(after, busy, planned.memory))
    return [tables, arrival, again]


def timed(call: Callable[[], Result]) -> tuple[Result, tuple[float, float]]:
    """Return what a call returns, and its seconds of processor time and by the clock."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = call()
    return result, (time.process_time() - cpu_s, time.perf_counter() - wall_s)


def main() -> int:
    """Measure, print, write the results; 1 if a re-planning takes too long."""
    shapes = [(n_jobs, gpus, kinds) for n_jobs, gpus in SIZES for kinds in (n_jobs, 100)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        rounds = dict(zip(shapes, processes.map(whole, *zip(*shapes, strict=True)), strict=True))
    print(
        "seconds of CPU (by the clock): models at every size and limit; a round of arrivals; a round of a busy cluster"
    )
    for (n_jobs, gpus, kinds), each in rounds.items():
        parts = (f"{each[f'{part}_cpu_s']:6.3f} ({each[f'{part}_wall_s']:.3f})" for part in PARTS)
        print(f"{n_jobs:>6,} jobs, {gpus:>6,} GPUs, {kinds:>6,} models:", *parts, f"{each['peak_rss_mb']:.0f} MB")
    distances = {name: gaps(CASES, greedy) for name, greedy in GREEDIES.items()}
    quantiles = (0.25, 0.5, 0.75, 0.9, 1.0)
    print("mean time to the end above the best, quantiles " + ", ".join(f"{at:g}" for at in quantiles))
    for name, found in distances.items():
        print(f"{name:<24}" + "".join(f"{100 * each:>8.1f} %" for each in np.quantile(found, quantiles)))
    write_result(
        "powerflow",
        {
            "replan": {
                f"{jobs} jobs, {gpus} GPUs, {kinds} models": each for (jobs, gpus, kinds), each in rounds.items()
            },
            "gap": {
                name: {f"p{100 * at:g}": round(float(np.quantile(found, at)), 4) for at in quantiles}
                | {"mean": round(float(found.mean()), 4), "cases": int(found.size)}
                for name, found in distances.items()
            },
        },
    )
    slowest = {
        (n_jobs, gpus): each["tables_cpu_s"] + max(each["all_arrive_cpu_s"], each["busy_cpu_s"])
        for (n_jobs, gpus, kinds), each in rounds.items()
        if kinds == n_jobs
    }
    return int(any(slowest[shape] > limit_s for shape, limit_s in SIZES.items()))


if __name__ == "__main__":
    sys.exit(main())
