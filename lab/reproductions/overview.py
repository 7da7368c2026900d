"""The page of all results: its pictures and its table of the year, from the figures kept beside the other pages.

python -m lab.reproductions.overview lab/results/README.md
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from lab.report.charts import Dot, dots_picture
from lab.report.markdown import kept_cells
from lab.report.tables import Result
from lab.reproductions.marked import fill

LAS = "Tiresias (LAS)"
YEAR = (("green", "green-year"), ("joint", "joint-year"), ("joint", "joint-year-default"))
"""Pages and their experiments of the same year: jobs, cluster, zones and baseline are equal."""
FIGURES = ("carbon_kg", "energy_kwh", "avg_jct_s", "p99_jct_s")
CLAIM = Dot("GREEN as its paper has it", 1.051, 1 - 0.316)
"""GREEN's year in its paper: -31.6 % carbon at +5.1 % mean JCT, against its Tiresias."""
FARTHEST = 2.0
"""Policies that take longer than this multiple of the baseline's time are in the table alone."""
SAME = 0.005
"""So are those that differ by less than this share from it along both axes: their names would cover each other."""


def year(folder: Path, experiments: Sequence[tuple[str, str]] = YEAR) -> dict[str, dict[str, list[float]]]:
    """Return each policy's figures over those of LAS in the same zone, direct intensity: a list over zones each.

    Args:
        folder: With the pages.
        experiments: Those of one workload, each with its page; by default the year.
    """
    results: list[Result] = []
    for page, experiment in experiments:
        results += kept_cells(experiment, (folder / f"{page}-cells.csv.gz").read_bytes())
    results = [result for result in results if result["inputs"]["signal"] == "direct"]
    base = {one["inputs"]["zone"]: one["summary"] for one in results if one["inputs"]["choice"]["label"] == LAS}
    of: dict[str, dict[str, list[float]]] = defaultdict(lambda: {figure: [] for figure in FIGURES})
    for result in results:
        inputs, summary = result["inputs"], result["summary"]
        if (label := inputs["choice"]["label"]) == LAS:
            continue
        for figure in FIGURES:
            of[label][figure].append(summary[figure] / base[inputs["zone"]][figure])
    return dict(of)


def year_table(of: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the year's policies, least carbon first: changes against LAS, means over zones."""
    lines = ["| policy | zones | carbon | energy | mean JCT | p99 JCT |", "|---|---:|---:|---:|---:|---:|"]
    for label, figures in sorted(of.items(), key=lambda item: fmean(item[1]["carbon_kg"])):
        cells = [f"{100 * (fmean(figures[figure]) - 1):+.1f} %" for figure in FIGURES]
        lines.append(f"| {label} | {len(figures['carbon_kg'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def year_picture(of: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the picture of the year: carbon over completion time, both as multiples of LAS'."""
    points = [Dot(label, fmean(each["avg_jct_s"]), fmean(each["carbon_kg"])) for label, each in of.items()]
    apart = [point for point in points if point.x <= FARTHEST and max(abs(point.x - 1), abs(point.y - 1)) > SAME]
    near = [Dot(LAS, 1.0, 1.0), *apart, CLAIM]
    near.sort(key=lambda point: -point.y)  # names stand below and above their points in turn
    return dots_picture(near, "mean completion time, times that of Tiresias (LAS)", "carbon, times that of the same")


def main(page: Path) -> None:
    """Make the page's table and picture anew."""
    of = year(page.parent)
    fill(page, {"year": lambda: year_table(of)})
    (page.parent / "year.svg").write_text(year_picture(of), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
