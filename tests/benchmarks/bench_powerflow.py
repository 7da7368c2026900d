"""How long PowerFlow's allocation takes, and how far it is from the best one.

Speed: GPUs and settings of elastic jobs, sixteen steps of the clock, tables of speed and power included. Distance: the
mean time to the end against an exhaustive search, over random cases of three jobs on eight GPUs (``gaps``), for the
greedy as printed and as it may be turned.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from services.core.policies.powerflow.allocate import Greedy
from tests.benchmarks.results import write_result
from tests.support.powerflow import gaps, greedily, random_choices

SIZES = {(1_000, 4_096): 1.0, (10_000, 16_384): 10.0}
"""(jobs, GPUs): the most CPU seconds a re-planning may take."""
GREEDIES = {
    "as printed": Greedy(),
    "per GPU of the step": Greedy(marginal="energy_and_gpu"),
    "per watt of the limit": Greedy(marginal="power"),
}
CASES = 400


def replan_s(n_jobs: int, gpus: int) -> float:
    """Return the median CPU seconds of tables, GPUs and settings, at a limit that binds."""
    rng = np.random.default_rng(3)
    work_s = rng.lognormal(8.0, 1.0, n_jobs)
    taken: list[float] = []
    for _ in range(5):
        begun = time.process_time()
        choices = random_choices(rng, n_jobs, most_gpus=64, settings=16)
        greedily(choices, work_s, gpus, 0.8 * gpus * 300.0)
        taken.append(time.process_time() - begun)
    return float(np.median(taken))


def main() -> int:
    """Measure, print, write the results; 1 if a re-planning takes too long."""
    seconds = {shape: replan_s(*shape) for shape in SIZES}
    for (n_jobs, gpus), taken in seconds.items():
        print(f"{n_jobs:>6,} jobs, {gpus:>6,} GPUs, 16 clocks: {taken:.3f} s")
    distances = {name: gaps(CASES, greedy) for name, greedy in GREEDIES.items()}
    quantiles = (0.25, 0.5, 0.75, 0.9, 1.0)
    print("mean time to the end above the best, quantiles " + ", ".join(f"{at:g}" for at in quantiles))
    for name, found in distances.items():
        print(f"{name:<24}" + "".join(f"{100 * each:>8.1f} %" for each in np.quantile(found, quantiles)))
    write_result(
        "powerflow",
        {
            "replan_s": {f"{jobs} jobs, {gpus} GPUs": round(taken, 4) for (jobs, gpus), taken in seconds.items()},
            "gap": {
                name: {f"p{100 * at:g}": round(float(np.quantile(found, at)), 4) for at in quantiles}
                | {"mean": round(float(found.mean()), 4), "cases": int(found.size)}
                for name, found in distances.items()
            },
        },
    )
    return int(any(seconds[shape] > limit_s for shape, limit_s in SIZES.items()))


if __name__ == "__main__":
    sys.exit(main())
