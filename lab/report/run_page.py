"""The page of one ``wattshift simulate training``: figures, curves, and carbon against completion time with the bound.

One HTML file: no script, nothing fetched, in the light or dark of the reader's screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from lab.report.charts import Dot, Line, dots, lines
from lab.report.html import table_html
from services.cli.reports.charts import STYLE
from services.core.accounting.carbon import percent_change
from services.core.domain.arrays import Floats
from services.core.domain.units import S_PER_HOUR
from services.simulator.engine.result import SimulationResult

LOOK = """
:root{color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){
body{background:#15181c;color:#e4e6e9}h2,td,th{border-color:#3a4048}tr.base td{background:#22272e}
.note,.unit{color:#aab2bb}a{color:#8ab4f8}
svg text[fill="#333"]{fill:#c6ccd3}svg [stroke="#333"]{stroke:#c6ccd3}svg [stroke="#ddd"]{stroke:#3a4048}}
@media print{body{margin:0;max-width:none}section{break-inside:avoid}}
"""
MOST_POINTS = 800
"""Longer series are drawn by means over equal numbers of samples."""
HEAD = ["policy", "carbon, kg", "energy, kWh", "idle", "peak, kW", "mean JCT, h", "p99 JCT, h", "stops", "ended"]
NOTE = (
    "The bound is the least carbon of any schedule of this work in which no job ends later than in all of these runs: "
    "by any width, batch and power limit, on nodes that sleep when they are unused, with perfect knowledge and without "
    "queues, restarts or half-empty nodes. "
    "A policy is on the front where no other one here is better in both."
)


@dataclass(frozen=True)
class Bound:
    """The least carbon, kg; None with the reason why it is not known."""

    carbon_kg: float | None
    why_not: str = ""


def render(results: Sequence[SimulationResult], title: str, notes: Sequence[str], command: str, bound: Bound) -> str:
    """Return the page.

    Args:
        results: One per policy, of the same jobs, cluster and grid; the first is what others are compared with.
        title: What was simulated.
        notes: About the jobs and the grid.
        command: That makes the page again.
        bound: On the carbon of all.
    """
    first = results[0]
    longest = max(results, key=lambda result: result.series.times_s.size)
    grid = _line("grid", longest, longest.series.intensity_gco2_per_kwh)
    behind = f"{first.signal.replace('_', ' ')} intensity of {first.zone}, gCO2/kWh"

    def curves(of: str, scale: float, unit: str) -> str:
        return lines(
            [_line(each.policy, each, getattr(each.series, of) * scale) for each in results], unit, grid, behind
        )

    jain = any(each.tenants for each in results)
    rows = [[*_row(each, first), *([f"{each.jain:.3f}" if each.tenants else "-"] if jain else [])] for each in results]
    parts = {
        "Figures": table_html([*HEAD, *(["Jain"] if jain else [])], rows, marked=first.policy),
        "Carbon against completion time": _front(results, bound),
        "Power": curves("power_w", 1e-3, "whole cluster with idle GPUs, kW"),
        "Intensity": lines([grid], behind),
        "Queue": curves("queued", 1.0, "waiting jobs"),
    }
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in parts.items()]
    body.append(f"<h2>Inputs</h2><p><code>{escape(command)}</code></p><ul>{listed}</ul>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}{LOOK}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _row(result: SimulationResult, first: SimulationResult) -> list[str]:
    def compared(own: float, base: float, text: str) -> str:
        return text if result is first or own != own else f"{text} ({percent_change(own, base)})"

    idle = result.idle_energy_kwh / result.energy_kwh if result.energy_kwh else 0.0
    return [
        result.policy,
        compared(result.carbon_kg, first.carbon_kg, f"{result.carbon_kg:.1f}"),
        compared(result.energy_kwh, first.energy_kwh, f"{result.energy_kwh:.0f}"),
        f"{100 * idle:.0f} %",
        f"{result.peak_power_w / 1e3:.1f}",
        compared(result.avg_jct_s, first.avg_jct_s, f"{result.avg_jct_s / S_PER_HOUR:.2f}"),
        compared(result.p99_jct_s, first.p99_jct_s, f"{result.p99_jct_s / S_PER_HOUR:.2f}"),
        str(result.preemptions),
        f"{result.completed} of {result.jobs}",
    ]


def _front(results: Sequence[SimulationResult], bound: Bound) -> str:
    known = [each for each in results if each.completed]
    points = [Dot(each.policy, each.avg_jct_s / S_PER_HOUR, each.carbon_kg) for each in known]
    what = "" if bound.carbon_kg is None else f"bound: {bound.carbon_kg:.1f} kg"
    chart = dots(points, "mean completion time, h", "carbon of the whole cluster, kg", bound.carbon_kg, what)
    missing = f" There is no bound here: {bound.why_not}." if bound.carbon_kg is None else ""
    return f'{chart}<p class="note">{escape(NOTE + missing)}</p>'


def _line(name: str, result: SimulationResult, values: Floats) -> Line:
    times = result.series.times_s
    if not times.size:
        return Line(name, (), ())
    every = -(-times.size // MOST_POINTS)
    starts = np.arange(0, times.size, every)
    means = np.add.reduceat(values, starts) / np.diff(np.append(starts, times.size))
    return Line(name, ((times[starts] - times[0]) / S_PER_HOUR).tolist(), means.tolist())
