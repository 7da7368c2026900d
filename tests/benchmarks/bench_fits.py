"""How long the learned models take: evaluated over a whole cluster's jobs, and fitted to one job's points.

An allocator asks for every job at every power of two of GPUs and 16 clocks, and re-plans 1,000 jobs on 4,096 GPUs in a
second and 10,000 on 16,384 in ten: the evaluation may take a small part of that. All figures are process time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.profiles.learn import fit_energy, fit_throughput
from services.core.profiles.profile import JobModel, JobProfile
from tests.benchmarks.results import write_result
from tests.support.performance import CLOCKS_MHZ, grid, measured
from tests.support.performance_table import PerformanceTable

CLUSTERS = ((1_000, 4_096, 0.1), (10_000, 16_384, 1.0))
"""Jobs, GPUs, and the seconds an evaluation may take."""
BOARDS, FAMILIES = ("V100", "A100", "H100"), ("vision", "language", "speech")


def taken_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median process time of a call."""
    taken: list[float] = []
    for _ in range(repeats):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return float(np.median(taken))


def evaluation(n_jobs: int, n_gpus: int, axis: ControlKind) -> float:
    """Return the time of one evaluation of all jobs over sizes and 16 settings."""
    kinds: list[JobModel] = [JobProfile.of(board, family, axis).model for board in BOARDS for family in FAMILIES]
    table = PerformanceTable([kinds[job % len(kinds)] for job in range(n_jobs)])
    batch = np.random.default_rng(5).choice([64.0, 256.0, 1_024.0], n_jobs)
    sizes: Floats = 2.0 ** np.arange(int(np.log2(n_gpus)) + 1)
    settings = np.linspace(600, 1_500, 16) if axis is ControlKind.CLOCK else np.linspace(100, 400, 16)
    return taken_s(lambda: table.evaluate(batch, sizes, settings, 8), 5)


def fits() -> dict[str, float]:
    """Return the time of each kind of fit of one job: 144 configurations, then 60 from the prior."""
    points = measured(grid(clocks=CLOCKS_MHZ[::2]), noise=0.03)
    rows = np.random.default_rng(6).permutation(len(points))
    seen = points.take(rows[:60])
    profile = JobProfile.of("V100", "vision", ControlKind.CLOCK)
    speed = fit_throughput(points)
    return {
        "throughput": taken_s(lambda: fit_throughput(points), 5),
        "energy": taken_s(lambda: fit_energy(points, speed), 5),
        "from_the_prior": taken_s(lambda: profile.observe(seen), 5),
    }


def main() -> int:
    """Measure, print, write the results; 1 if an evaluation takes too long."""
    slow, found = False, {}
    for n_jobs, n_gpus, limit_s in CLUSTERS:
        for axis in ControlKind:
            seconds = evaluation(n_jobs, n_gpus, axis)
            found[f"{n_jobs} jobs, {n_gpus} GPUs, by {axis.value}"] = seconds
            slow = slow or seconds > limit_s
            print(f"{n_jobs:>6,} jobs x {n_gpus:>6,} GPUs x 16, by {axis.value:<12}{1_000 * seconds:>9.1f} ms")
    fitted = fits()
    for name, seconds in fitted.items():
        print(f"fit: {name:<34}{1_000 * seconds:>9.1f} ms")
    rounded = ({name: round(at, 6) for name, at in each.items()} for each in (found, fitted))
    write_result("fits", dict(zip(("evaluation_s", "fit_s"), rounded, strict=True)))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
