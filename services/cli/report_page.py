"""The report of a period as one HTML file: no script, nothing fetched, to be read, signed and handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from services.cli import output
from services.cli.report import Report, change, grams, share, title
from services.core.domain.units import J_PER_KWH
from services.simulator.report.charts import bars
from services.simulator.report.page import STYLE, table_html

HEAD = ["", "jobs", "energy", "location-based", "market-based", "embodied", "baseline", "to baseline"]
MOST_LINES = 25
"""Longer lists end with the sum of the rest; the CSV has all."""
MOST_BARS = 31

SIGN = (
    "table.sign td{height:2.6rem;vertical-align:bottom;text-align:left;width:33%}"
    "@media print{nav,.noprint{display:none}body{margin:0;max-width:none}}"
)


def render(reports: Mapping[str, Report], made_at: datetime) -> str:
    """Return the page.

    Args:
        reports: The report of one period by day, project, user, zone, model and job.
        made_at: When it was made.
    """
    whole = reports["project"]
    name = f"Energy and emissions of GPU work, {_period(whole)}"
    parts: list[tuple[str, str]] = [
        ("Summary", _summary(whole)),
        ("Day by day", _days(reports["day"])),
        ("By project", _table(reports["project"])),
        ("By user", _table(reports["user"])),
        ("By grid zone", _zones(reports["zone"])),
        ("By GPU model", _table(reports["model"])),
        ("The jobs that emitted most", _table(reports["job"], idle=False)),
        ("Emissions per unit of work (SCI)", _units(whole)),
        ("Data quality", _quality(whole)),
        ("Method", METHOD),
        ("Sign-off", SIGN_OFF),
    ]
    body = [f"<h1>{escape(name)}</h1>", f'<p class="note">Made {made_at:%Y-%m-%d %H:%M} UTC by Wattshift.</p>']
    for heading, content in parts:
        body += [f"<h2>{escape(heading)}</h2>", content]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{STYLE}{SIGN}</style></head><body>{''.join(body)}</body></html>\n"
    )


METHOD = """
<p>Scope 2, GHG Protocol: <b>location-based</b> emissions are metered energy times PUE times the carbon intensity of
the node's grid zone at the time of use; <b>market-based</b> emissions use the stated factor of the zone's contracts
instead. <b>Embodied</b> emissions (scope 3) are the GPUs' stated embodied emissions times the share of their expected
life in which they were reserved. The <b>baseline</b> is the same energy at the mean intensity of its zone in the
period: it shows what the choice of hours did, and nothing else. Energy that power limits, other gang sizes or
sleeping nodes saved is not in it, so that the difference never counts a saving twice; a positive difference means
that the hours were dirtier than the mean. <b>SCI</b> = (operational + embodied) / unit of work, ISO/IEC 21031, for
jobs that succeeded wholly in the period. What is not known is shown as unknown; no default stands in for it. Details:
docs/method.md.</p>
"""

SIGN_OFF = """
<table class="sign"><tr><td>Prepared by</td><td>Signature</td><td>Date</td></tr>
<tr><td>Reviewed by</td><td>Signature</td><td>Date</td></tr></table>
"""


def _period(found: Report) -> str:
    start, end = output.instant(found["start_at"]), output.instant(found["end_at"])
    if start and end and start.day == end.day == 1 and (end - start).days in (28, 29, 30, 31):
        return f"{start:%B %Y}"
    first = f"from {start:%Y-%m-%d %H:%M} UTC" if start else "from the first record"
    return f"{first} to {f'{end:%Y-%m-%d %H:%M} UTC' if end else 'now'}"


def _summary(found: Report) -> str:
    total, accounts, idle = found["total"], found["total_accounts"], found["idle"]
    rows = [
        ["Energy of GPUs and hosts", output.energy(total["energy_j"])],
        ["Energy with PUE", output.energy(accounts["facility_energy_j"])],
        ["Scope 2, location-based", output.carbon(total["carbon_gco2"])],
        ["Scope 2, market-based", grams(accounts["market_gco2"])],
        ["Embodied, share of the period", grams(accounts["embodied_gco2"])],
        ["Baseline: the same energy at mean intensity", grams(accounts["baseline_gco2"])],
        ["Location-based to baseline", change(total["carbon_gco2"], accounts["baseline_gco2"])],
        ["Idle share of the energy", share(idle["energy_j"], total["energy_j"])],
        ["Estimated share of the energy", share(total["estimated_energy_j"], total["energy_j"])],
        ["Estimated share of the emissions", share(accounts["estimated_gco2"], total["carbon_gco2"])],
    ]
    return table_html(["", "total"], rows)


def _days(found: Report) -> str:
    days = found["lines"][-MOST_BARS:]
    if not any(line["footprint"]["carbon_gco2"] for line in days):
        return "<p>No job used energy in this period.</p>"
    values = [[line["footprint"]["carbon_gco2"] / 1_000, _kg(line["accounts"]["baseline_gco2"])] for line in days]
    energy = [[line["footprint"]["energy_j"] / J_PER_KWH] for line in days]
    labels = [line["group"][-2:] for line in days]
    cut = f"<p>The last {MOST_BARS} days are drawn.</p>" if len(found["lines"]) > MOST_BARS else ""
    carbon = bars(labels, ["location-based", "baseline"], values, line=0.0)
    return (
        f'{cut}<p class="unit">kgCO2 of jobs per day</p>{carbon}'
        f'<p class="unit">kWh of jobs per day</p>{bars(labels, ["energy"], energy, line=0.0)}'
    )


def _kg(value: float | None) -> float:
    return float("nan") if value is None else value / 1_000


def _table(found: Report, *, idle: bool = True) -> str:
    lines = sorted(found["lines"], key=lambda line: (-line["footprint"]["carbon_gco2"], line["group"]))
    rows = [_cells(title(line), line) for line in lines[:MOST_LINES]]
    if rest := lines[MOST_LINES:]:
        carbon = sum(line["footprint"]["carbon_gco2"] for line in rest)
        energy = sum(line["footprint"]["energy_j"] for line in rest)
        rows.append([f"{len(rest)} others", "", output.energy(energy), output.carbon(carbon), "", "", "", ""])
    if idle:
        rows.append(_cells("idle", {"jobs": "", "footprint": found["idle"], "accounts": found["idle_accounts"]}))
    return table_html(HEAD, rows)


def _cells(name: str, line: dict[str, Any]) -> list[str]:
    footprint, accounts = line["footprint"], line["accounts"]
    return [
        name,
        str(line["jobs"]),
        output.energy(footprint["energy_j"]),
        output.carbon(footprint["carbon_gco2"]),
        grams(accounts["market_gco2"]),
        grams(accounts["embodied_gco2"]),
        grams(accounts["baseline_gco2"]),
        change(footprint["carbon_gco2"], accounts["baseline_gco2"]),
    ]


def _zones(found: Report) -> str:
    rows = [
        [zone["zone"], _factor(zone["mean_gco2_per_kwh"]), _factor(zone["market_gco2_per_kwh"])]
        for zone in found["zones"]
    ]
    head = ["zone", "mean intensity, gCO2/kWh", "market factor, gCO2/kWh"]
    return _table(found) + table_html(head, rows)


def _factor(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _units(found: Report) -> str:
    if not found["units"]:
        return "<p>No job succeeded wholly within this period.</p>"
    rows: list[Sequence[str]] = [
        [
            unit["unit"],
            f"{unit['amount']:g}",
            str(unit["jobs"]),
            f"{unit['operational_gco2'] / unit['amount']:.4g} g",
            "unknown" if unit["embodied_gco2"] is None else f"{unit['embodied_gco2'] / unit['amount']:.4g} g",
            "unknown" if unit["sci_gco2_per_unit"] is None else f"{unit['sci_gco2_per_unit']:.4g} g",
        ]
        for unit in found["units"]
    ]
    return table_html(["unit", "amount", "jobs", "operational per unit", "embodied per unit", "SCI"], rows)


def _quality(found: Report) -> str:
    total, metered = found["total"], found["metered_gpu_energy_j"]
    gap = abs(total["gpu_energy_j"] - metered) / metered if metered else 0.0
    missing = found["total_accounts"]["unknown"]
    items = [
        f"GPU energy in the ledger differs by {gap:.4%} from the devices' own counters ({output.energy(metered)}).",
        f"{share(total['estimated_energy_j'], total['energy_j'])} of the energy was modelled or configured.",
        f"Unknown inputs: {', '.join(missing)}." if missing else "No input is unknown.",
    ]
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
