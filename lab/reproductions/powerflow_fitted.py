"""Fitted against profiled (PowerFlow, Fig. 9): ``python -m lab.reproductions.powerflow_fitted PAGE RESULTS``.

RESULTS is a folder with what ``wattshift lab experiment`` left of powerflow-fitted and powerflow-profiled, each in
a folder of that name. In PAGE, what stands between ``<!-- fitted -->`` and ``<!-- end -->`` is made anew.

Each cell is set against the profiled one of its ``eta`` and seed; and at equal energy against the profiled curve of
average completion time over energy of its seed, linear between its points. Beyond them nothing is said.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.reproductions.marked import fill

HEAD = (
    "fitted models",
    "mean JCT",
    "energy",
    "of it idle",
    "mean JCT at equal energy",
    "stops",
    "time above the limit",
    "at most above",
    "of the stated error",
)
Cell = tuple[str, float, int, dict[str, Any]]
"""Label, eta, seed, and the figures of a simulation."""


def cells_of(folder: Path) -> list[Cell]:
    """Return the cells of a results folder by eta, seed and completion time."""
    found: list[Cell] = []
    for file in (folder / "cells").glob("*.json"):
        cell = json.loads(file.read_text(encoding="utf-8"))
        choice, seed = cell["inputs"]["choice"], cell["inputs"]["seed"]
        found.append((choice["label"], choice["params"]["eta"], seed, cell["summary"]))
    return sorted(found, key=lambda cell: (cell[1], cell[2], cell[3]["avg_jct_s"]))


def table(results: Path) -> str:
    """Return the table as Markdown; cells without a profiled counterpart are left out."""
    profiled = cells_of(results / "powerflow-profiled")
    lines = ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
    for label, eta, seed, each in cells_of(results / "powerflow-fitted"):
        base = next((other for _, *where, other in profiled if where == [eta, seed]), None)
        if base is None:
            continue
        curve = sorted(
            (other["energy_kwh"], other["avg_jct_s"]) for _, _, of_seed, other in profiled if of_seed == seed
        )
        energy_kwh, jct_s = np.array(curve, dtype=np.float64).T
        reached = energy_kwh[0] <= each["energy_kwh"] <= energy_kwh[-1]
        equal_s = float(np.interp(each["energy_kwh"], energy_kwh, jct_s))
        idle_kwh = each["idle_energy_kwh"] - base["idle_energy_kwh"]
        of_error = each["above_limit_of_error"]
        figures = (
            label if seed == 1 else f"{label}, seed {seed}",
            more(each["avg_jct_s"], base["avg_jct_s"]),
            more(each["energy_kwh"], base["energy_kwh"]),
            f"{100 * idle_kwh / base['energy_kwh']:+.1f} %",
            more(each["avg_jct_s"], equal_s) if reached else "",
            more(each["preemptions"], base["preemptions"]),
            f"{100 * each['above_limit_share']:.1f} %",
            f"{100 * each['above_limit_most']:.1f} %",
            "" if of_error is None else f"{100 * of_error:.0f} %",
        )
        lines.append("| " + " | ".join(figures) + " |")
    return "\n".join(lines)


def more(ours: float, theirs: float) -> str:
    """Return by how much ours is above theirs."""
    return f"{100 * (ours / theirs - 1):+.1f} %"


def main() -> None:
    """Fill the page."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    fill(page, {"fitted": partial(table, results)})


if __name__ == "__main__":
    main()
