"""The page people look at first: one HTML file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from services.simulator.report.charts import Line, bars, lines
from services.simulator.report.tables import Compared, Result, compare, label_of, place_of, sizes

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:820px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
h3{font-size:1rem;margin-bottom:0}
table{border-collapse:collapse;font-size:13px;width:100%}td,th{padding:.2rem .5rem;text-align:right;
border-bottom:1px solid #eee}td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;display:block}.legend{font-size:12px;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.legend i{display:inline-block;width:12px;height:12px;margin-right:5px;vertical-align:middle}
.unit{font-size:12px;color:#666;margin:.4rem 0 0}.note{font-size:13px;color:#555}
"""


def render(name: str, baseline: str, results: Sequence[Result], bounds: Sequence[Result]) -> str:
    """Return the page of an experiment's results."""
    rows = compare(results, baseline)
    body = [f"<h1>{escape(name)}</h1>", _intro(baseline, results)]
    for signal in dict.fromkeys(row.signal for row in rows):
        body += _ratios([row for row in rows if row.signal == signal], signal)
    if bounds:
        body.append(_bounds(bounds, results, baseline))
    body += _over_time(results)
    body.append(_sizes(results, baseline))
    body.append(_notes(results))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _intro(baseline: str, results: Sequence[Result]) -> str:
    inputs = results[0]["inputs"]
    traces = dict.fromkeys(place_of(result)[0] for result in results)
    return (
        f'<p class="note">{len(results)} simulations on {escape(inputs["cluster"])}; traces: '
        f"{escape(', '.join(traces))}. Ratios are taken against {escape(baseline)} on the same trace, zone, signal and "
        "seed, and averaged. Energy and carbon are the whole cluster's, idle GPUs included.</p>"
    )


def _ratios(rows: Sequence[Compared], signal: str) -> list[str]:
    zones = list(dict.fromkeys(row.zone for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    of = {(row.zone, row.label): row for row in rows}

    def values(name: str) -> list[list[float]]:
        return [[float(getattr(of[(zone, label)], name)) for label in labels] for zone in zones]

    parts = [f"<h2>Ratios to the baseline, {escape(signal)} intensity</h2>"]
    for title, name in (("Carbon", "carbon"), ("Mean completion time", "avg_jct"), ("99th percentile", "p99_jct")):
        parts += [f"<h3>{title}</h3>", bars(zones, labels, values(name))]
    head = ["policy, zone", "carbon", "energy", "mean JCT", "p99 JCT", "peak", "by energy", "by idling", "by hours"]
    cells = [
        [
            f"{row.label}, {row.zone}",
            *(f"{value:.3f}" for value in (row.carbon, row.energy, row.avg_jct, row.p99_jct, row.peak)),
            *(f"{100 * value:+.1f} %" for value in (row.by_energy, row.by_idle, row.by_intensity)),
        ]
        for row in rows
    ]
    parts.append(table_html(head, cells))
    return parts


def _bounds(bounds: Sequence[Result], results: Sequence[Result], baseline: str) -> str:
    base = {place_of(result): result["summary"] for result in results if label_of(result) == baseline}
    rows: list[list[str]] = []
    for bound in bounds:
        place = bound["trace"], bound["zone"], bound["signal"], bound["seed"]
        horizon = f"{bound['horizon_h']:g} h" if bound["horizon_h"] else "whole"
        carbon, own = bound["carbon_kg"], base[place]["carbon_kg"]
        figures = ["-", "-"] if carbon is None else [f"{carbon:.2f}", f"{carbon / own:.3f}"]
        rows.append([f"{bound['zone']}, {bound['trace']}, {bound['signal']}", horizon, *figures, bound["status"]])
    head = ["zone, trace, signal", "shifting", "least carbon, kg", "ratio", "status"]
    return "<h2>The least carbon any schedule could have reached</h2>" + table_html(head, rows)


def _over_time(results: Sequence[Result]) -> list[str]:
    """Draw the first trace, signal and seed of every zone."""
    parts = ["<h2>Over time</h2>"]
    trace, _, signal, seed = place_of(results[0])
    for zone in dict.fromkeys(place_of(result)[1] for result in results):
        cells = [result for result in results if place_of(result) == (trace, zone, signal, seed)][:6]
        if not cells:
            continue
        grid = _line(cells[0], "intensity_gco2_per_kwh")
        carbon = [_line(cell, "carbon_gco2", 1e-3) for cell in cells]
        power = [_line(cell, "power_w", 1e-3) for cell in cells]
        last = cells[-1] if len(cells) < 3 else cells[2]
        running = [
            Line(f"{label_of(cell)}: {name}", line.x, line.y)
            for cell in (cells[0], last)
            for name, line in (("high", _line(cell, "running_high")), ("low", _line(cell, "running_low")))
        ]
        behind = f"{signal} intensity, gCO2/kWh"
        parts += [
            f"<h3>{escape(zone)}</h3>",
            lines(carbon, unit="carbon so far, kg", behind=grid, behind_unit=behind),
            lines(power, unit="power, kW", behind=grid, behind_unit=behind),
            lines(
                running, unit="running jobs that draw more, or less, than the median", behind=grid, behind_unit=behind
            ),
        ]
    return parts


def _line(result: Result, name: str, scale: float = 1.0) -> Line:
    series = result["series"]
    times = series["times_s"]
    return Line(label_of(result), [(time - times[0]) / 3600 for time in times], [y * scale for y in series[name]])


def _sizes(results: Sequence[Result], baseline: str) -> str:
    rows = [
        [f"{label}, {size}", f"{100 * share:.0f} %", f"{100 * mean:+.1f} %", f"{100 * tail:+.1f} %"]
        for label, found in sizes(results, baseline).items()
        for size, share, mean, tail in found
    ]
    head = ["policy, size of job", "jobs", "mean JCT", "p99 JCT"]
    return "<h2>Completion time by size of job, against the baseline</h2>" + table_html(head, rows)


def _notes(results: Sequence[Result]) -> str:
    notes = dict.fromkeys(note for result in results for note in result["notes"])
    return "<h2>What went in</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
