"""How long carbon bounds take: by classes, hourly cohorts with a day to run in; and by modes, the jobs of two weeks.

    ./test --bench carbon_bound

Both on 64 GPUs; the jobs are GREEN's, by all levers, each with 12 h of slack and at most its own length. Writes
`results/bench_carbon_bound.json`. Fails where a day's bound by classes takes longer than 0.1 s, a quarter's
than 30 s, or that of the two weeks than 120 s of CPU.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from lab.bounds.least_carbon import CarbonBoundProblem, Work, carbon_bound
from lab.experiments.bound import ALL_LEVERS, Slack, least_of_run
from lab.experiments.cell import grid_of, workload_of
from lab.experiments.plan import Trace
from services.core.domain.carbon import CarbonCurve
from services.core.domain.solving import SolveStatus
from services.simulator.engine import EngineOptions
from services.simulator.workload import ClusterSpec

WINDOW_H = 24
LIMITS_S = {24: 0.1, 168: 1.0, 720: 5.0, 2_160: 30.0}
WEEKS_LIMIT_S = 120.0
SLACK_S, RESTART_S = 43_200.0, 30.0
RESULTS = Path(__file__).parents[2] / "results"


def a_problem(hours: int) -> CarbonBoundProblem:
    """Two classes, high and low power, of every hour's arrivals; on one day, of the day's."""
    generator = np.random.default_rng(0)
    hour = np.arange(hours)
    intensity = 200 + 100 * np.sin(hour / 24 * 2 * np.pi) + generator.normal(0, 20, hours)
    curve = CarbonCurve(hour * 3_600.0, intensity, hours * 3_600.0)
    work = [
        Work(float(generator.uniform(5, 32)), power_w, release * 3_600.0, (release + WINDOW_H) * 3_600.0)
        for release in range(max(hours - WINDOW_H, 1))
        for power_w in (320.0, 180.0)
    ]
    return CarbonBoundProblem(curve, np.array(64.0), work, idle_power_w=50.0)


def two_weeks() -> dict[str, float]:
    """Return how long the bound of two weeks of GREEN's year takes, of a run in which every job ran alone at once."""
    trace = Trace("July", "green-year", "2023-07-01", 14.0, recipe="green")
    jobs, grid = workload_of(trace, 1), grid_of(trace, "GB", "direct")
    alone_s = jobs.work_s + RESTART_S
    began_s = time.process_time()
    found = least_of_run(
        jobs,
        ClusterSpec.parse("32x2:RTX3090"),
        grid,
        EngineOptions(),
        ALL_LEVERS,
        jct_s=alone_s,
        makespan_s=float((jobs.submitted_s + alone_s).max() - jobs.submitted_s[0]) + SLACK_S,
        slack=Slack(SLACK_S, 1.0),
    )
    took_s = time.process_time() - began_s
    print(f"{len(jobs):6} jobs of two weeks, by all levers {took_s:8.3f} s of CPU", flush=True)
    return {"jobs": len(jobs), "cpu_s": took_s, "carbon_kg": found.carbon_gco2 / 1_000}


def main() -> int:
    """Measure every size once.

    Returns:
        0, or 1 if one took too long.
    """
    lines: list[dict[str, float]] = []
    for hours in LIMITS_S:
        problem = a_problem(hours)
        began_s = time.perf_counter()
        found = carbon_bound(problem)
        took_s = time.perf_counter() - began_s
        assert found.status is SolveStatus.OPTIMAL
        assert found.carbon_gco2 is not None
        lines.append({"hours": hours, "variables": problem.cells, "s": took_s, "carbon_kg": found.carbon_gco2 / 1_000})
        print(f"{hours:6} h {problem.cells:8} variables {took_s:8.3f} s", flush=True)
    weeks = two_weeks()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bench_carbon_bound.json").write_text(json.dumps([*lines, weeks], indent=1))
    slow = any(line["s"] > LIMITS_S[int(line["hours"])] for line in lines)
    return int(slow or weeks["cpu_s"] > WEEKS_LIMIT_S)
