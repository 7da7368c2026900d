"""Cells compared with the baseline's cell of the same trace, zone, signal and seed.

The change of carbon is split exactly into three causes. With busy and idle energy ``E`` and the mean intensity ``c`` at
which each was drawn (and 0 for the baseline), as shares of the baseline's carbon ``C0``:

- energy: ``(Eb - Eb0) * cb0``: the jobs themselves took more or less energy;
- idle: ``(Ei - Ei0) * ci0``: GPUs stood idle for longer or shorter;
- intensity: ``Eb * (cb - cb0) + Ei * (ci - ci0)``: what was drawn was drawn in other hours.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
FIGURES = (
    "jobs",
    "completed",
    "avg_jct_s",
    "p50_jct_s",
    "p99_jct_s",
    "makespan_s",
    "energy_kwh",
    "carbon_kg",
    "idle_energy_kwh",
    "idle_carbon_kg",
    "peak_power_w",
    "preemptions",
    "rounds",
    "gpu_hours",
    "utilisation",
    "wall_s",
)


@dataclass(frozen=True)
class Compared:
    """A policy against the baseline, over the traces and seeds of one zone and signal: means of the cells' ratios.

    Attributes:
        carbon, energy, avg_jct, p99_jct, peak: Ratios; 1 is the baseline.
        by_energy, by_idle, by_intensity: Change of carbon by cause, shares of the baseline's carbon; they add up.
        cells: How many ratios were averaged.
    """

    label: str
    zone: str
    signal: str
    carbon: float
    energy: float
    avg_jct: float
    p99_jct: float
    peak: float
    by_energy: float
    by_idle: float
    by_intensity: float
    cells: int


def place_of(result: Result) -> tuple[str, str, str, int]:
    """Return trace, zone, signal and seed of a cell."""
    inputs = result["inputs"]
    return inputs["trace"]["label"], inputs["zone"], inputs["signal"], inputs["seed"]


def label_of(result: Result) -> str:
    """Return the label of a cell's policy."""
    return str(result["inputs"]["choice"]["label"])


def baselines(results: Sequence[Result], baseline: str) -> dict[tuple[str, str, str, int], Result]:
    """Return the baseline's cell by place."""
    return {place_of(result): result for result in results if label_of(result) == baseline}


def causes(summary: Result, base: Result) -> tuple[float, float, float]:
    """Return the change of carbon by energy, idling and intensity, as shares of the baseline's carbon."""
    idle, idle0 = summary["idle_energy_kwh"], base["idle_energy_kwh"]
    busy, busy0 = summary["energy_kwh"] - idle, base["energy_kwh"] - idle0
    busy_c0 = _per(base["carbon_kg"] - base["idle_carbon_kg"], busy0)
    idle_c0 = _per(base["idle_carbon_kg"], idle0)
    by_energy, by_idle = (busy - busy0) * busy_c0, (idle - idle0) * idle_c0
    total = summary["carbon_kg"] - base["carbon_kg"]
    carbon0 = base["carbon_kg"]
    return _per(by_energy, carbon0), _per(by_idle, carbon0), _per(total - by_energy - by_idle, carbon0)


def compare(results: Sequence[Result], baseline: str) -> list[Compared]:
    """Return every policy against the baseline per zone and signal, in the order of the results."""
    base = baselines(results, baseline)
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[(label_of(result), *place_of(result)[1:3])].append(result)
    rows: list[Compared] = []
    for (label, zone, signal), cells in groups.items():
        pairs = [(cell["summary"], base[place_of(cell)]["summary"]) for cell in cells if place_of(cell) in base]
        ratios = [
            _mean([_per(one[name], other[name]) for one, other in pairs])
            for name in ("carbon_kg", "energy_kwh", "avg_jct_s", "p99_jct_s", "peak_power_w")
        ]
        split = [_mean(column) for column in zip(*(causes(one, other) for one, other in pairs), strict=True)]
        rows.append(Compared(label, zone, signal, *ratios, *split, cells=len(pairs)))
    return rows


def sizes(results: Sequence[Result], baseline: str) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return per policy and size of jobs: share of jobs, and change of mean and 99th percentile of completion times.

    Changes are relative to the baseline and means over all places.
    """
    base = baselines(results, baseline)
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        label = label_of(result)
        if label == baseline or place_of(result) not in base:
            continue
        total = sum(row["jobs"] for row in result["sizes"])
        for row, other in zip(result["sizes"], base[place_of(result)]["sizes"], strict=True):
            if row["avg_jct_s"] is not None and other["avg_jct_s"]:
                mean, tail = row["avg_jct_s"] / other["avg_jct_s"] - 1, row["p99_jct_s"] / other["p99_jct_s"] - 1
                found[label][row["size"]].append((row["jobs"] / total, mean, tail))
    return {
        label: [(size, *map(_mean, zip(*values, strict=True))) for size, values in by_size.items()]  # type: ignore[misc]
        for label, by_size in found.items()
    }


def write_csv(file: Path, results: Iterable[Result]) -> None:
    """Write one row per cell with all of its figures."""
    with file.open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["policy", "trace", "zone", "signal", "seed", *FIGURES])
        for result in results:
            out.writerow([label_of(result), *place_of(result), *(result["summary"][name] for name in FIGURES)])


def _per(amount: float | None, base: float | None) -> float:
    return amount / base if amount is not None and base else math.nan


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan
