"""The page people look at first: one HTML file, no script, nothing fetched.

Means over everything, then zone by zone: the causes of a change of carbon, the curves behind it, which jobs waited for
it, what turning one parameter does, and everything that went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from math import nan

from lab.report.charts import Line, bars, lines, stacks
from lab.report.html import table_html
from lab.report.tables import (
    Result,
    bound_names,
    bound_ratios,
    by_signal,
    by_trace,
    change,
    changes,
    compare,
    fairness,
    label_of,
    place_of,
    sensitivities,
    sizes,
)
from services.cli.reports.charts import STYLE
from services.core.policies.registry import policy_entry
from services.simulator.engine import EngineOptions

HEAD = ["policy", "carbon", "energy", "mean JCT", "p99 JCT", "peak", "by energy", "by idling", "by hours"]
ABSOLUTE = ["trace, zone, signal, seed", "carbon, kg", "energy, kWh", "idle", "mean JCT, h", "p99 JCT, h", "whole, h"]
ABSOLUTE += ["peak, kW", "GPUs held", "stops"]
CAUSES = ("energy the jobs took", "idle GPUs", "hours in which power was drawn")
FAIRNESS = "Jain's index of what waiting tenants had of their shares: 1 is to all alike. Means over all."
HIGHEST = 3.0
"""Bars of completion times are cut at this multiple of the baseline."""
CURVES = 6
"""So many policies are drawn over time."""
BARS = 16
"""So many are drawn by zone and by size of job; the tables have all."""


def render(name: str, baseline: str, results: Sequence[Result], bounds: Sequence[Result]) -> str:
    """Return the page of an experiment's results.

    Args:
        name: Of the experiment.
        baseline: Label of the policy that ratios are taken against.
        results: Cells, the baseline's first in each place.
        bounds: As ``run_bounds`` returns them.
    """
    parts: dict[str, list[str]] = {"In short": _summary(results, bounds, baseline)}
    parts["By zone"] = _zones(results, bounds, baseline)
    if len({place_of(result)[0] for result in results}) > 1:
        parts["By trace"] = _traces(results, baseline)
    parts["Over time"] = _over_time(results, baseline)
    parts["By size of job"] = _sizes(results, baseline)
    turned = _turned(results, baseline)
    if turned:
        parts["Effect of a single parameter"] = turned
    if jain := fairness(results):
        note = f'<p class="note">{escape(FAIRNESS)}</p>'
        rows = [[label, f"{index:.3f}"] for label, index in jain.items()]
        parts["Between tenants"] = [note, table_html(["policy", "Jain"], rows, marked=baseline)]
    if bounds:
        parts["The least carbon any schedule could have reached"] = [_bounds(bounds, results)]
    parts["Inputs"] = _inputs(results)
    ids = {title: f"part{at}" for at, title in enumerate(parts)}
    links = "".join(f'<a href="#{ids[title]}">{escape(title)}</a>' for title in parts)
    body = [f"<h1>{escape(name)}</h1>", _intro(baseline, results), f"<nav>{links}</nav>"]
    for title, content in parts.items():
        body += [f'<h2 id="{ids[title]}">{escape(title)}</h2>', *content]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _intro(baseline: str, results: Sequence[Result]) -> str:
    clusters = dict.fromkeys(str(result["inputs"]["cluster"]) for result in results)
    traces = dict.fromkeys(place_of(result)[0] for result in results)
    seeds = {place_of(result)[3] for result in results}
    unfinished = sum(result["summary"]["jobs"] - result["summary"]["completed"] for result in results)
    warning = f" <b>{unfinished} jobs did not end; their energy is counted, their completion time is not.</b>"
    return (
        f'<p class="note">{len(results)} simulations on {escape(", ".join(clusters))}; traces: '
        f"{escape(', '.join(traces))}; {len(seeds)} seed{'s' if len(seeds) > 1 else ''}. Figures are taken against "
        f"{escape(baseline)} on the same trace, zone, signal and seed, and averaged; less is better everywhere. "
        "± is the standard deviation between seeds. Energy and carbon are the whole cluster's, idle GPUs and their "
        "hosts included, until the policy's own last job ends. JCT: submission to end."
        f"{warning if unfinished else ''}</p>"
    )


def _summary(results: Sequence[Result], bounds: Sequence[Result], baseline: str) -> list[str]:
    """Return, per signal, means over everything, and what the change of carbon came from."""
    parts: list[str] = []
    least = bound_ratios(bounds, results, baseline)
    for signal in _signals(results):
        rows = [row for row in compare(results, baseline, by_signal) if row.signal == signal]
        cells = [[row.label, *changes(row)] for row in rows]
        for key, name in bound_names(least, signal).items():
            ratios = [ratio for found, ratio in least.items() if found[1:] == (signal, *key)]
            cells.append([name, change(sum(ratios) / len(ratios)), *[""] * (len(HEAD) - 2)])
        others = [row for row in rows if row.label != baseline]
        split = [[row.by_energy, row.by_idle, row.by_intensity] for row in others]
        parts += [
            f"<h3>{escape(signal)} intensity, means over all</h3>",
            table_html(HEAD, cells, marked=baseline),
            stacks([row.label for row in others], CAUSES, split, unit="change of carbon by cause") if others else "",
        ]
    return parts


def _zones(results: Sequence[Result], bounds: Sequence[Result], baseline: str) -> list[str]:
    parts: list[str] = []
    least = bound_ratios(bounds, results, baseline)
    for signal in _signals(results):
        rows = [row for row in compare(results, baseline) if row.signal == signal]
        zones = list(dict.fromkeys(row.zone for row in rows))
        labels = list(dict.fromkeys(row.label for row in rows))[:BARS]
        of = {(row.zone, row.label): row for row in rows}
        hours = min((key[2] for key in least if key[1] == signal and key[2]), default=0.0)
        marks = [least.get((zone, signal, hours, "all"), float("nan")) for zone in zones]

        def values(name: str) -> list[list[float]]:
            return [[float(getattr(of[(zone, label)], name)) for label in labels] for zone in zones]  # noqa: B023

        bound = f"least possible, {hours:g} h, all levers" if hours else ""
        parts += [
            f"<h3>{escape(signal)} intensity: carbon, ratio to {escape(baseline)}</h3>",
            bars(zones, labels, values("carbon"), marks=marks if hours else (), mark=bound),
            "<h3>Energy</h3>",
            bars(zones, labels, values("energy")),
            "<h3>Mean completion time</h3>",
            bars(zones, labels, values("avg_jct"), most=HIGHEST),
            "<h3>99th percentile of completion times</h3>",
            bars(zones, labels, values("p99_jct"), most=HIGHEST),
            _folded("figures", HEAD, [[f"{row.label}, {row.zone}", *changes(row)] for row in rows]),
        ]
    parts.append(_folded(f"{baseline} itself", ABSOLUTE, _absolute(results, baseline)))
    return parts


def _absolute(results: Sequence[Result], baseline: str) -> list[list[str]]:
    """Return the baseline's own figures, cell by cell."""
    rows: list[list[str]] = []
    for result in results:
        if label_of(result) != baseline:
            continue
        own = result["summary"]
        hours = [own[name] / 3600 for name in ("avg_jct_s", "p99_jct_s", "makespan_s")]
        share = own["idle_energy_kwh"] / own["energy_kwh"] if own["energy_kwh"] else 0.0
        rows.append(
            [
                ", ".join(map(str, place_of(result))),
                *(f"{value:.2f}" for value in (own["carbon_kg"], own["energy_kwh"])),
                f"{100 * share:.0f} %",
                *(f"{value:.2f}" for value in hours),
                f"{own['peak_power_w'] / 1000:.1f}",
                f"{100 * own['utilisation']:.0f} %",
                str(own["preemptions"]),
            ]
        )
    return rows


def _traces(results: Sequence[Result], baseline: str) -> list[str]:
    rows = compare(results, baseline, by_trace)
    head = ["policy, trace, signal", *HEAD[1:]]
    cells = [[f"{row.label}, {', '.join(row.of)}", *changes(row)] for row in rows if row.label != baseline]
    return [_folded("figures", head, cells)]


def _over_time(results: Sequence[Result], baseline: str) -> list[str]:
    """Draw the first trace, signal and seed of every zone: the baseline, then GREEN's variants, then the others."""
    parts: list[str] = []
    trace, _, signal, seed = place_of(results[0])
    for zone in dict.fromkeys(place_of(result)[1] for result in results):
        cells = [result for result in results if place_of(result) == (trace, zone, signal, seed)]
        cells.sort(key=lambda cell: (label_of(cell) != baseline, cell["inputs"]["choice"]["policy"] != "green"))
        cells = cells[:CURVES]
        if not cells:
            continue
        grid, behind = _line(cells[0], "intensity_gco2_per_kwh"), f"{signal} intensity, gCO2/kWh"
        parts += [
            f"<h3>{escape(zone)}, {escape(trace)}</h3>",
            lines([_line(cell, "carbon_gco2", 1e-3) for cell in cells], "carbon so far, kg", grid, behind),
            lines([_line(cell, "power_w", 1e-3) for cell in cells], "power, kW", grid, behind),
            lines([_line(cell, "queued") for cell in cells], "waiting jobs", grid, behind),
        ]
        for cell in cells[:2]:
            running = [
                Line(name, line.x, line.y)
                for name, line in (
                    ("high power", _line(cell, "running_high")),
                    ("low power", _line(cell, "running_low")),
                )
            ]
            unit = f"{label_of(cell)}: running jobs that draw more, or less, than the median"
            parts.append(lines(running, unit, grid, behind))
    return parts


def _line(result: Result, name: str, scale: float = 1.0) -> Line:
    series = result["series"]
    times = series["times_s"]
    return Line(label_of(result), [(time - times[0]) / 3600 for time in times], [y * scale for y in series[name]])


def _sizes(results: Sequence[Result], baseline: str) -> list[str]:
    found = sizes(results, baseline)
    if not found:
        return []
    named = [size for size, *_ in next(iter(found.values()))]
    of = {(label, size): mean for label, rows in found.items() for size, _, mean, _ in rows}
    groups = [f"{size} ({100 * share:.0f} %)" for size, share, *_ in next(iter(found.values()))]
    drawn = [baseline, *found][:BARS]
    values = [[1.0, *(1 + of.get((label, size), float("nan")) for label in drawn[1:])] for size in named]
    rows = [
        [f"{label}, {size}", f"{100 * share:.0f} %", f"{100 * mean:+.1f} %", f"{100 * tail:+.1f} %"]
        for label, entries in found.items()
        for size, share, mean, tail in entries
    ]
    return [
        f'<p class="unit">mean completion time, ratio to {escape(baseline)}; share of jobs in brackets</p>',
        bars(groups, drawn, values, most=HIGHEST),
        _folded("figures", ["policy, size of job", "jobs", "mean JCT", "p99 JCT"], rows),
    ]


def _turned(results: Sequence[Result], baseline: str) -> list[str]:
    rows, defaults = compare(results, baseline, by_signal), defaults_of(results)
    parts: list[str] = []
    for each in sensitivities(results, defaults):
        default = defaults[(each.policy, each.name)]
        groups = [f"{value:g}{' (default)' if value == default else ''}" for value in each.labels]
        for signal in _signals(results):
            of = {row.label: row for row in rows if row.signal == signal}
            values = [[of[label].carbon, of[label].avg_jct] for label in each.labels.values()]
            parts += [
                f"<h3>{escape(each.policy)}: {escape(each.name)}, {escape(signal)} intensity</h3>",
                bars(groups, ("carbon", "mean completion time"), values, most=HIGHEST),
            ]
    return parts


def defaults_of(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return the default of every numeric parameter and engine option, by policy and name."""
    found: dict[tuple[str, str], float] = {}
    for policy in {str(result["inputs"]["choice"]["policy"]) for result in results}:
        for declared in (*fields(policy_entry(policy).config), *fields(EngineOptions)):
            if isinstance(declared.default, int | float) and not isinstance(declared.default, bool):
                found[(policy, declared.name)] = float(declared.default)
    return found


def _bounds(bounds: Sequence[Result], results: Sequence[Result]) -> str:
    runs = {(label_of(result), *place_of(result)): result["summary"]["carbon_kg"] for result in results}
    rows: list[list[str]] = []
    for bound in bounds:
        place = bound["trace"], bound["zone"], bound["signal"], bound["seed"]
        carbon, own = bound["carbon_kg"], runs[bound["label"], *place]
        figures = ["-", bound["note"]] if carbon is None else [f"{carbon:.2f}", change(own / carbon if carbon else nan)]
        rows.append([bound["label"], ", ".join(map(str, place)), bound["slack"], bound["levers"], *figures])
    head = ["run", "trace, zone, signal, seed", "slack", "levers", "least carbon, kg", "the run is above it by"]
    note = (
        '<p class="note">What no schedule of the same jobs in the same window could have emitted less than, with these '
        "levers and perfect knowledge of lengths and grid, no queues, restarts or half-empty nodes. Every job ends by "
        "its submission, its length and the slack, or when it ended in the run if that was later. Idle power is "
        "charged to the end of the run, unless nodes may sleep.</p>"
    )
    return note + _folded("figures", head, rows)


def _inputs(results: Sequence[Result]) -> list[str]:
    choices = {label_of(result): result["inputs"]["choice"] for result in results}
    rows = [
        [
            label,
            choice["policy"],
            ", ".join(f"{key} = {value}" for key, value in {**choice["params"], **choice["options"]}.items())
            or "defaults",
            str(choice.get("forecast", "perfect")),
        ]
        for label, choice in choices.items()
    ]
    notes = dict.fromkeys(note for result in results for note in result["notes"])
    options = {f"{key} = {value}": None for result in results for key, value in result["inputs"]["options"].items()}
    extra = [f"<li>for all: {escape(', '.join(options))}</li>"] if options else []
    return [
        table_html(["shown as", "policy", "turned", "forecast"], rows),
        "<ul>" + "".join([*extra, *(f"<li>{escape(note)}</li>" for note in notes)]) + "</ul>",
    ]


def _signals(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(place_of(result)[2] for result in results))


def _folded(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{escape(title)}</summary>{table_html(head, rows)}</details>"
