"""One simulation of an experiment, and its stored results.

Policies of ``GRID_BLIND`` make the same schedule on every grid. One simulation then serves all zones and signals; what
it would have emitted on the other grids is its power, half hour by half hour, at their intensities.
"""

from __future__ import annotations

import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lab.experiments.hosts import LabOptions
from lab.experiments.plan import Cell, Trace
from lab.foresight import PREDICTORS, RETRAIN_S, learning
from services.core.domain.arrays import Floats
from services.core.domain.units import J_PER_KWH
from services.core.policies.registry import FAIR, build_policy, policy_entry, policy_name
from services.core.profiles.recurrence import Predictions, evaluate
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.grid import Grid
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.readers.text import utc_s
from services.simulator.training import predicted
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

POINTS = 400
"""Points kept of each series."""
GRID_BLIND = frozenset(
    {"a-srpt", "fifo", "las", "sjf", "spjf", "spwf", "srtf", "wcs-duration", "wcs-subtime", "wcs-workload", "zeus+las"}
)
"""Policies that never look at the grid. Not pollux: half-hour means would price its short stages up to 0.4 % off."""
EDGES_S = (600.0, 3_600.0, 36_000.0)
SIZES = ("under 10 min", "10 to 60 min", "1 to 10 h", "10 h and more")


def is_grid_blind(policy: str) -> bool:
    """Whether a policy, by any of its names, is one of ``GRID_BLIND``; sharing between tenants changes nothing."""
    return policy_name(policy).removeprefix(FAIR) in GRID_BLIND


@lru_cache(maxsize=2)
def workload_of(trace: Trace, seed: int) -> Workload:
    """Return a trace's jobs."""
    return read_jobs(
        trace.jobs, format=trace.format, recipe=trace.recipe, start=trace.start, days=trace.days, seed=seed
    )


def grid_of(trace: Trace, zone: str, signal: str, forecast: str = "perfect") -> CarbonTrace:
    """Return the grid from the day before the trace to some days after it, where the data reach."""
    whole = read_carbon(zone, signal=signal)
    begin_s = utc_s(trace.start, "start")
    days = min(trace.days + trace.tail_days, (whole.curve.end_s - begin_s) / 86_400.0)
    return read_carbon(zone, start=trace.start, days=days, signal=signal, forecast=forecast)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Return one simulation's inputs and figures, as JSON values; see ``run_cells``."""
    return run_cells([cell])[0]


def run_cells(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the inputs and figures of cells that differ only in zone and signal, from one simulation.

    Policies that do not scale jobs run them at the sizes their users asked for.

    Raises:
        PolicyConfigError: no such policy, or bad parameters.
    """
    first = cells[0]
    build_policy(first.choice.policy, first.choice.params)
    workload = workload_of(first.trace, first.seed)
    grids = [grid_of(cell.trace, cell.zone, cell.signal, cell.forecast) for cell in cells]
    named = first.engine_options.get("predictor", "perfect")
    workload = predicted(named, workload)
    predictor = None
    if named in PREDICTORS:
        predictor = learning(PREDICTORS[named](first.seed), first.engine_options.get("retrain_s", RETRAIN_S))
    options = options_of(first)
    began = time.perf_counter()
    cluster, parameters = ClusterSpec.parse(first.cluster), first.choice.params
    result = simulate(
        first.choice.policy, workload, cluster, grids[0], parameters=parameters, options=options, predictor=predictor
    )
    wall_s = round(time.perf_counter() - began, 3)
    return [
        {
            "inputs": asdict(cell),
            "summary": {**own.summary(), "wall_s": wall_s},
            "sizes": by_size(own, workload),
            "jct_s": packed_s(own.columns.jct_s),
            "series": thinned(own),
            "predictions": prediction_errors(own, workload),
            "notes": [*workload.notes, *grid.notes],
        }
        for cell, grid in zip(cells, grids, strict=True)
        for own in [result if cell is first else on_grid(result, grid)]
    ]


def options_of(cell: Cell) -> EngineOptions:
    """Return the options of a cell's run: policies that do not scale jobs run them at the sizes users asked for."""
    rigid = not policy_entry(cell.choice.policy).elastic and "gang" not in cell.choice.params
    given = {name: value for name, value in cell.engine_options.items() if name not in ("predictor", "retrain_s")}
    return LabOptions(**{"rigid": rigid, **given})


def on_grid(result: SimulationResult, trace: CarbonTrace) -> SimulationResult:
    """Return what a run would have emitted on another grid, had its schedule been the same.

    Power is assumed constant between two rows of the run's series; emissions of single jobs are not recalculated.
    """
    grid, series = Grid(trace, 1.0, 1.0), result.series
    end_s = float(np.nanmax(result.columns.ended_s, initial=series.times_s[-1]))
    times = np.append(series.times_s, end_s)
    energy_j = np.append(series.energy_j, result.energy_kwh * J_PER_KWH)
    idle_j = np.append(np.cumsum(series.idle_power_w * np.diff(series.times_s, prepend=times[0])), 0.0)
    idle_j[-1] = result.idle_energy_kwh * J_PER_KWH
    mean = np.diff([grid.integral(time_s) for time_s in times.tolist()]) / np.maximum(np.diff(times), 1e-9)
    carbon, idle = (np.append(0.0, np.cumsum(np.diff(each) * mean)) / J_PER_KWH for each in (energy_j, idle_j))
    intensity = np.array([grid.at(time_s) for time_s in series.times_s.tolist()])
    return replace(
        result,
        zone=trace.zone,
        signal=trace.signal.value,
        carbon_kg=float(carbon[-1]) / 1_000.0,
        idle_carbon_kg=float(idle[-1]) / 1_000.0,
        series=replace(series, carbon_gco2=carbon[:-1], intensity_gco2_per_kwh=intensity),
    )


def by_size(result: SimulationResult, workload: Workload) -> list[dict[str, Any]]:
    """Return mean and 99th percentile of completion times by category of a job's work, seconds."""
    category = np.digitize(workload.work_s, EDGES_S)
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(SIZES):
        jct_s = result.columns.jct_s[(category == index) & np.isfinite(result.columns.ended_s)]
        mean, tail = (float(jct_s.mean()), float(np.percentile(jct_s, 99))) if jct_s.size else (None, None)
        rows.append({"size": name, "jobs": int((category == index).sum()), "avg_jct_s": mean, "p99_jct_s": tail})
    return rows


def packed_s(times_s: Floats) -> str:
    """Return times as a text that JSON takes: whole seconds, rounded up, packed; NaN is kept."""
    whole = np.where(np.isnan(times_s), -1, np.ceil(times_s)).astype("<i4")
    return b64encode(zlib.compress(whole.tobytes(), 9)).decode()


def unpacked_s(text: str) -> Floats:
    """Return the times that ``packed_s`` made the text of."""
    whole = np.frombuffer(zlib.decompress(b64decode(text)), dtype="<i4").astype(np.float64)
    return np.where(whole < 0, np.nan, whole)


def prediction_errors(result: SimulationResult, workload: Workload) -> dict[str, float]:
    """Return the errors of the predictions that policies saw, in iterations."""
    units = np.array([profile.iteration_s for profile in workload.profiles])[workload.profile]
    predicted = np.nan_to_num(result.columns.predicted_work_s) / units
    return asdict(evaluate(Predictions(predicted, np.zeros_like(predicted), predicted > 0), workload.work_s / units))


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
