"""The tables of ``docs/results``: ``python -m services.simulator.report.markdown PAGE RESULTS``.

RESULTS is a folder with one folder per experiment, as ``wattshift simulate experiment`` leaves them. In PAGE, what
stands between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by the tables of experiment NAME; the text around
them is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from services.simulator.report.tables import Compared, Result, compare, label_of, place_of, sizes

BASELINE = "Tiresias (LAS)"


def load(folder: Path) -> tuple[list[Result], list[Result]]:
    """Return an experiment's cells, by zone and policy, and its bounds."""
    cells, bounds = (
        [json.loads(file.read_text(encoding="utf-8")) for file in sorted((folder / name).glob("*.json"))]
        for name in ("cells", "bounds")
    )
    order = {label: at for at, label in enumerate([BASELINE, *sorted({label_of(cell) for cell in cells})])}
    cells.sort(key=lambda cell: (order[label_of(cell)], *place_of(cell)))
    return cells, bounds


def tables(folder: Path) -> str:
    """Return an experiment's tables: by policy and zone, means over zones, bounds, sizes of jobs."""
    cells, bounds = load(folder)
    if not cells:
        return "\n(no results)\n"
    rows = compare(cells, BASELINE)
    parts: list[str] = []
    for signal in dict.fromkeys(row.signal for row in rows):
        own = [row for row in rows if row.signal == signal and row.label != BASELINE]
        parts.append(f"Against {BASELINE}, {signal} intensity:\n\n{_ratios(own)}")
    parts.append(f"The baseline itself, and the bound:\n\n{_base(cells, bounds)}")
    parts.append(f"Completion time by size of job:\n\n{_sizes(cells)}")
    return "\n" + "\n\n".join(parts) + "\n"


def _ratios(rows: Sequence[Compared]) -> str:
    """Return a row per policy: carbon by zone, then means over the zones of everything."""
    zones = list(dict.fromkeys(row.zone for row in rows))
    figures = ["**carbon**", "energy", "mean JCT", "p99 JCT", "peak", "by energy", "by idling", "by hours"]
    head = ["policy", *(f"carbon {zone}" for zone in zones), *figures]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for label in dict.fromkeys(row.label for row in rows):
        own = {row.zone: row for row in rows if row.label == label}
        cells = [_change(own[zone].carbon) if zone in own else "-" for zone in zones]
        lines.append("| " + " | ".join([label, *cells, *means(list(own.values()))]) + " |")
    return "\n".join(lines)


def means(rows: Sequence[Compared]) -> list[str]:
    """Return changes of carbon, energy, JCT and peak, and the causes, over the rows."""
    ratios = [[getattr(row, name) for row in rows] for name in ("carbon", "energy", "avg_jct", "p99_jct", "peak")]
    split = [[getattr(row, name) for row in rows] for name in ("by_energy", "by_idle", "by_intensity")]
    changes = [_change(sum(values) / len(values)) for values in ratios]
    return [*changes, *(_change(1 + sum(values) / len(values)) for values in split)]


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _base(cells: Sequence[Result], bounds: Sequence[Result]) -> str:
    horizons = sorted({bound["horizon_h"] for bound in bounds}, key=lambda hours: hours or 1e9)
    titles = [f"bound, {hours:g} h" if hours else "bound, whole" for hours in horizons]
    head = ["trace", "zone", "signal", "carbon, kg", "energy, kWh", "idle, kWh", "mean JCT, h", "p99 JCT, h", *titles]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for cell in cells:
        if label_of(cell) != BASELINE:
            continue
        summary, (trace, zone, signal, seed) = cell["summary"], place_of(cell)
        own = [summary["carbon_kg"], summary["energy_kwh"], summary["idle_energy_kwh"]]
        own += [summary["avg_jct_s"] / 3600, summary["p99_jct_s"] / 3600]
        least: list[str] = []
        for hours in horizons:
            found = [
                each
                for each in bounds
                if (each["trace"], each["zone"], each["signal"], each["seed"]) == (trace, zone, signal, seed)
                and each["horizon_h"] == hours
                and each["carbon_kg"] is not None
            ]
            least.append(f"{100 * (found[0]['carbon_kg'] / own[0] - 1):+.1f} %" if found else "-")
        lines.append(f"| {trace} | {zone} | {signal} | " + " | ".join([*(f"{x:.2f}" for x in own), *least]) + " |")
    return "\n".join(lines)


def _sizes(cells: Sequence[Result]) -> str:
    lines = ["| policy | size | jobs | mean JCT | p99 JCT |", "|---|---|---:|---:|---:|"]
    shown = [cell for cell in cells if label_of(cell) == BASELINE or cell["inputs"]["choice"]["policy"] == "green"]
    for label, rows in sizes(shown, BASELINE).items():
        for size, share, mean, tail in rows:
            lines.append(f"| {label} | {size} | {100 * share:.0f} % | {100 * mean:+.1f} % | {100 * tail:+.1f} % |")
    return "\n".join(lines)


def fill(text: str, results: Path) -> str:
    """Return a page with its marked tables made new; those of experiments without results stay."""

    def made(match: re.Match[str]) -> str:
        folder = results / match[1]
        return f"<!-- {match[1]} -->\n{tables(folder)}\n<!-- end -->" if folder.is_dir() else match[0]

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def main() -> None:
    """Fill one page."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
