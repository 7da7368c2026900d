"""Every cell of an experiment, by processes; each result is a file, so that a second run does only what is missing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lab.experiments.bound import ALL_LEVERS, Slack, least_of_run, levers_of, slack_of
from lab.experiments.cell import grid_of, is_grid_blind, options_of, run_cells, unpacked_s, workload_of
from lab.experiments.plan import Cell, Experiment
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.units import S_PER_HOUR
from services.kit.policies import load_policies
from services.simulator.workload import ClusterSpec

Progress = Callable[[int, int, str], None]
"""Called with the number of cells done, of all, and the cell that ended."""
Ended = tuple[list[Cell], BaseException | None]
"""A group, and why its results are not in its folder, if so."""
RunGroups = Callable[[Sequence[list[Cell]], Path], Iterator[Ended]]


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
    write_json(out / "index.json", [[cell.key(), *cell.named] for cell in cells])
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
        blind = is_grid_blind(cell.choice.policy)
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
    """Return the bounds an experiment asks for; each kept in ``out/least``.

    Of the baseline's runs at every slack of ``bound_horizons_h``, and with ``bound_rows`` of all runs at the slack that
    their policies were told to take (``horizon_h`` is then None): each by the policy's own levers, and by all levers.
    """
    folder = out / "least"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for cell, result in zip(experiment.cells(), results, strict=True):
        horizons: list[float | None] = [None] if experiment.bound_rows else []
        if cell.choice.label == experiment.baseline:
            horizons.extend(experiment.bound_horizons_h)
        for horizon_h in horizons:
            file = folder / f"{cell.key()}-{'own' if horizon_h is None else f'{horizon_h:g}h'}.json"
            if not file.exists() and "jct_s" in result:
                write_json(file, _bounds(cell, result, horizon_h))
            if file.exists():
                found.extend(json.loads(file.read_text(encoding="utf-8")))
    return found


def _bounds(cell: Cell, result: dict[str, Any], horizon_h: float | None) -> list[dict[str, Any]]:
    """Return the bounds of a run by its own levers and by all levers."""
    options, choice = options_of(cell), cell.choice
    slack = slack_of(choice.policy, choice.params)
    if horizon_h is not None:
        slack = Slack(horizon_h * S_PER_HOUR if horizon_h else math.inf)
    makespan_s = float(result["summary"]["makespan_s"] or 0.0)
    found: list[dict[str, Any]] = []
    price: Floats | None = None
    for name in ("own", "all"):
        carbon_kg, note, levers = None, "", ALL_LEVERS
        try:
            own = levers_of(choice.policy, choice.params, options, makespan_s)
            levers = own if name == "own" else ALL_LEVERS
            bound = least_of_run(
                workload_of(cell.trace, cell.seed),
                ClusterSpec.parse(cell.cluster),
                grid_of(cell.trace, cell.zone, cell.signal),
                options,
                levers,
                jct_s=unpacked_s(result["jct_s"]),
                makespan_s=makespan_s,
                slack=slack,
                price_gco2=price,
            )
            carbon_kg, price = bound.carbon_gco2 / 1_000.0, bound.price_gco2
        except DomainError as error:
            note = str(error)
        found.append(
            {
                "label": choice.label,
                "trace": cell.trace.label,
                "zone": cell.zone,
                "signal": cell.signal,
                "seed": cell.seed,
                "horizon_h": horizon_h,
                "slack": slack.words,
                "of": name,
                "levers": levers.words,
                "carbon_kg": carbon_kg,
                "note": note,
            }
        )
    return found
