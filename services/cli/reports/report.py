"""`wattshift report`: energy and emissions of a period, as a table, CSV, JSON, or a page to hand on."""

import io
import json
import math
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, AsJson, CliError
from services.cli.output import console
from services.cli.reports import savings
from services.cli.reports.figures import Report, amounts, share, sums, title
from services.cli.reports.forms import FORMS
from services.cli.values import made, text_of, utc_time
from services.contracts.queries import GroupBy, RequestGroup
from services.kit.text import write_row

PAGE_LINES = 10_000
LATE_S = 60.0  #: How long lines of the ledger come late, usually
GROUPS: tuple[str, ...] = get_args(GroupBy)
REQUEST_GROUPS: tuple[str, ...] = get_args(RequestGroup)
COLUMNS = (
    *("group", "name", "jobs", "gpu_h", "energy_kwh", "estimated_energy_kwh", "facility_energy_kwh"),
    *("location_based_kgco2", "estimated_kgco2", "market_based_kgco2", "embodied_kgco2", "baseline_kgco2", "unknown"),
    *("energy_half_width_kwh", "location_based_half_width_kgco2"),
)


def register(app: typer.Typer) -> None:
    app.command()(report)
    app.command()(verify)


def verify(
    file: Annotated[Path, typer.Argument(help="What `report --lines FILE --seals` wrote.")],
    key: Annotated[str | None, typer.Option(help="The public key that must have signed it, as hexadecimal.")] = None,
) -> None:
    """Check an export of the ledger: every line, total, hash and signature.

    The users' package does it on its own: `python -m wattshift.verify FILE`.
    """
    from wattshift import verify as program

    raise typer.Exit(program.verify(str(file), key=key))


def report(
    by: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(GROUPS)} (project), or two at once, as project,month; of requests one of "
            f"{', '.join(REQUEST_GROUPS)} (model)."
        ),
    ] = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="Sum the requests that the router served, not jobs.")
    ] = False,
    start: Annotated[
        str | None, typer.Option(help="First day or time, ISO 8601; UTC unless it says otherwise.")
    ] = None,
    end: Annotated[str | None, typer.Option(help="The time before which the period ends, ISO 8601.")] = None,
    month: Annotated[str | None, typer.Option(help="A calendar month in UTC, such as 2026-11.")] = None,
    csv_file: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - for the output.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with every account and its plots.")
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write every line of the ledger: .csv, .jsonl or .parquet; - is CSV."),
    ] = None,
    seals: Annotated[
        bool, typer.Option("--seals", help="With --lines: add what `wattshift verify` needs. For operators.")
    ] = False,
    form: Annotated[
        str | None, typer.Option("--as", metavar="FORM", help=f"Print JSON in a form: {', '.join(FORMS)}.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --as: what the ledger cannot know (see `factors`).")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Say whether a page is as --html made it, and do nothing else.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show energy and emissions of a period, with the idle share, the baseline and what is unknown."""
    if check is not None:
        _check(check)
        return
    groups, most = (REQUEST_GROUPS, 1) if requests else (GROUPS, 2)
    named = by.split(",") if by else ["model" if requests else "project"]
    if not {*named} <= {*groups} or not len({*named}) == len(named) <= most:
        two = "" if requests else ", or two of them as in project,month"
        raise CliError(f"--by {by}: must be one of {', '.join(groups)}{two}", EXIT_USAGE)
    by = ",".join(named)
    if sum(given is not None for given in (csv_file, html_file, lines, form)) + as_json > 1:
        raise CliError("give one of --csv, --html, --lines, --as and --json", EXIT_USAGE)
    if form is not None and form not in FORMS:
        raise CliError(f"--as {form}: must be one of {', '.join(FORMS)}", EXIT_USAGE)
    if facts is not None and form is None:
        raise CliError("--facts goes with --as", EXIT_USAGE)
    period = period_of(start, end, month)
    gateway = Gateway()
    if form is not None:
        output.print_json(_form(gateway, form, facts, period))
        return
    if seals and lines is None:
        raise CliError("--seals goes with --lines", EXIT_USAGE)
    if lines is not None:
        from services.cli.reports.ledger_lines import save_lines

        save_lines(gateway, lines, period, seals)
        return
    if requests:
        if csv_file is not None or html_file is not None:
            raise CliError("--requests is printed as a table or, with --json, as JSON", EXIT_USAGE)
        sums = gateway.get("/v1/reports/requests", group_by=by, **period)
        output.print_json(sums) if as_json else _print_requests(by, sums)
        return
    if html_file is not None:
        from services.cli.reports.report_page import OTHERS, render

        found = fetch(gateway, "job", period, OTHERS)
        more = fetch(gateway, by, {**period, "end": found["end_at"]}) if "," in by else None
        if more is not None and more["total"] != found["total"]:
            raise CliError("the ledger of this period still changes: name an earlier --end", EXIT_FAILED)
        _write(html_file, render(found, datetime.now(UTC), more))
        console.print(f"wrote {html_file}")
        return
    found = fetch(gateway, by, period)
    if as_json:
        output.print_json(found)
    elif csv_file is not None:
        _write_csv(csv_file, found)
    else:
        _print(by, found)
        for sentence in savings.sentences(savings.stored(gateway, period)):
            console.print(f"[dim]{sentence}[/]")


def _form(gateway: Gateway, form: str, facts_file: Path | None, period: dict[str, str | None]) -> dict[str, Any]:
    from services.cli.reports import forms
    from services.cli.reports.factors import read_facts

    facts = read_facts(facts_file) if facts_file is not None else forms.Facts()
    found = fetch(gateway, "model", period)
    period = {"start": period["start"], "end": found["end_at"]}  # all of one moment
    given = {name: value for name, value in period.items() if value is not None}
    if form == "eed":
        return forms.eed(found, facts)
    if form == "boamps":
        return forms.boamps(found, gateway.get("/v1/nodes")["items"], facts, datetime.now(UTC))
    if form == "annex-xi":
        return forms.annex_xi(found, gateway.pages("/v1/jobs"), facts)
    with gateway.stream("/v1/reports/lines", format="jsonl", **given) as answer:
        lines = (json.loads(line) for line in answer.iter_lines())
        if form == "ghg-hourly":
            return forms.ghg_hourly(found, lines, facts)
        requests = gateway.get("/v1/reports/requests", group_by="model", **period)
        return forms.sci_ai(found, requests, lines, facts)


def _check(path: Path) -> None:
    from services.cli.reports.report_page import checksum_of

    if (checksum := checksum_of(text_of(path))) is None:
        raise CliError(f"{path} is not as it was made: its checksum does not fit", EXIT_FAILED)
    console.print(f"{path} is as it was made; SHA-256 {checksum}")


def fetch(gateway: Gateway, by: str, period: dict[str, str | None], also: Sequence[str] = ()) -> Report:
    """Return all pages of a report, of one moment; ``CliError`` if the ledger changed all the while."""
    group_by, _, then_by = by.partition(",")
    asked: dict[str, Any] = {"group_by": group_by, "then_by": then_by or None, "limit": PAGE_LINES, **period}
    for _ in range(5):
        found = gateway.get("/v1/reports/footprint", also=list(also), **asked)
        asked["end"] = found["end_at"]
        while (cursor := found["next_cursor"]) is not None:
            page = gateway.get("/v1/reports/footprint", cursor=cursor, **asked)
            if not _is_same(page["total"], found["total"]):
                break
            found = {**found, "lines": found["lines"] + page["lines"], "next_cursor": page["next_cursor"]}
        else:
            return found
        asked["end"] = (datetime.fromisoformat(found["end_at"]) - timedelta(seconds=LATE_S)).isoformat()
    raise CliError("the ledger of this period still changes: name an earlier --end", EXIT_FAILED)


def _is_same(total: dict[str, float], other: dict[str, float]) -> bool:
    """Return whether two sums are of the same lines, in whatever order they were added up."""
    return all(math.isclose(total[name], other[name], rel_tol=1e-12) for name in total)


def period_of(start: str | None, end: str | None, month: str | None) -> dict[str, str | None]:
    if month is None:
        first, last = utc_time(start, "--start"), utc_time(end, "--end")
        if first and last and first >= last:
            raise CliError(f"--end {end}: must be after --start {start}", EXIT_USAGE)
        return {"start": first and first.isoformat(), "end": last and last.isoformat()}
    if start or end:
        raise CliError("give either --month, or --start and --end", EXIT_USAGE)
    if not re.fullmatch(r"20\d{2}-(0[1-9]|1[0-2])", month):
        raise CliError(f"--month {month}: must be a year and a month, such as 2026-11", EXIT_USAGE)
    year, number = map(int, month.split("-"))
    begins = datetime(year, number, 1, tzinfo=UTC)
    ends = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return {"start": begins.isoformat(), "end": ends.isoformat()}


def _print(by: str, found: Report) -> None:
    lines = [*found["lines"], *sums(found, "(idle)", "[bold]total[/]")]
    columns = {by: [*map(title, lines)], ">jobs": [str(line["jobs"]) for line in lines]}
    columns[">GPU time"] = output.times(line["footprint"]["gpu_s"] for line in lines)
    names = (">energy", ">CO2", ">market-based", ">embodied", ">baseline", ">change")
    columns |= zip(names, map(list, zip(*amounts(lines), strict=True)), strict=True)
    if currency := found.get("currency"):
        money = [line["accounts"].get("money") for line in lines]
        columns[">cost"] = ["-" if each is None else f"{each:,.2f} {currency}" for each in money]
    # What nobody knows takes no room from names: a note says what it is.
    known = {name: cells for name, cells in columns.items() if set(cells) != {output.UNKNOWN}}
    shown = output.table(*known)
    *rows, total = zip(*known.values(), strict=True)
    for cells in rows:
        shown.add_row(*cells)
    shown.add_section()
    shown.add_row(*total)
    console.print(shown)
    for sentence in notes(found):
        console.print(f"[dim]{sentence}[/]")


def _print_requests(by: str, found: Report) -> None:
    figures = (">requests", ">input tokens", ">output tokens", ">energy", ">CO2", ">outside the ledger", ">its CO2")
    shown = output.table(by, *figures)
    lines, servers = found["lines"], found["servers"]
    used = [(line["energy_j"], line["carbon_gco2"]) for line in lines]
    if servers is not None:
        used.append((servers["unattributed_energy_j"], servers["unattributed_carbon_gco2"]))
        used.append((servers["energy_j"], servers["carbon_gco2"]))
    joules, grams = output.energies(each for each, _ in used), output.emissions(each for _, each in used)
    outside = output.energies(line["outside_energy_j"] for line in lines)
    emitted = output.emissions(line["outside_carbon_gco2"] for line in lines)
    for at, line in enumerate(lines):
        beside = (outside[at], emitted[at]) if line["outside_energy_j"] else ("-", "-")
        counts = (str(line[name]) for name in ("requests", "input_tokens", "output_tokens"))
        shown.add_row(line["group"], *counts, joules[at], grams[at], *beside)
    if servers is not None:
        shown.add_row("(no request's)", "", "", "", joules[-2], grams[-2], "-", "-")
        shown.add_section()
        shown.add_row("[bold]servers[/]", "", "", "", joules[-1], grams[-1], "-", "-")
    console.print(shown)
    console.print("[dim]A part of the energy of the servers' jobs, by the requests' shares of their time.[/]")
    if estimated := sum(line.get("estimated_requests", 0) for line in found["lines"]):
        console.print(f"[dim]Tokens of {estimated} requests are estimates: their servers did not state them.[/]")


def notes(found: Report) -> list[str]:
    """Return, in sentences, what the figures rest on."""
    total, accounts, metered = found["total"], found["total_accounts"], found["metered_gpu_energy_j"]
    gap = abs(total["gpu_energy_j"] - metered) / metered if metered else 0.0
    sentences = [
        f"CO2: location-based, PUE included. Estimated: {share(total['estimated_energy_j'], total['energy_j'])} of the "
        f"energy, {share(accounts['estimated_gco2'], total['carbon_gco2'])} of the emissions.",
        "±: the 90 % interval, from errors of meters, models and intensities; that of a sum is less than its parts'.",
        "Baseline: the same energy at each zone's mean intensity in the period; energy that was saved is not in it.",
        f"GPU energy by the devices' own counters: {output.energy(metered)}; difference {100 * gap:.4f} %",
    ]
    sentences += [
        f"Demand charge of {each['zone']} for {each['month']}: {each['money']:,.2f} {found['currency']}, for "
        f"{each['peak_kw']:.4g} kW in the hour from {each['peak_at']}."
        for each in found.get("demand") or ()
    ]
    if accounts["unknown"]:
        sentences.append(f"Unknown: {', '.join(accounts['unknown'])} (docs/method.md says how to state them).")
    sentences += [
        f"SCI: {unit['sci_gco2_per_unit']:.4g} gCO2e per {unit['unit']}"
        if unit["sci_gco2_per_unit"] is not None
        else f"SCI per {unit['unit']}: unknown; operational alone "
        f"{unit['operational_gco2'] / unit['amount']:.4g} gCO2 per {unit['unit']}"
        for unit in found["units"]
    ]
    return sentences


def _write_csv(target: str, found: Report) -> None:
    lines = [*found["lines"], *sums(found, "(idle)", "(total)")]
    rows = [COLUMNS, *map(_row, lines)]
    if currency := found.get("currency"):
        costs = [f"cost_{currency}", *(line["accounts"]["money"] for line in lines)]
        rows = [(*row, cost) for row, cost in zip(rows, costs, strict=True)]
    if found["then_by"]:
        seconds = ["then_group", *(line.get("then_group") or "" for line in lines)]
        rows = [(row[0], second, *row[1:]) for second, row in zip(seconds, rows, strict=True)]
    text = io.StringIO()
    for row in rows:
        write_row(text, row)
    if target == "-":
        sys.stdout.write(text.getvalue())
    else:
        _write(Path(target), text.getvalue())


def _write(path: Path, text: str) -> None:
    with made(path) as part:
        part.write_text(text, encoding="utf-8", newline="")


def _row(line: Report) -> Sequence[Any]:
    footprint, accounts = line["footprint"], line["accounts"]
    width: Report = accounts.get("half_width") or {"energy_j": None, "carbon_gco2": None}

    def kg(value: float | None) -> float | str:
        return "" if value is None else value / 1_000

    return (
        line["group"],
        line.get("name") or "",
        line["jobs"],
        footprint["gpu_s"] / 3_600,
        footprint["energy_j"] / 3.6e6,
        footprint["estimated_energy_j"] / 3.6e6,
        accounts["facility_energy_j"] / 3.6e6,
        kg(footprint["carbon_gco2"]),
        kg(accounts["estimated_gco2"]),
        kg(accounts["market_gco2"]),
        kg(accounts["embodied_gco2"]),
        kg(accounts["baseline_gco2"]),
        "; ".join(accounts["unknown"]),
        "" if width["energy_j"] is None else width["energy_j"] / 3.6e6,
        kg(width["carbon_gco2"]),
    )
