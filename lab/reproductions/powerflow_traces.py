"""The traces of PowerFlow's sensitivity analysis: ``python -m lab.reproductions.powerflow_traces FOLDER``.

Section 6.4 draws traces of 100 jobs as Gavel does (Narayanan et al., OSDI'20, section 7.1): arrivals are a Poisson
process; a job takes ``10^x`` minutes, ``x`` uniform in 1.5 to 3 for four of five jobs and in 3 to 4 for the others;
70 % of the jobs ask for one GPU, 25 % for two or four, 5 % for eight. Neither the intervals nor the cluster are
printed. The cluster here has 64 GPUs; at an interval of 30 minutes these jobs keep 42 of them busy on average.

All traces are of the same draws: between them only the mean interval, or what jobs ask for, differs.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from services.core.domain.arrays import Floats, Ints

JOBS = 100
SEED = 2023
INTERVALS_MIN = (10, 30, 120)
INTERVAL_MIN = 30
SIZES = (1, 2, 4, 8)
EVERYBODYS = (1, 4)
"""What all jobs ask for in the traces of one size."""
SHARES = (0.7, 0.125, 0.125, 0.05)
LONG_SHARE = 0.2


def draw(seed: int) -> tuple[Floats, Floats, Ints]:
    """Return the gaps between 100 arrivals in mean gaps, the durations in seconds, and the gangs: (100,) each."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, JOBS)
    is_long = rng.random(JOBS) < LONG_SHARE
    minutes = 10 ** np.where(is_long, rng.uniform(3.0, 4.0, JOBS), rng.uniform(1.5, 3.0, JOBS))
    return gaps / gaps.mean(), 60.0 * minutes, rng.choice(np.array(SIZES), JOBS, p=SHARES)


def write(file: Path, interval_min: float, gaps: Floats, durations_s: Floats, gpus: Ints) -> None:
    """Write one trace in Tiresias' format."""
    arrivals_s = 60.0 * interval_min * np.cumsum(gaps)
    with file.open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["job_id", "num_gpu", "submit_time", "model_name", "duration"])
        for job, (arrival_s, duration_s, size) in enumerate(zip(arrivals_s, durations_s, gpus, strict=True)):
            out.writerow([job, size, round(float(arrival_s)), "", round(float(duration_s))])


def main() -> None:
    """Write all traces: one per mean interval, and one per size that all jobs ask for."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    gaps, durations_s, gpus = draw(SEED)
    for interval_min in INTERVALS_MIN:
        write(folder / f"interval-{interval_min}.csv", interval_min, gaps, durations_s, gpus)
    for size in EVERYBODYS:
        write(folder / f"gpus-{size}.csv", INTERVAL_MIN, gaps, durations_s, np.full(JOBS, size))


if __name__ == "__main__":
    main()
