"""The tables of ``lab/results/a-srpt.md``: ``python -m lab.reproductions.iteration_times PAGE DATA``.

DATA is a folder of measured profiles: ``vidur/all_reduce_*_dgx.csv.gz`` and ``vidur/send_recv_*_dgx.csv.gz``
(collectives), ``sia/MODEL/placements-TAG.csv`` (training steps by placement) and ``gavel_throughputs.json.gz``
(training speed, consolidated and not). What the sources leave out (how many bytes a model sums, what a network
carries) is one number for each model and cluster, on one server and another across servers: it is fitted on every
other measurement and judged on the rest.

In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced; ``placement`` is filled from
``results/benchmarks/placement.json`` where ``./test --bench placement`` has left it.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.reproductions.marked import fill
from services.core.parallel.graph import JobGraph, Stage, data_parallel
from services.core.parallel.iteration import IterationModel, Network

BENCHMARK = Path(__file__).parents[2] / "results" / "benchmarks" / "placement.json"
HEAVY = 1.5
READINGS = ("as printed", "whole NIC", "constant")
Fit = tuple[str, bool]


@dataclass(frozen=True)
class Measured:
    """One measurement of data-parallel replicas, or of a sender and a receiver.

    Attributes:
        row: Of the table it counts in.
        fitted: Measurements that share a fitted number.
        shares: Replicas on each server.
        size: Bytes summed or sent, or 1 where only ``fitted`` says so.
        computation_s: Of a replica alone; 0 of a collective.
        time_s: All of it.
        server_gpus: Of a server.
        sends: Whether one sends to another, instead of all summing.
    """

    row: str
    fitted: str
    shares: tuple[int, ...]
    size: float
    computation_s: float
    time_s: float
    server_gpus: int
    sends: bool = False

    @property
    def spread(self) -> bool:
        """Whether replicas sit on more than one server."""
        return len(self.shares) > 1

    def unit_s(self, reading: str) -> float:
        """Return the communication time by eq. 5 or 6 at one byte per second."""
        if reading == "constant":
            return self.size
        g = min(self.shares) if reading == "whole NIC" else self.server_gpus
        replicas = sum(self.shares)
        graph, counts = data_parallel(replicas, self.size), np.array([self.shares])
        if self.sends:  # one way: half of what an iteration would send
            graph = JobGraph((Stage(1, output_bytes=self.size / 2), Stage(1)))
            counts = np.eye(2, len(self.shares), dtype=np.int64)
            counts[1, -1] = 1
        return float(IterationModel(graph, Network(1.0, 1.0, g)).time_s(counts))


def collectives(data: Path) -> Iterator[Measured]:
    """Yield Vidur's collectives on DGX nodes, by size."""
    for kind in ("all_reduce", "send_recv"):
        for file in sorted(data.glob(f"vidur/{kind}_*_dgx.csv.gz")):
            gpu = file.name.split("_")[2].upper()
            for row in csv.DictReader(gzip.decompress(file.read_bytes()).decode().splitlines()):
                size, workers, each = float(row["size"]), int(row["num_workers"]), int(row["devices_per_node"])
                scale = "under 1 MB" if size < 1e6 else "1 to 10 MB" if size < 1e7 else "10 MB and more"
                seconds = float(row[f"time_stats.{kind}.median"]) / 1_000
                name = f"{kind.replace('_', '-')}, {gpu}, {scale}"
                yield Measured(name, name, (each,) * (workers // each), size, 0.0, seconds, 8, kind == "send_recv")


def training_steps(data: Path) -> Iterator[Measured]:
    """Yield Sia's training steps by placement; a single replica shows what its batch takes to compute."""
    for file in sorted(data.glob("sia/*/placements-*.csv")):
        model, tag = file.parent.name, file.stem.removeprefix("placements-")
        rows = list(csv.DictReader(file.read_text().splitlines()))
        alone = {row["local_bsz"]: float(row["step_time"]) for row in rows if row["placement"] == "1"}
        widest = max(int(digit) for row in rows for digit in row["placement"])
        for row in rows:
            shares = tuple(map(int, row["placement"]))
            if model != "gpt_pmp" and sum(shares) > 1 and row["local_bsz"] in alone:  # one replica of it is a pipeline
                name = f"training step, {tag}"
                seconds = float(row["step_time"])
                yield Measured(name, f"{model} {tag}", shares, 1.0, alone[row["local_bsz"]], seconds, widest)


def speeds(data: Path) -> Iterator[Measured]:
    """Yield Gavel's training speeds; unconsolidated is read as one GPU on each server."""
    table = json.loads(gzip.decompress((data / "gavel_throughputs.json.gz").read_bytes()))
    for gpu in ("k80", "p100", "v100"):
        for kind in (gpu, f"{gpu}_unconsolidated"):
            for key, entry in table[kind].items():
                found = re.match(r"\('(.*)', (\d+)\)", key)
                assert found is not None
                model, gpus = found[1], int(found[2])
                alone, own = table[gpu].get(f"('{model}', 1)"), float(entry["null"])
                if gpus > 1 and own > 0 and alone is not None and alone["null"] > 0:
                    shares = (gpus,) if kind == gpu else (1,) * gpus
                    name = f"training step, {gpu.upper()} (Gavel)"
                    yield Measured(name, f"{model} {gpu}", shares, 1.0, 1 / alone["null"], gpus / own, 8)


def predicted(measured: Sequence[Measured], reading: str) -> list[float]:
    """Return the time of each measurement, with bandwidths fitted on every other one, s; NaN where there is no fit."""
    ratios: dict[Fit, list[float]] = defaultdict(list)
    units = [each.unit_s(reading) for each in measured]
    seen: dict[Fit, int] = defaultdict(int)
    for each, unit in zip(measured, units, strict=True):
        key = each.fitted, each.spread
        if seen[key] % 2 == 0:
            ratios[key].append(max(each.time_s - each.computation_s, 0.0) / unit)
        seen[key] += 1
    fits = {key: float(np.median(found)) for key, found in ratios.items()}
    return [
        each.computation_s + fits[each.fitted, each.spread] * unit for each, unit in zip(measured, units, strict=True)
    ]


def judged(measured: Sequence[Measured]) -> list[bool]:
    """Return which measurements were not fitted on."""
    seen: dict[Fit, int] = defaultdict(int)
    held_out: list[bool] = []
    for each in measured:
        held_out.append(seen[each.fitted, each.spread] % 2 == 1)
        seen[each.fitted, each.spread] += 1
    return held_out


def errors_table(measured: Sequence[Measured]) -> str:
    """Return the errors by row, on one server and across: median and 90th percentile of |predicted/measured - 1|."""
    head = ["measured", "where", "cases", "waits", *(f"{name}: median (p90)" for name in READINGS)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    held_out, times = np.array(judged(measured)), np.array([each.time_s for each in measured])
    computation = np.array([each.computation_s for each in measured])
    errors = {name: np.abs(np.array(predicted(measured, name)) / times - 1) for name in READINGS}
    for row in dict.fromkeys(each.row for each in measured):
        for spread in (False, True):
            of = held_out & np.array([each.row == row and each.spread == spread for each in measured])
            if not of.any():
                continue
            share = float(np.median(1 - computation[of] / times[of]))
            cells = [
                f"{_percent(np.median(error[of]))} ({_percent(np.percentile(error[of], 90))})"
                for error in errors.values()
            ]
            where = "across servers" if spread else "one server"
            lines.append("| " + " | ".join([row, where, str(int(of.sum())), _percent(share), *cells]) + " |")
    return "\n".join(lines)


def heavy_table(measured: Sequence[Measured]) -> str:
    """Return how often the model recognises communication-heavy jobs: spread over consolidated at least ``HEAVY``."""
    lines = [
        "| | heavy, recognised | heavy, missed | light, taken for heavy | light, recognised |",
        "|---|" + "---:|" * 4,
    ]
    found: dict[tuple[str, str, int], dict[bool, tuple[float, float]]] = defaultdict(dict)
    for each, time_s in zip(measured, predicted(measured, READINGS[0]), strict=True):
        found[each.row, each.fitted, sum(each.shares)][each.spread] = each.time_s, time_s
    for row in dict.fromkeys(each.row for each in measured):
        pairs = [both for key, both in found.items() if key[0] == row and len(both) == 2]
        heavy = [tuple(both[True][at] >= HEAVY * both[False][at] for at in (0, 1)) for both in pairs]
        counts = [heavy.count(each) for each in ((True, True), (True, False), (False, True), (False, False))]
        lines.append(f"| {row} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def placement_table(figures: dict[str, Any]) -> str:
    """Return the benchmark's figures: each method's iteration times beside the optimum, and large jobs."""
    lines = ["| job | method | iteration | above the optimum | at most | found in |", "|---|---|" + "---:|" * 4]
    for job, methods in figures["small"].items():
        for method in ("heavy-edge", "refined", "ilp"):
            row = methods[method]
            cells = [f"{row['iteration_ms_mean']:.1f} ms", _percent(row["above_optimum_of_means"])]
            cells += [_percent(row["above_optimum_max"]), f"{row['solve_ms_median']:.2f} ms"]
            lines.append(f"| {job} | {method} | " + " | ".join(cells) + " |")
    lines += ["", "| 1,024 GPUs on 250 servers | graph | heavy-edge | refined |", "|---|---:|---:|---:|"]
    for job, row in figures["large"].items():
        cells = [f"{row[name]:.1f} ms" for name in ("graph_ms", "heavy-edge_ms", "refined_ms")]
        lines.append(f"| {job} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    """Fill one page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    bodies: dict[str, str] = {}
    for name, read in (("collectives", collectives), ("training-steps", training_steps), ("speeds", speeds)):
        measured = list(read(data))
        bodies[name] = errors_table(measured)
        if name == "speeds":
            bodies["heavy"] = heavy_table(measured)
    if BENCHMARK.is_file():
        bodies["placement"] = placement_table(json.loads(BENCHMARK.read_text(encoding="utf-8")))
    fill(page, {name: partial(str, body) for name, body in bodies.items()})


if __name__ == "__main__":
    main()
