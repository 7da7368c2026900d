"""Jobs that several benchmarks run; apart from them, because ``bench_peers`` counts the time of its imports."""

from __future__ import annotations

import csv
import gzip
import itertools
from pathlib import Path

import numpy as np

from services.simulator.workload import Workload
from tests.support.workloads import a_workload


def short_jobs(jobs: int, every_s: float, mean_s: float, sizes: tuple[int, ...], seed: int = 1) -> Workload:
    """Return jobs that arrive at a steady rate, of log-normal lengths in whole seconds."""
    random = np.random.default_rng(seed)
    work = np.ceil(random.lognormal(0.0, 1.2, jobs) * mean_s / np.exp(0.72))
    gpus = random.choice(sizes, jobs)
    return a_workload(list(zip((every_s * np.arange(jobs)).tolist(), work.tolist(), gpus.tolist(), strict=True)))


def pai_jobs(path: Path, jobs: int) -> Workload:
    """Return the first jobs of GAIA's sample of Alibaba PAI, whose lengths are in hours."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = itertools.islice(csv.DictReader(file), jobs)
        return a_workload([(0.06 * at, 0.62 * 3_600.0 * float(row["length"]), 1) for at, row in enumerate(rows)])
