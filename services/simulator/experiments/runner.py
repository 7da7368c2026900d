"""Every cell of an experiment, by processes; each result is a file, so that a second run does only what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from services.core.policies.registry import policy_name
from services.core.solvers.model import SolveStatus
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions
from services.simulator.experiments.bound import bound_of
from services.simulator.experiments.cell import GRID_BLIND, grid_of, run_cells, workload_of
from services.simulator.experiments.plan import Cell, Experiment
from services.simulator.workload import ClusterSpec

Progress = Callable[[int, int, str], None]
"""Called with the number of cells done, of all, and the cell that ended."""
Ended = tuple[list[Cell], BaseException | None]
"""A group, and why its results are not in its folder, if so."""
RunGroups = Callable[[Sequence[list[Cell]], Path], Iterator[Ended]]
LARGE = 20_000
"""Jobs from which a bound groups windows by six hours and powers in four tiers."""


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    workers: int = 1,
    elsewhere: RunGroups | None = None,
    report: Progress | None = None,
) -> list[dict[str, Any]]:
    """Run what has no result in ``out/cells`` yet and return every cell's result, in the experiment's order.

    By ``workers`` processes of this machine, or ``elsewhere``. ``out/index.json`` names the cells of this experiment:
    the folder may hold results of an earlier version of it. A cell that fails is reported and leaves no file; the
    others continue, and the first failure is raised at the end.
    """
    folder = out / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    cells = experiment.cells()
    labels = [choice.label for choice in experiment.choices]
    ordered = sorted(cells, key=lambda each: (experiment.signals.index(each.signal), labels.index(each.choice.label)))
    files = {cell.key(): cell for cell in ordered}  # so that a run that is stopped has whole policies
    write_json(out / "index.json", [[cell.key(), cell.choice.label, cell.signal] for cell in cells])
    missing = {key: cell for key, cell in files.items() if not (folder / f"{key}.json").exists()}
    done = len(files) - len(missing)
    failure: BaseException | None = None
    if report is not None:
        report(done, len(files), "")
    if missing:
        run = elsewhere or partial(by_processes, workers=workers)
        for group, error in run(together(missing), folder):
            done += len(group)
            failure = failure or error
            if report is not None:
                report(done, len(files), named(group[0]) + (f": failed: {error}" if error else ""))
    if failure is not None:
        raise failure
    return [json.loads((folder / f"{cell.key()}.json").read_text(encoding="utf-8")) for cell in cells]


def by_processes(groups: Sequence[list[Cell]], folder: Path, *, workers: int) -> Iterator[Ended]:
    """Run groups by processes of this machine."""
    spawn, processes = get_context("spawn"), min(workers, len(groups))
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=load_policies) as executor:
        futures = {
            executor.submit(run_to_files, group, [folder / f"{cell.key()}.json" for cell in group]): group
            for group in groups
        }
        for future in as_completed(futures):
            yield futures[future], future.exception()


def named(cell: Cell) -> str:
    """Return a cell in words."""
    return f"{cell.choice.label}, {cell.trace.label}, {cell.zone}, {cell.signal}, seed {cell.seed}"


def together(missing: Mapping[str, Cell]) -> list[list[Cell]]:
    """Return the cells in groups that one simulation serves: of a policy blind to the grid, those of all grids."""
    groups: dict[str, list[Cell]] = {}
    for key, cell in missing.items():
        blind = policy_name(cell.choice.policy) in GRID_BLIND
        groups.setdefault(replace(cell, zone="", signal="").key() if blind else key, []).append(cell)
    return list(groups.values())


def run_to_files(cells: Sequence[Cell], files: Sequence[Path]) -> None:
    """Run cells that one simulation serves, and put each result in place at once, so that a file is always whole."""
    for file, result in zip(files, run_cells(cells), strict=True):
        write_json(file, result)


def write_json(file: Path, value: object) -> None:
    """Write a file under another name and then rename it."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(file)


def run_bounds(experiment: Experiment, out: Path, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bounds an experiment asks for, to the end of its baseline's run; each kept in ``out/bounds``."""
    folder = out / "bounds"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for cell, result in zip(experiment.cells(), results, strict=True):
        if cell.choice.label != experiment.baseline:
            continue
        for horizon_h in experiment.bound_horizons_h:
            file = folder / f"{cell.key()}-{horizon_h:g}h.json"
            if not file.exists():
                write_json(file, _bound(cell, float(result["summary"]["makespan_s"]), horizon_h))
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return found


def _bound(cell: Cell, makespan_s: float, horizon_h: float) -> dict[str, Any]:
    workload = workload_of(cell.trace, cell.seed)
    large = len(workload) > LARGE
    bound = bound_of(
        workload,
        ClusterSpec.parse(cell.cluster),
        grid_of(cell.trace, cell.zone, cell.signal),
        end_s=float(workload.submitted_s[0]) + makespan_s,
        horizon_s=horizon_h * 3_600.0 if horizon_h else None,
        host_idle_w=float(cell.engine_options.get("host_idle_w", EngineOptions.host_idle_w)),
        bin_s=21_600.0 if large else 3_600.0,
        tiers=4 if large else None,
    )
    solved = bound.status is SolveStatus.OPTIMAL and bound.carbon_gco2 is not None
    return {
        "trace": cell.trace.label,
        "zone": cell.zone,
        "signal": cell.signal,
        "seed": cell.seed,
        "horizon_h": horizon_h,
        "status": bound.status.value,
        "carbon_kg": bound.carbon_gco2 / 1_000.0 if solved and bound.carbon_gco2 is not None else None,
        "energy_kwh": (bound.busy_energy_kwh or 0.0) + (bound.idle_energy_kwh or 0.0) if solved else None,
        "shortfall_gpu_hours": float(bound.shortfall_gpu_hours.sum()),
    }
