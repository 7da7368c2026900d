"""One simulation of an experiment, and what of it is kept."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from services.core.policies.registry import POLICIES, build_policy, policy_name
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.experiments.plan import Cell, Trace
from services.simulator.readers import read_carbon, read_jobs
from services.simulator.readers.text import utc_s
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

POINTS = 400
"""So many points of each series are kept."""
EDGES_S = (600.0, 3_600.0, 36_000.0)
SIZES = ("under 10 min", "10 to 60 min", "1 to 10 h", "10 h and more")


@lru_cache(maxsize=2)
def workload_of(trace: Trace, seed: int) -> Workload:
    """Return a trace's jobs."""
    return read_jobs(
        trace.jobs, format=trace.format, recipe=trace.recipe, start=trace.start, days=trace.days, seed=seed
    )


def grid_of(trace: Trace, zone: str, signal: str) -> CarbonTrace:
    """Return the grid from the day before the trace to some days after it, where the data reach."""
    whole = read_carbon(zone, signal=signal)
    begin_s = utc_s(trace.start, "start")
    days = min(trace.days + trace.tail_days, (whole.end_s - begin_s) / 86_400.0)
    return read_carbon(zone, start=trace.start, days=days, signal=signal)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Return one simulation's inputs and figures, as JSON values.

    Policies that do not scale jobs run them at the sizes their users asked for.

    Raises:
        PolicyConfigError: no such policy, or bad parameters.
    """
    build_policy(cell.choice.policy, cell.choice.params)
    workload = workload_of(cell.trace, cell.seed)
    grid = grid_of(cell.trace, cell.zone, cell.signal)
    rigid = not POLICIES[policy_name(cell.choice.policy)].elastic and "gang" not in cell.choice.params
    options = EngineOptions(**{"rigid": rigid, **cell.engine_options})
    began = time.perf_counter()
    result = simulate(
        cell.choice.policy,
        workload,
        ClusterSpec.parse(cell.cluster),
        grid,
        parameters=cell.choice.params,
        options=options,
    )
    summary = {**result.summary(), "wall_s": round(time.perf_counter() - began, 3)}
    return {
        "inputs": asdict(cell),
        "summary": summary,
        "sizes": by_size(result, workload),
        "series": thinned(result),
        "notes": [*workload.notes, *grid.notes],
    }


def by_size(result: SimulationResult, workload: Workload) -> list[dict[str, Any]]:
    """Return mean and 99th percentile of completion times by category of a job's work, seconds."""
    category = np.digitize(workload.work_s, EDGES_S)
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(SIZES):
        jct_s = result.columns.jct_s[(category == index) & np.isfinite(result.columns.ended_s)]
        mean, tail = (float(jct_s.mean()), float(np.percentile(jct_s, 99))) if jct_s.size else (None, None)
        rows.append({"size": name, "jobs": int((category == index).sum()), "avg_jct_s": mean, "p99_jct_s": tail})
    return rows


def thinned(result: SimulationResult) -> dict[str, list[float]]:
    """Return the cluster over time at no more than ``POINTS`` moments; amounts are sums up to then."""
    series = result.series
    rows = np.unique(np.linspace(0, len(series.times_s) - 1, min(POINTS, len(series.times_s))).astype(np.int64))
    columns = {
        "times_s": series.times_s,
        "power_w": series.power_w,
        "intensity_gco2_per_kwh": series.intensity_gco2_per_kwh,
        "carbon_gco2": series.carbon_gco2,
        "running_high": series.running_high,
        "running_low": series.running_low,
        "queued": series.queued,
    }
    return {name: [round(float(value), 3) for value in column[rows]] for name, column in columns.items()}
