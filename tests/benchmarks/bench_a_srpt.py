"""How fast A-SRPT is simulated on the paper's cluster, and how fast a forest learns.

``python -m tests.benchmarks.bench_a_srpt [--full]``: 151,644 jobs (with --full, else a twelfth) on 250 x 8 GPUs under
``a-srpt`` and ``wcs-duration``, predicted by the median of their groups, in processor seconds of one core without
reading the trace; and the forest on 606,578 earlier jobs (without --full on 60,000), fitted on one core, with the time
of one prediction. Targets: 60 s; 60 s on two cores; 2 ms.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from lab.foresight import PREDICTORS, learning
from lab.forest import Forest
from services.core.profiles.recurrence import Runs
from services.simulator.engine import EngineOptions, simulate
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec, Workload
from tests.benchmarks.results import write_result

PAPER = ClusterSpec.parse("250x8:V100")
CALLS = 500


def timed(policy: str, jobs: Workload) -> dict[str, Any]:
    """Return a run's figures."""
    options = EngineOptions(rigid=True)
    grid = read_carbon("GB", start="2023-08-15")
    began_s = time.process_time()
    result = simulate(policy, jobs, PAPER, grid, options=options, predictor=learning(PREDICTORS["median"](1)))
    cpu_s = time.process_time() - began_s
    return {
        "jobs": len(jobs),
        "completed": result.completed,
        "rounds": result.rounds,
        "cpu_s": round(cpu_s, 2),
        "us_per_job": round(1e6 * cpu_s / len(jobs)),
    }


def learned(history: Runs) -> dict[str, Any]:
    """Return how long a forest takes to grow and to answer."""
    began_s = time.process_time()
    model = Forest().fit(history)
    fitted_s = time.process_time() - began_s
    began_s = time.perf_counter()
    for at in range(CALLS):
        model.predict(history.group[at : at + 1], history.user[at : at + 1])
    return {
        "jobs": len(history),
        "fit_cpu_s": round(fitted_s, 2),
        "predict_ms": round((time.perf_counter() - began_s) / CALLS * 1e3, 3),
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    full: bool = parser.parse_args().full
    jobs = read_jobs("a-srpt", start="2023-08-15", days=12 if full else 1, seed=1)
    runs = {policy: timed(policy, jobs) for policy in ("a-srpt", "wcs-duration")}
    assert jobs.recurrence is not None
    history = jobs.recurrence.history
    some = np.arange(len(history) if full else 60_000)
    forest = learned(Runs(history.group[some], history.user[some], history.amount[some]))
    for policy, run in runs.items():
        print(f"{policy:14} {run['jobs']:8,} jobs {run['cpu_s']:8.2f} s {run['us_per_job']:6} us/job")
    print(f"forest of {forest['jobs']:,} jobs: {forest['fit_cpu_s']} s, a prediction {forest['predict_ms']} ms")
    write_result("a_srpt", {"runs": runs, "forest": forest})


if __name__ == "__main__":
    main()
