"""The tables of ``lab/results/powerflow.md``: ``python -m lab.reproductions.powerflow PAGE DATA``.

DATA is a folder with ``sia`` (siasosp23/artifacts), ``zeus`` (ml-energy/zeus), ``miso`` (socc22-miso), ``h200``
(measured for this project) and ``gavel_throughputs.json.gz`` (stanford-futuredata/gavel), as their sources have them.
In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew for the names of ``TABLES``; the text
around them is by hand. Errors are mean absolute percentage errors on points left out of the fit, a tenth at a time;
"corrected" is with the correction of residuals, which is fitted without the same points.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from lab.fits import judged_capped, judged_energy, judged_throughput
from lab.reproductions.marked import fill
from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.profiles.observations import Observations

Row = dict[str, str]
EPOCH_SAMPLES = 1e5
"""Samples taken for an epoch, whose true number Zeus' tables do not state; percentage errors do not depend on it."""
MIG_SHARE_MHZ = 1_410.0 / 7.0
"""A MIG slice of k sevenths stands for a clock of k of these: it has that share of the board's throughput."""

STAIRS = ("imagenet", "yolov3")
GPUS_PACKED = ("k80", "p100", "v100")
GAVEL_JOB = re.compile(r"\('(.*) \(batch size (\d+)\)', (\d+)\)")


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a CSV."""
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Return rows by the values of these columns, in order of appearance."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Return a column as numbers."""
    return [float(row[name]) for row in rows]


def sia_tables(data: Path) -> Iterator[tuple[str, str, Observations]]:
    """Yield model, cluster and step times over GPUs, nodes and batch; no clocks, no energy."""
    for folder in sorted((data / "sia").iterdir()):
        for file in sorted(folder.glob("placements-*.csv")):
            tag = file.stem.removeprefix("placements-")
            placed, scaled = rows_of(file), rows_of(folder / f"scalability-{tag}.csv")
            points = Observations.of(
                numbers(placed + scaled, "step_time"),
                gpus=[float(sum(map(int, row["placement"]))) for row in placed] + numbers(scaled, "num_replicas"),
                nodes=[float(len(row["placement"])) for row in placed] + numbers(scaled, "num_nodes"),
                local_batch=numbers(placed + scaled, "local_bsz"),
            )
            yield folder.name, tag, points


def sia(data: Path) -> str:
    """Return step time by model and cluster, in the paper's form."""
    lines = ["| model | cluster | configurations | GPUs | nodes | time |", "|---|---|---:|---:|---:|---:|"]
    for model, tag, points in sia_tables(data):
        fit, judged = judged_throughput(points)
        count = fit.quality.configurations
        lines.append(
            f"| {model} | {tag} | {count} | 1-{points.gpus.max():.0f} | 1-{points.nodes.max():.0f} | "
            f"{_share(judged.held_out_mape)} |"
        )
    return "\n".join(lines)


def stairs(data: Path) -> str:
    """Return the same of the models whose steps are stairs, with the correction beside it."""
    lines = ["| model | cluster | time | time, corrected |", "|---|---|---:|---:|"]
    for model, tag, points in sia_tables(data):
        if model in STAIRS:
            _, judged = judged_throughput(points, residuals=True)
            lines.append(f"| {model} | {tag} | {_share(judged.form_mape)} | {_share(judged.held_out_mape)} |")
    return "\n".join(lines)


def zeus(data: Path) -> str:
    """Return time and energy over batch and power limit, in the paper's form and in ours, which is then corrected."""
    head = ["workload", "board", "configurations"]
    head += [f"{what}, {form}" for what in ("time", "energy") for form in ("paper's form", "capped", "corrected")]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * 7]
    for board in ("v100", "p100"):
        tables = grouped(rows_of(data / "zeus" / f"summary_power_{board}.csv"), "dataset", "network", "optimizer")
        for (dataset, network, optimizer), rows in tables.items():
            pairs = zip(numbers(rows, "time_per_epoch"), numbers(rows, "batch_size"), strict=True)
            points = Observations.of(
                [epoch_s * batch / EPOCH_SAMPLES for epoch_s, batch in pairs],
                local_batch=numbers(rows, "batch_size"),
                control=numbers(rows, "power_limit"),
                mean_power_w=numbers(rows, "average_power"),
                axis=ControlKind.POWER_LIMIT,
            )
            (fit, time), (_, energy) = judged_throughput(points), judged_energy(points)
            _, capped_time, capped_energy = judged_capped(points, residuals=True)
            found = [
                share
                for paper, ours in ((time, capped_time), (energy, capped_energy))
                for share in (paper.held_out_mape, ours.form_mape, ours.held_out_mape)
            ]
            lines.append(
                f"| {network}, {dataset}, {optimizer} | {board.upper()} | {fit.quality.configurations} | "
                + " | ".join(map(_share, found))
                + " |"
            )
    return "\n".join(lines)


def h200(data: Path) -> str:
    """Return time and energy over the batch alone; in sample too, for there are few points."""
    lines = [
        "| model | precision | configurations | time | in sample | energy | in sample |",
        "|---|---|" + "---:|" * 5,
    ]
    rows = [row for row in rows_of(data / "h200" / "training.csv") if row["seconds_per_iteration"]]
    for (model, precision), own in grouped(rows, "model", "precision").items():
        points = Observations.of(
            numbers(own, "seconds_per_iteration"),
            local_batch=numbers(own, "batch_size"),
            energy_j_per_iteration=numbers(own, "energy_j_per_iteration"),
        )
        (fit, time), (_, energy) = judged_throughput(points), judged_energy(points)
        figures = [time.held_out_mape, time.mape, energy.held_out_mape, energy.mape]
        lines.append(
            f"| {model} | {precision} | {fit.quality.configurations} | " + " | ".join(map(_share, figures)) + " |"
        )
    return "\n".join(lines)


def miso(data: Path) -> str:
    """Return time over batch and slice (its share for the clock), and energy over batch on whole boards."""
    head = ["model", "configurations", "time, slices", "corrected", "whole board", "energy"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * 5]
    power = {
        (row["model"], float(row["batch_size"])): float(row["power_w"])
        for row in rows_of(data / "miso" / "a100_power_util.csv")
    }
    for (model,), rows in grouped(rows_of(data / "miso" / "mig_step_time.csv"), "model").items():
        sliced = Observations.of(
            numbers(rows, "step_time_mean_s"),
            local_batch=numbers(rows, "batch_size"),
            control=[MIG_SHARE_MHZ * int(row["mig_slice"][0]) for row in rows],
        )
        whole = [
            row for row in rows if row["mig_slice"].startswith("7g") and (model, float(row["batch_size"])) in power
        ]
        batches = numbers(whole, "batch_size")
        energy = "-"
        if len(whole) > 3:
            points = Observations.of(
                numbers(whole, "step_time_mean_s"),
                local_batch=batches,
                mean_power_w=[power[model, batch] for batch in batches],
            )
            energy = _share(judged_energy(points)[1].held_out_mape)
        fit, judged = judged_throughput(sliced, residuals=True)
        errors = f"{_share(judged.form_mape)} | {_share(judged.held_out_mape)}"
        lines.append(f"| {model} | {fit.quality.configurations} | {errors} | {len(whole)} | {energy} |")
    return "\n".join(lines)


def unseen(data: Path) -> str:
    """Return step time by model and GPU, over GPUs, batch and placement, of tables no form was made with.

    Gavel states steps per second of all GPUs together; a gang that is not consolidated is taken to be on two nodes.
    """
    with gzip.open(data / "gavel_throughputs.json.gz", "rt", encoding="utf-8") as file:
        rates = json.load(file)
    lines = ["| model | GPU | configurations | time | time, corrected |", "|---|---|---:|---:|---:|"]
    for gpu in ("k80", "p100", "v100"):
        tables: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for nodes, table in ((1.0, rates[gpu]), (2.0, rates.get(f"{gpu}_unconsolidated", {}))):
            for key, speeds in table.items():
                named = GAVEL_JOB.fullmatch(key)
                if named is not None and speeds["null"] > 0 and float(named[3]) >= nodes:
                    gpus = float(named[3])
                    tables[named[1]].append((gpus / speeds["null"], gpus, float(named[2]), nodes))
        for model, rows in tables.items():
            step_s, gpus_of, batch, nodes_of = zip(*rows, strict=True)
            points = Observations.of(step_s, gpus=gpus_of, local_batch=batch, nodes=nodes_of)
            fit, judged = judged_throughput(points, residuals=True)
            errors = f"{_share(judged.form_mape)} | {_share(judged.held_out_mape)}"
            lines.append(f"| {model} | {gpu.upper()} | {fit.quality.configurations} | {errors} |")
    return "\n".join(lines)


def packing(data: Path) -> str:
    """Return by GPU what two jobs of one GPU each do together on one, in units of what they do alone.

    The last columns are of the form that simulations use (``core.profiles.sharing``): the cost of sharing that fits
    best, with a busy share fitted to each job, and by how much it is off in what pairs do together.
    """
    with gzip.open(data / "gavel_throughputs.json.gz", "rt", encoding="utf-8") as file:
        rates = json.load(file)
    head = ["GPU", "pairs", "do not fit", "do more than one alone", "median", "10 %", "90 %", "sharing costs", "MAPE"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for gpu in GPUS_PACKED:
        alone = {key: speeds["null"] for key, speeds in rates[gpu].items() if key.endswith(", 1)")}
        keys = list(alone)
        pairs = np.array(
            [
                (at, keys.index(other), mine / alone[one], others / alone[other])
                for at, one in enumerate(keys)
                for other, (mine, others) in ((key, rates[gpu][one][key]) for key in keys if key in rates[gpu][one])
                if one <= other
            ]
        )
        both = pairs[:, 2] + pairs[:, 3]
        fits = both[both > 0]
        low, middle, high = np.quantile(fits, (0.1, 0.5, 0.9)).tolist()
        more, spread = f"{100 * float((fits > 1).mean()):.0f} %", f"{middle:.2f} | {low:.2f} | {high:.2f}"
        cost, error = _sharing(pairs[(pairs[:, 2:] > 0).all(axis=1)], len(keys))
        counted = f"{gpu.upper()} | {both.size} | {both.size - fits.size}"
        lines.append(f"| {counted} | {more} | {spread} | {cost:.2f} | {_share(error)} |")
    return "\n".join(lines)


def _sharing(pairs: Floats, n_jobs: int) -> tuple[float, float]:
    """Return the cost of sharing fitted to pairs, and the mean error of what both do together, a share of it.

    Args:
        pairs: (n_pairs, 4) two jobs, and the speed of each over that alone.
        n_jobs: How many jobs there are.
    """
    one, other, speeds = pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64), pairs[:, 2:]

    def pace(point: Floats) -> Floats:
        return (1.0 - point[-1]) / np.maximum(1.0, point[one] + point[other])

    start = np.r_[np.full(n_jobs, 0.7), 0.05]
    found = least_squares(lambda point: (pace(point)[:, None] - speeds).ravel(), start, bounds=(0, 1), loss="soft_l1")
    together = speeds.sum(axis=1)
    return float(found.x[-1]), float(np.mean(np.abs(2 * pace(found.x) - together) / together))


TABLES: dict[str, Callable[[Path], str]] = {
    "sia": sia,
    "stairs": stairs,
    "zeus": zeus,
    "h200": h200,
    "miso": miso,
    "unseen": unseen,
    "packing": packing,
}


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %"


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    fill(page, {name: partial(table, data) for name, table in TABLES.items()})


if __name__ == "__main__":
    main()
