"""PowerFlow's day as tables: ``python -m services.simulator.report.powerflow_day PAGE RESULTS``.

RESULTS is a folder with what ``wattshift simulate experiment`` left of powerflow-day (and, where it was run, of
powerflow-profiled), each in a folder of that name. In PAGE, what stands between ``<!-- powerflow-day -->`` (or
``<!-- fitted -->``) and ``<!-- end -->`` is made anew; the text around it is by hand.

Equal energy: a baseline's point is set against PowerFlow's curve of average completion time over energy, linear between
its points; a point beyond its greatest energy is set against the point of greatest energy, and says so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAPER = {"gandiva": 3.39, "las": 1.73, "gandiva+zeus": 2.90, "zeus+las": 1.62, "afs": 1.57}
"""Section 6.2: how many times shorter PowerFlow's average completion time is at most, at equal energy."""
HEAD = (
    "",
    "energy",
    "of it idle",
    "peak",
    "mean JCT",
    "p99 JCT",
    "stops",
    "PowerFlow at that energy",
    "at most, paper",
)
OURS = "powerflow"


def cells_of(folder: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (label, policy, summary) of every cell in a results folder, by energy within a policy."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((folder / "cells").glob("*.json"))]
    rows = [(each["inputs"]["choice"]["label"], each["inputs"]["choice"]["policy"], each["summary"]) for each in found]
    return sorted(rows, key=lambda row: (row[1] == OURS, row[1], row[2]["energy_kwh"]))


def table(results: Path) -> str:
    """Return the table of the day as Markdown."""
    cells = cells_of(results / "powerflow-day")
    curve = sorted((each["energy_kwh"], each["avg_jct_s"]) for _, policy, each in cells if policy == OURS)
    energy_kwh, jct_s = np.array(curve, dtype=np.float64).T
    lines = ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
    for label, policy, each in cells:
        ratio = ""
        if policy != OURS:
            beyond = each["energy_kwh"] > energy_kwh[-1]
            times = each["avg_jct_s"] / float(np.interp(each["energy_kwh"], energy_kwh, jct_s))
            ratio = f"{times:.2f} x" + (f" (at {energy_kwh[-1]:,.0f} kWh)" if beyond else "")
        paper = f"{PAPER[label]:.2f} x" if label in PAPER else ""
        figures = (
            label,
            f"{each['energy_kwh']:,.0f} kWh",
            f"{each['idle_energy_kwh']:,.0f} kWh",
            f"{each['peak_power_w'] / 1000:.1f} kW",
            f"{each['avg_jct_s'] / 60:.1f} min",
            f"{each['p99_jct_s'] / 3600:.1f} h",
            f"{each['preemptions']:,}",
            ratio,
            paper,
        )
        lines.append("| " + " | ".join(figures) + " |")
    return "\n".join(lines)


def fitted_table(results: Path) -> str:
    """Return the table of fitted against profiled as Markdown."""
    fitted = {label: each for label, _, each in cells_of(results / "powerflow-day")}
    lines = ["| fitted against profiled | energy | mean JCT |", "|---|---:|---:|"]
    for label, _, each in cells_of(results / "powerflow-profiled"):
        if label in fitted:
            shares = (fitted[label][key] / each[key] - 1 for key in ("energy_kwh", "avg_jct_s"))
            lines.append(f"| {label} | " + " | ".join(f"{100 * share:+.1f} %" for share in shares) + " |")
    return "\n".join(lines)


def filled(page: str, mark: str, text: str) -> str:
    """Return a page with what stands between ``<!-- mark -->`` and the next ``<!-- end -->`` made anew."""
    made = f"<!-- {mark} -->\n\n{text}\n\n<!-- end -->"
    return re.sub(rf"<!-- {re.escape(mark)} -->\n.*?<!-- end -->", lambda _: made, page, flags=re.DOTALL)


def main() -> None:
    """Fill the page."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    text = filled(page.read_text(encoding="utf-8"), "powerflow-day", table(results))
    if (results / "powerflow-profiled").is_dir():
        text = filled(text, "fitted", fitted_table(results))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
