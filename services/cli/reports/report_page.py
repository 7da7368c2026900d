"""The report of a period as one HTML file: no script, nothing fetched, to be read, signed and handed on."""

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from services.cli import output
from services.cli.reports.charts import bars
from services.cli.reports.figures import Report, amounts, change, share, sums, title
from services.core.domain.units import J_PER_KWH
from services.kit.release import RELEASE

OTHERS = ("day", "project", "user", "zone", "model")  #: What the page is made of, besides the jobs

MOST_LINES = 25  #: Longer lists end with the sum of the rest; the CSV has all
MOST_BARS = 31
NO_CHECKSUM = "0" * 64
CHECKSUM = re.compile(r'(<code id="checksum">)([0-9a-f]{64})(</code>)')


def render(whole: Report, made_at: datetime, more: Report | None = None) -> str:
    """Return the page.

    Args:
        whole: The report of a period by job, and also by each of ``OTHERS``.
        more: The same by two dimensions at once, if a table of these is wanted.
    """
    by = {table["group_by"]: {**whole, "lines": table["lines"]} for table in whole["also"]}
    start, end = output.instant(whole["start_at"]), datetime.fromisoformat(whole["end_at"])
    energy, location_based, *_ = amounts([{"footprint": whole["total"], "accounts": whole["total_accounts"]}])[0]
    page = (
        _templates()
        .get_template("report.html")
        .render(
            name=f"Energy and emissions of GPU work, {_period(start, end)}",
            first=f"{start:%Y-%m-%d %H:%M}" if start else "the first record",
            last=f"{end:%Y-%m-%d %H:%M:%S}",
            made_at=made_at,
            is_early=made_at < end + timedelta(hours=1),
            release=RELEASE,
            signals=whole.get("signals", []),
            whole=whole,
            by=by,
            more=more,
            energy=energy,
            location_based=location_based,
            charts=_charts(by["day"]["lines"][-MOST_BARS:]),
            days=MOST_BARS,
        )
    )
    return CHECKSUM.sub(rf"\g<1>{_checksum(page)}\g<3>", page)


def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "energy": output.energy,
        "carbon": lambda gco2: output.emissions([gco2])[0],
        "change": change,
        "share": share,
        "factor": lambda value: "unknown" if value is None else f"{value:.1f}",
        "rows": lambda found: _rows(_largest(found)),
        "rows_and_sums": lambda found: _rows([*_largest(found), *sums(found, "idle", "total")]),
    }
    return templates


def _checksum(page: str) -> str:
    """Return the SHA-256 of a page, with zeros in place of its checksum."""
    return hashlib.sha256(CHECKSUM.sub(rf"\g<1>{NO_CHECKSUM}\g<3>", page).encode()).hexdigest()


def checksum_of(page: str) -> str | None:
    """Return the checksum that a page states if the page is unchanged; None if it was changed, or states none."""
    stated = CHECKSUM.search(page)
    return stated[2] if stated and stated[2] == _checksum(page) else None


def _period(start: datetime | None, end: datetime) -> str:
    if start and start.day == end.day == 1 and (end - start).days in (28, 29, 30, 31):
        return f"{start:%B %Y}"
    first = f"from {start:%Y-%m-%d %H:%M} UTC" if start else "from the first record"
    return f"{first} to {end:%Y-%m-%d %H:%M} UTC"


def _charts(days: Sequence[Report]) -> dict[str, str]:
    """Return a chart by its unit; none if no job used energy."""
    if not any(line["footprint"]["energy_j"] for line in days):
        return {}
    carbon = [[line["footprint"]["carbon_gco2"] / 1_000, _kg(line["accounts"]["baseline_gco2"])] for line in days]
    energy = [[line["footprint"]["energy_j"] / J_PER_KWH] for line in days]
    labels = [line["group"][-2:] for line in days]
    return {"kgCO2": bars(labels, ["location-based", "baseline"], carbon), "kWh": bars(labels, ["energy"], energy)}


def _kg(value: float | None) -> float:
    return float("nan") if value is None else value / 1_000


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
