"""How long a carbon bound takes: hourly cohorts in two classes, each with a day to run in, on 64 GPUs.

    ./test --bench carbon_bound

Writes `results/bench_carbon_bound.json`. Fails where a day's bound takes longer than 0.1 s, or a quarter's than 30 s.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from services.core.domain.carbon import CarbonCurve
from services.core.policies.bounds.carbon import CarbonBoundProblem, Work, carbon_bound
from services.core.solvers.model import SolveStatus

WINDOW_H = 24
LIMITS_S = {24: 0.1, 168: 1.0, 720: 5.0, 2_160: 30.0}
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
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bench_carbon_bound.json").write_text(json.dumps(lines, indent=1))
    return int(any(line["s"] > LIMITS_S[int(line["hours"])] for line in lines))
