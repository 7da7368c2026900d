"""The report of a period as one HTML file: no script, nothing fetched, to be read, signed and handed on."""

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any

from services.cli import output
from services.cli.reports.charts import STYLE, bars
from services.cli.reports.figures import Report, amounts, change, share, sums, title
from services.core.domain.units import J_PER_KWH
from services.kit.release import RELEASE

OTHERS = ("day", "project", "user", "zone", "model")  #: What the page is made of, besides the jobs

HEAD = ("jobs", "energy", "location-based", "market-based", "embodied", "baseline", "to baseline")
MOST_LINES = 25  #: Longer lists end with the sum of the rest; the CSV has all
MOST_BARS = 31
NO_CHECKSUM = "0" * 64
CHECKSUM = re.compile(r'(<code id="checksum">)([0-9a-f]{64})(</code>)')

LOOK = """
body{max-width:1040px}h1{margin-bottom:.2rem}.meta{margin:0;font-size:13px;color:#555}
code{overflow-wrap:anywhere}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.cards div{flex:1 1 8.5rem;border:1px solid #ccc;border-radius:6px;padding:.6rem .8rem}
.cards b{display:block;font-size:1.25rem}.cards span{font-size:12px;color:#555}
figure{margin:0 0 1rem}table{margin-bottom:1rem;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:7rem}
th{vertical-align:bottom}tr.sum td{font-weight:600;border-top:1px solid #999}
table.sign td{height:2.8rem;vertical-align:bottom;text-align:left;border-bottom:1px solid #777}
@media screen and (prefers-color-scheme:dark){
:root{color-scheme:dark}body{background:#15181c;color:#e4e6e9}h2,td,th,.cards div{border-color:#3a4048}
.meta,.note,.unit,.cards span{color:#aab2bb}svg text{fill:#c6ccd3}svg path{stroke:#4a515a}}
@media screen and (max-width:900px){table{font-size:11px}td,th{padding:.2rem .3rem}th{white-space:normal}}
@page{size:A4;margin:15mm 13mm}
@media print{body{margin:0;max-width:none;font-size:12px;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.wide{overflow:visible}table{font-size:10.5px}td,th{padding:.15rem .3rem}h2{break-after:avoid;margin-top:1.4rem}
td:first-child{min-width:11rem}th{white-space:normal}tr,figure,.cards,.sign{break-inside:avoid}thead{display:table-header-group}}
"""


def render(whole: Report, made_at: datetime, more: Report | None = None) -> str:
    """Return the page.

    Args:
        whole: The report of a period by job, and also by each of ``OTHERS``.
        more: The same by two dimensions at once, if a table of these is wanted.
    """
    reports = {table["group_by"]: {**whole, "lines": table["lines"]} for table in whole["also"]}
    name = f"Energy and emissions of GPU work, {_period(whole)}"
    parts = [("Summary", _cards(whole) + _summary(whole))] if _has_energy(whole) else [("Summary", NOTHING)]
    if _has_energy(whole):
        parts += [
            ("Day by day", _days(reports["day"])),
            ("By project", _table("project", reports["project"])),
            ("By user", _table("user", reports["user"])),
            ("By grid zone", _table("zone", reports["zone"]) + _intensities(reports["zone"])),
            ("By GPU model", _table("model", reports["model"])),
            *([] if more is None else [(f"By {_both(more)}", _table(_both(more), more))]),
            ("The jobs that emitted most", _jobs(whole)),
            ("Emissions per unit of work (SCI)", _units(whole)),
            ("Data quality", _quality(whole)),
        ]
    parts += [("Method", METHOD), ("Sign-off", SIGN_OFF)]
    body = [f"<h1>{escape(name)}</h1>", _meta(whole, made_at)]
    for heading, content in parts:
        body.append(f"<section><h2>{escape(heading)}</h2>{content}</section>")
    return _sealed(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}{LOOK}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _sealed(page: str) -> str:
    return CHECKSUM.sub(rf"\g<1>{_checksum(page)}\g<3>", page)


def _checksum(page: str) -> str:
    """Return the SHA-256 of a page, with zeros in place of its checksum."""
    return hashlib.sha256(CHECKSUM.sub(rf"\g<1>{NO_CHECKSUM}\g<3>", page).encode()).hexdigest()


def checksum_of(page: str) -> str | None:
    """Return the checksum that a page states if the page is unchanged; None if it was changed, or states none."""
    stated = CHECKSUM.search(page)
    return stated[2] if stated and stated[2] == _checksum(page) else None


NOTHING = "<p>No energy was recorded in this period.</p>"

METHOD = """
<p>Scope 2, GHG Protocol: <b>location-based</b> emissions are metered energy times PUE times the carbon intensity of
the node's grid zone at the time of use; <b>market-based</b> emissions use the stated factor of the zone's contracts
instead. <b>Embodied</b> emissions (scope 3) are the GPUs' stated embodied emissions times the share of their expected
life in which they were reserved. The <b>baseline</b> is the same energy at the mean intensity of its zone in the
period: it shows what the choice of hours did, and nothing else. Energy that power limits, other gang sizes or
sleeping nodes saved is not in it, so that the difference never counts a saving twice; a positive difference means
that the hours were dirtier than the mean. <b>SCI</b> = (operational + embodied) / unit of work, ISO/IEC 21031, for
jobs that succeeded wholly in the period. What is not known is shown as unknown; no default stands in for it. The
method, its boundary and its inputs are described in docs/method.md of the release that made this page.</p>
"""

SIGN_OFF = f"""
<p>The figures come from the ledger of metered energy. <code>wattshift report --check FILE</code> confirms that this
page is as it was made.</p><p class="note">SHA-256 of this page: <code id="checksum">{NO_CHECKSUM}</code></p>
<table class="sign">
<tr><td>Organisation</td><td></td><td></td></tr>
<tr><td>Prepared by</td><td>Signature</td><td>Date</td></tr>
<tr><td>Reviewed by</td><td>Signature</td><td>Date</td></tr></table>
"""


def _both(found: Report) -> str:
    return f"{found['group_by']} and {found['then_by']}"


def _has_energy(found: Report) -> bool:
    return bool(found["total"]["energy_j"])


def _period(found: Report) -> str:
    start, end = output.instant(found["start_at"]), datetime.fromisoformat(found["end_at"])
    if start and start.day == end.day == 1 and (end - start).days in (28, 29, 30, 31):
        return f"{start:%B %Y}"
    first = f"from {start:%Y-%m-%d %H:%M} UTC" if start else "from the first record"
    return f"{first} to {end:%Y-%m-%d %H:%M} UTC"


def _meta(found: Report, made_at: datetime) -> str:
    start, end = output.instant(found["start_at"]), datetime.fromisoformat(found["end_at"])
    first = f"{start:%Y-%m-%d %H:%M}" if start else "the first record"
    last = f"{end:%Y-%m-%d %H:%M:%S}"
    signals = ", ".join(signal.replace("_", " ") for signal in found.get("signals", []))
    facts = [f"Period: {first} to {last} UTC.", f"Made {made_at:%Y-%m-%d %H:%M} UTC by Wattshift {RELEASE}."]
    if made_at < end + timedelta(hours=1):
        facts.append("All tables are of that moment; what nodes report late may still be added to the period.")
    if signals:
        facts.append(f"Carbon intensity: {signals}.")
    return f'<p class="meta">{escape(" ".join(facts))}</p>'


def _cards(found: Report) -> str:
    total, accounts = found["total"], found["total_accounts"]
    cards = (
        (output.energy(accounts["facility_energy_j"]), "energy with PUE"),
        (output.carbon(total["carbon_gco2"]), "CO2, scope 2 by location"),
        (output.emissions([accounts["market_gco2"]])[0], "CO2, scope 2 by market"),
        (output.emissions([accounts["embodied_gco2"]])[0], "CO2e, embodied"),
        (change(total["carbon_gco2"], accounts["baseline_gco2"]), "location-based to baseline"),
    )
    figures = "".join(f"<div><b>{escape(figure)}</b><span>{escape(what)}</span></div>" for figure, what in cards)
    return f'<div class="cards">{figures}</div>'


def _summary(found: Report) -> str:
    total, accounts, idle = found["total"], found["total_accounts"], found["idle"]
    energy, carbon, *_ = amounts([{"footprint": total, "accounts": accounts}])[0]
    rows = [
        ["Energy of GPUs and hosts", energy],
        ["PUE, mean", f"{accounts['facility_energy_j'] / total['energy_j']:.3g}"],
        ["Energy with PUE", output.energy(accounts["facility_energy_j"])],
        ["Scope 2, location-based", carbon],
        ["Scope 2, market-based", output.emissions([accounts["market_gco2"]])[0]],
        ["Embodied, share of the period", output.emissions([accounts["embodied_gco2"]])[0]],
        ["Baseline: the same energy at mean intensity", output.emissions([accounts["baseline_gco2"]])[0]],
        ["Location-based to baseline", change(total["carbon_gco2"], accounts["baseline_gco2"])],
        ["Idle share of the energy", share(idle["energy_j"], total["energy_j"])],
        ["Estimated share of the energy", share(total["estimated_energy_j"], total["energy_j"])],
        ["Estimated share of the emissions", share(accounts["estimated_gco2"], total["carbon_gco2"])],
    ]
    return _html_table(["", "total"], rows)


def _days(found: Report) -> str:
    days = found["lines"][-MOST_BARS:]
    if not any(line["footprint"]["energy_j"] for line in days):
        return "<p>No job used energy in this period.</p>"
    values = [[line["footprint"]["carbon_gco2"] / 1_000, _kg(line["accounts"]["baseline_gco2"])] for line in days]
    energy = [[line["footprint"]["energy_j"] / J_PER_KWH] for line in days]
    labels = [line["group"][-2:] for line in days]
    cut = f"<p>The last {MOST_BARS} days are drawn.</p>" if len(found["lines"]) > MOST_BARS else ""
    carbon = bars(labels, ["location-based", "baseline"], values)
    charts = (("kgCO2", carbon), ("kWh", bars(labels, ["energy"], energy)))
    return cut + "".join(
        f'<figure><figcaption class="unit">{unit} of jobs per day, idle energy left out</figcaption>{chart}</figure>'
        for unit, chart in charts
    )


def _kg(value: float | None) -> float:
    return float("nan") if value is None else value / 1_000


def _table(by: str, found: Report) -> str:
    return _html_table([by, *HEAD], _rows([*_largest(found), *sums(found, "idle", "total")]), has_sum=True)


def _jobs(found: Report) -> str:
    lines = _largest(found)
    return _html_table(["job", *HEAD], _rows(lines)) if lines else "<p>No job used energy in this period.</p>"


def _rows(lines: Sequence[Report]) -> list[list[str]]:
    return [[title(line), str(line["jobs"]), *cells] for line, cells in zip(lines, amounts(lines), strict=True)]


def _largest(found: Report) -> list[Report]:
    """Return the lines that emitted the most, and one for the rest."""
    lines = sorted(found["lines"], key=lambda line: (-line["footprint"]["carbon_gco2"], line["group"]))
    if rest := lines[MOST_LINES:]:
        footprint = {name: sum(line["footprint"][name] for line in rest) for name in ("carbon_gco2", "energy_j")}
        accounts = {name: _total(rest, name) for name in ("market_gco2", "embodied_gco2", "baseline_gco2")}
        jobs = sum(line["jobs"] for line in rest)
        others = {"group": f"{len(rest)} others", "jobs": jobs, "footprint": footprint, "accounts": accounts}
        return [*lines[:MOST_LINES], others]
    return lines


def _total(lines: Sequence[dict[str, Any]], account: str) -> float | None:
    """Return the sum of an account; None if a part of it is unknown."""
    values = [line["accounts"][account] for line in lines]
    return None if None in values else sum(values)


def _intensities(found: Report) -> str:
    rows = [
        [zone["zone"], _factor(zone["mean_gco2_per_kwh"]), _factor(zone["market_gco2_per_kwh"])]
        for zone in found["zones"]
    ]
    head = ["zone", "mean intensity of the period, gCO2/kWh", "market factor, gCO2/kWh"]
    return _html_table(head, rows)


def _factor(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _units(found: Report) -> str:
    if not found["units"]:
        return "<p>No job succeeded wholly within this period.</p>"
    rows = [
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
    return _html_table(["unit", "amount", "jobs", "operational per unit", "embodied per unit", "SCI"], rows)


def _quality(found: Report) -> str:
    total, metered = found["total"], found["metered_gpu_energy_j"]
    gap = abs(total["gpu_energy_j"] - metered) / metered if metered else 0.0
    missing = found["total_accounts"]["unknown"]
    items = [
        f"GPU energy in the ledger differs by {100 * gap:.4f} % from the devices' own counters "
        f"({output.energy(metered)}).",
        f"{share(total['estimated_energy_j'], total['energy_j'])} of the energy was modelled or configured.",
        f"Unknown inputs: {', '.join(missing)}." if missing else "No input is unknown.",
    ]
    if any("marginal" in signal for signal in found.get("signals", [])):
        items.append("A marginal carbon signal was used: the location-based figure is not one of scope 2.")
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, has_sum: bool = False) -> str:
    """Return a table of text, whose head is repeated on each printed page; with ``has_sum`` the last row is the sum."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    if has_sum:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="sum">')
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
