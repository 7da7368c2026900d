"""``wattshift simulate``: what policies would have done with past jobs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.markup import escape

from services.cli.bars import bar
from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError, Group
from services.cli.output import console, duration, print_json, rounded, table
from services.cli.plugins import add_moved, add_plugins
from services.cli.site.cluster import parameters_of
from services.cli.site.grid import limit_of
from services.cli.values import duration_s, made, text_of, time_of
from services.contracts.invalid import explained
from services.contracts.simulations import GridOrderAhead, TrainingOptions
from services.core.accounting.carbon import percent_change
from services.kit.plugins import load_plugins

if TYPE_CHECKING:
    from services.simulator.engine import SimulationResult
    from services.simulator.workload import CarbonTrace, Workload


def register(app: typer.Typer) -> None:
    simulate = Group(app, "simulate", "Ask what policies would have done with past jobs.")
    simulate.add(training)
    add_moved(simulate, {name: f"wattshift lab {name}" for name in ("experiment", "inference", "serving")})


def training(
    context: typer.Context,
    policy: Annotated[str, typer.Option(help="One policy, or several separated by commas.")],
    jobs: Annotated[str, typer.Option(help="A bundled trace (green-year, green-day) or a file.")],
    carbon: Annotated[str, typer.Option(help="A bundled zone (SE, GB, PL, US-CAL-CISO, CA-ON) or a file.")],
    cluster: Annotated[
        str,
        typer.Option(
            help="NODESxGPUS:MODEL, or ZONE=NODESxGPUS:MODEL, several by commas; MIG slices: 2x4:A100[3g,2g,2g]."
        ),
    ] = "32x2:RTX3090",
    format: Annotated[
        str | None, typer.Option(help="Format of the job file; by default recognised by its header.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="How jobs behave; by default the trace's own recipe.")] = None,
    start: Annotated[str | None, typer.Option(help="Where simulated time begins: a date, UTC.")] = None,
    days: Annotated[float | None, typer.Option(help="Only jobs submitted within this many days of the start.")] = None,
    seed: Annotated[int, typer.Option(help="Equal input and equal seed give equal results.")] = 1,
    param: Annotated[
        list[str] | None,
        typer.Option(help="A policy parameter, key=value or key=@FILE; POLICY.key=value for one of several policies."),
    ] = None,
    signal: Annotated[str, typer.Option(help="direct or lifecycle intensity.")] = "direct",
    forecast: Annotated[
        str, typer.Option(help="perfect, persistence, issued (for bundled zones), or a file of issued forecasts.")
    ] = "perfect",
    prices: Annotated[
        Path | None, typer.Option(help="A file of tariffs (docs/prices.md): figures then have money.", metavar="FILE")
    ] = None,
    round_minutes: Annotated[float, typer.Option(help="Time between active rounds.")] = 30.0,
    passive_interval_s: Annotated[float, typer.Option(help="Shortest time between passive rounds.")] = 0.0,
    power_down_minutes: Annotated[
        float | None, typer.Option(help="Switch off nodes that were idle for this long; by default never.")
    ] = None,
    node_mtbf_days: Annotated[
        float | None, typer.Option(help="Mean time between failures of a node; by default no failures.")
    ] = None,
    host_idle_w: Annotated[float, typer.Option(help="Host power per idle GPU, watts.")] = 30.0,
    horizon_hours: Annotated[float, typer.Option(help="How far ahead policies see the grid.")] = 48.0,
    placement: Annotated[
        str, typer.Option(help="consolidated, buddy, first-fit, heavy-edge or refined, unless the policy places.")
    ] = "consolidated",
    topology: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Racks and the like of the nodes n0, n1, ..., or Slurm's topology.conf."),
    ] = None,
    within: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Every gang must lie in one rack, or domain of another level.")
    ] = None,
    predictor: Annotated[
        str, typer.Option(help="Predictor of job lengths: perfect or none; for recurring jobs forest, mean or median.")
    ] = "perfect",
    batch_tuning: Annotated[
        Literal["all", "half", "none"],
        typer.Option(help="Whose batch size may follow the gang, where the policy uses that."),
    ] = "all",
    tenant_guarantee: Annotated[
        list[str] | None, typer.Option(help="TENANT=GPUs that it is guaranteed, under any policy.")
    ] = None,
    tenant_weight: Annotated[
        list[str] | None,
        typer.Option(help="TENANT=weight: its share of the GPUs against others', under fair+ policies; 1 by default."),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CUT@TIME/DURATION[/NOTICE]",
            help="An order of the grid, such as 35%@2023-08-08T18:00Z/3h, or 20kW@.../3h/30m with notice; may be "
            "repeated.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write figures and curves as one HTML page to this file.", metavar="FILE.html")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, or a list for several policies.")
    ] = False,
) -> None:
    """Run training jobs of a trace under one or more policies, and show time, energy and carbon."""
    from services.simulator.training import Inputs, OptionError, prepare

    add_plugins()
    page_of = None if report is None else _page_maker()
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise CliError(f"--report: {report} is no file in a folder that exists", EXIT_USAGE)
    sources = {"jobs": jobs, "carbon": carbon, "forecast": forecast}
    context.params["topology"] = "" if topology is None else text_of(topology)
    try:
        options = TrainingOptions(
            **{name: value for name, value in context.params.items() if name in TrainingOptions.model_fields},
            params=parameters_of(param or []),
            tenant_guarantees=_by_tenant("guarantee", tenant_guarantee or [], int),
            tenant_weights=_by_tenant("weight", tenant_weight or [], float),
            orders=[_order(each) for each in order or []],
        )
        _check_files(sources)
        run = prepare(options, Inputs(**sources, prices=prices))
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise CliError(f"{option}: {explained(first)}", EXIT_USAGE) from None
    except OptionError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    results: list[SimulationResult] = []
    with bar(quiet=as_json, each_its_own=True) as advance:
        results.extend(run.results(advance))
    if report is not None and page_of is not None:
        page = page_of(run, results, shlex.join(["wattshift", *sys.argv[1:]]))
        with made(report) as part:
            part.write_text(page, encoding="utf-8")
    if as_json:
        print_json(run.document(results))
    else:
        _show(results, run.workload, run.trace)


def _page_maker() -> Callable[..., str]:
    """Return the function that makes a page of a run and its results, which the package wattshift-lab provides."""
    for plugin in load_plugins("wattshift.run_reports", Callable):  # type: ignore[type-abstract]
        return plugin.value
    raise CliError(
        "--report: the page is made by the package wattshift-lab, which is not installed here; in a checkout of this "
        "release: pip install ./lab",
        EXIT_USAGE,
    )


def _order(text: str) -> GridOrderAhead:
    limit, _, when = text.partition("@")
    begins, _, times = when.partition("/")
    lasts, _, notice = times.partition("/")
    if not lasts:
        raise CliError(f"--order: {text!r} is no order; write 35%@2023-08-08T18:00Z/3h", EXIT_USAGE)
    start_at = time_of(begins, "--order", datetime.now(UTC))
    lengths = {"duration_s": duration_s(lasts, "--order"), "notice_s": duration_s(notice or "0s", "--order")}
    return GridOrderAhead(start_at=start_at, **lengths, **limit_of(limit, "--order"))


def _by_tenant(what: str, given: list[str], kind: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in given:
        tenant, _, value = each.rpartition("=")
        try:
            found[tenant] = kind(value)
        except ValueError:
            tenant = ""
        if not tenant:
            raise CliError(f"--tenant-{what} {each}: must be TENANT={what}, such as vision=2", EXIT_USAGE)
    return found


def _check_files(sources: dict[str, str]) -> None:
    """Refuse names that are neither known nor files."""
    from services.simulator.bundles import BUNDLED_ZONES
    from services.simulator.catalogue import IN_LAB, catalogue, unknown
    from services.simulator.readers.carbon import FORECASTS

    for what, names, words in (
        ("jobs", tuple(catalogue().jobs), "there is no job trace {!r}: no such file; bundled: {}"),
        ("carbon", BUNDLED_ZONES, "there is no grid {!r}: no such file; bundled zones: {}"),
        ("forecast", FORECASTS, "there is no forecast file {!r}; known by name: {}"),
    ):
        if sources[what] not in names and not Path(sources[what]).is_file():
            if what == "jobs" and sources[what] in IN_LAB:
                raise CliError(unknown("job trace", sources[what], ""), EXIT_NOT_FOUND)
            raise CliError(words.format(sources[what], ", ".join(names)), EXIT_NOT_FOUND)


def _show(results: Sequence[SimulationResult], workload: Workload, trace: CarbonTrace) -> None:
    first = results[0]
    has_tenants = any(result.tenants for result in results)
    fairness = (">Jain",) if has_tenants else ()
    money = (">Money",) if first.currency else ()
    right = (">Carbon", *money, ">Energy", ">Idle", ">Peak", ">Mean JCT", ">p99 JCT", *fairness, ">Stops", ">Rounds")
    shown = table("Policy", *right, ">Took", title=f"{workload.name}: {len(workload)} jobs, {trace.zone}")
    for result in results:
        more = percent_change(result.carbon_kg, first.carbon_kg)
        if more == "-":
            more = f"{result.carbon_kg - first.carbon_kg:+.3g} kg"
        compared = "" if result is first else f" ({more})"
        shown.add_row(
            result.policy,
            f"{rounded(result.carbon_kg)} kg{compared}",
            *((f"{result.money + result.demand_money:,.2f} {result.currency}",) if result.currency else ()),
            f"{rounded(result.energy_kwh)} kWh",
            f"{100 * result.idle_energy_kwh / result.energy_kwh if result.energy_kwh else 0:.0f} %",
            f"{result.peak_power_w / 1000:.1f} kW",
            duration(result.avg_jct_s) if result.completed else "-",
            duration(result.p99_jct_s) if result.completed else "-",
            *((f"{result.jain:.3f}" if result.tenants else "-",) if has_tenants else ()),
            str(result.preemptions),
            str(result.rounds),
            f"{result.wall_s:.1f} s",
        )
    console.print(shown)
    for result in results:
        if result.completed < result.jobs:
            missing = result.jobs - result.completed
            console.print(f"{result.policy}: {missing} jobs did not end ({result.unrunnable} fit nowhere)")
    for result in results:
        used = [
            f"{name} x {each['slices']:.0f}: jobs ended {each['jobs']:.0f}, held {each['held_hours']:.1f} h"
            for name, each in result.slices.items()
        ]
        if used:
            console.print(f"{result.policy}, slices: {'; '.join(used)}")
    for result in results:
        for each in result.orders:
            reached = "never" if isnan(each["reached_s"]) else f"after {duration(each['reached_s'])}"
            console.print(
                f"{result.policy}, order of {each['limit_w'] / 1e3:.1f} kW (baseline {each['baseline_w'] / 1e3:.1f}): "
                f"reached {reached}, mean {each['mean_w'] / 1e3:.1f} kW, five minutes at most "
                f"{100 * each['above_most']:.1f} % above it, rebound {100 * each['rebound']:.1f} %"
            )
    for note in (*workload.notes, *trace.notes):
        console.print(f"[dim]{escape(note)}[/]")
