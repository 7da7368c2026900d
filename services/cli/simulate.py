"""``wattshift simulate``: what a policy would have done with a history of jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli import experiments
from services.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.output import console, duration, print_json, table
from services.core.domain.errors import DomainError, PolicyConfigError

if TYPE_CHECKING:
    from services.simulator.engine import EngineOptions, SimulationResult
    from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

group = typer.Typer(help="Ask what a policy would have done with past jobs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    experiments.add_to(group)
    app.add_typer(group, name="simulate")


@group.callback()
def _simulate() -> None:
    """Ask what a policy would have done with past jobs."""


@group.command()
def training(
    policy: Annotated[str, typer.Option(help="One policy, or several with commas between.")],
    jobs: Annotated[str, typer.Option(help="A bundled trace (green-year, green-day) or a file.")],
    carbon: Annotated[str, typer.Option(help="A bundled zone (SE, GB, PL, US-CAL-CISO, CA-ON) or a file.")],
    cluster: Annotated[str, typer.Option(help="NODESxGPUS:MODEL, several with commas between.")] = "32x2:RTX3090",
    format: Annotated[str | None, typer.Option(help="Format of the job file; by its header if not given.")] = None,
    recipe: Annotated[str | None, typer.Option(help="How jobs behave; the trace's own if not given.")] = None,
    start: Annotated[str | None, typer.Option(help="Where simulated time begins: a date, UTC.")] = None,
    days: Annotated[float | None, typer.Option(help="Only jobs submitted within so many days.")] = None,
    seed: Annotated[int, typer.Option(help="Equal input and equal seed give equal results.")] = 1,
    param: Annotated[
        list[str] | None,
        typer.Option(help="A policy parameter, key=value; POLICY.key=value for one of several policies."),
    ] = None,
    signal: Annotated[str, typer.Option(help="direct or lifecycle intensity.")] = "direct",
    forecast: Annotated[
        str, typer.Option(help="perfect, persistence, issued (of bundled zones), or a file of issued forecasts.")
    ] = "perfect",
    round_minutes: Annotated[float, typer.Option(help="Between active rounds.")] = 30.0,
    passive_interval_s: Annotated[float, typer.Option(help="Least time between passive rounds.")] = 0.0,
    power_down_minutes: Annotated[
        float | None, typer.Option(help="Switch nodes off that were idle for so long; never if not given.")
    ] = None,
    node_mtbf_days: Annotated[
        float | None, typer.Option(help="Mean time between failures of a node; none if not given.")
    ] = None,
    host_idle_w: Annotated[float, typer.Option(help="Host draw per idle GPU, watts.")] = 30.0,
    horizon_hours: Annotated[float, typer.Option(help="How far ahead policies see the grid.")] = 48.0,
    placement: Annotated[
        str, typer.Option(help="consolidated, buddy, heavy-edge or refined, for policies that do not place.")
    ] = ("consolidated"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, or a list of several policies'.")] = False,
) -> None:
    """Run training jobs of a trace under one or more policies, and show time, energy and carbon."""
    from services.core.policies.registry import policy_name
    from services.simulator.engine import EngineOptions
    from services.simulator.workload import ClusterSpec

    names = [policy_name(name.strip()) for name in policy.split(",") if name.strip()]
    parameters = _parameters(names, param or [])
    try:
        spec = ClusterSpec.parse(cluster)
        options = EngineOptions(
            seed=seed,
            round_interval_s=60.0 * round_minutes,
            passive_interval_s=passive_interval_s,
            power_down_after_s=None if power_down_minutes is None else 60.0 * power_down_minutes,
            node_mtbf_s=None if node_mtbf_days is None else 86_400.0 * node_mtbf_days,
            host_idle_w=host_idle_w,
            placement=placement,
            horizon_s=3_600.0 * horizon_hours,
        )
        trace = _grid(carbon, start, days, signal, forecast)
        workload = _jobs(jobs, format, recipe, start, days, seed)
    except DomainError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    results = list(_run(names, parameters, workload, spec, trace, options, quiet=as_json))
    if as_json:
        documents = [_document(result, workload, cluster) for result in results]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        _show(results, workload, trace)


def _jobs(
    source: str, format: str | None, recipe: str | None, start: str | None, days: float | None, seed: int
) -> Workload:
    from services.simulator.bundles import BUNDLED_JOBS
    from services.simulator.readers import read_jobs

    if source not in BUNDLED_JOBS and not Path(source).is_file():
        known = ", ".join(BUNDLED_JOBS)
        raise CliError(f"there is no job trace {source!r}: no such file; bundled: {known}", EXIT_NOT_FOUND)
    return read_jobs(source, format=format, recipe=recipe, start=start, days=days, seed=seed)


def _grid(source: str, start: str | None, days: float | None, signal: str, forecast: str) -> CarbonTrace:
    from services.simulator.bundles import BUNDLED_ZONES
    from services.simulator.readers import TraceFormatError, read_carbon
    from services.simulator.readers.carbon import FORECASTS

    if source not in BUNDLED_ZONES and not Path(source).is_file():
        known = ", ".join(BUNDLED_ZONES)
        raise CliError(f"there is no grid {source!r}: no such file; bundled zones: {known}", EXIT_NOT_FOUND)
    if forecast not in FORECASTS and not Path(forecast).is_file():
        raise CliError(f"there is no forecast file {forecast!r}", EXIT_NOT_FOUND)
    try:  # the days after the last submission matter too: jobs still run then
        trace = read_carbon(source, start=start, signal=signal, forecast=forecast)
    except TraceFormatError:
        trace = None
    if trace is None or (days is not None and start is None):
        trace = read_carbon(source, start=start, days=days, signal=signal, forecast=forecast)
    return trace


def _parameters(names: Sequence[str], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each policy's parameters; one without a policy's name goes to every policy that has it."""
    from services.core.policies.parameters import describe_parameters
    from services.core.policies.registry import POLICIES, build_policy

    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise CliError(f"unknown policy {', '.join(unknown) or '(none)'}; known: {', '.join(POLICIES)}", EXIT_USAGE)
    keys = {name: {each.name for each in describe_parameters(POLICIES[name].config)} for name in names}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in given:
        key, equals, value = text.partition("=")
        owner, dot, inner = key.rpartition(".")
        of = [name for name in names if (not dot or name == owner) and inner in keys[name]]
        if not equals or not of:
            known = "; ".join(f"{name}: {', '.join(sorted(keys[name])) or 'none'}" for name in names)
            raise CliError(f"{text!r} sets no parameter; write key=value ({known})", EXIT_USAGE)
        for name in of:
            chosen[name][inner] = _value(value)
    try:
        for name in names:
            build_policy(name, chosen[name])
    except PolicyConfigError as error:
        raise CliError(f"{error.pointer.lstrip('/')}: {error}", EXIT_USAGE) from None
    return chosen


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _run(
    names: Sequence[str],
    parameters: dict[str, dict[str, Any]],
    workload: Workload,
    spec: ClusterSpec,
    trace: CarbonTrace,
    options: EngineOptions,
    *,
    quiet: bool,
) -> Iterator[SimulationResult]:
    from services.core.policies.registry import POLICIES
    from services.simulator.engine import simulate

    for name in names:
        rigid = not POLICIES[name].elastic and "gang" not in parameters[name]
        began_s = time.perf_counter()
        with _bar(name, len(workload), quiet) as progress:
            result = simulate(
                name,
                workload,
                spec,
                trace,
                parameters=parameters[name],
                options=replace(options, rigid=rigid),
                progress=progress,
            )
        yield replace(result, wall_s=round(time.perf_counter() - began_s, 3))


@contextmanager
def _bar(name: str, jobs: int, quiet: bool) -> Iterator[Any]:
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=jobs)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _document(result: SimulationResult, workload: Workload, cluster: str) -> dict[str, Any]:
    return {**result.summary(), "cluster": cluster, "workload": workload.name, "notes": list(workload.notes)}


def _show(results: Sequence[SimulationResult], workload: Workload, trace: CarbonTrace) -> None:
    first = results[0]
    right = ("Carbon", "Energy", "Idle", "Peak", "Mean JCT", "p99 JCT", "Stops", "Rounds", "Took")
    shown = table("Policy", *right, right=right, title=f"{workload.name}: {len(workload)} jobs, {trace.zone}")
    for result in results:
        ratio = result.carbon_kg / first.carbon_kg if first.carbon_kg else 1.0
        compared = "" if result is first else f" ({100 * (ratio - 1):+.1f} %)"
        shown.add_row(
            result.policy,
            f"{result.carbon_kg:.1f} kg{compared}",
            f"{result.energy_kwh:.0f} kWh",
            f"{100 * result.idle_energy_kwh / result.energy_kwh if result.energy_kwh else 0:.0f} %",
            f"{result.peak_power_w / 1000:.1f} kW",
            duration(result.avg_jct_s) if result.completed else "-",
            duration(result.p99_jct_s) if result.completed else "-",
            str(result.preemptions),
            str(result.rounds),
            f"{result.wall_s:.1f} s",
        )
    console.print(shown)
    for result in results:
        if result.completed < result.jobs:
            missing = result.jobs - result.completed
            console.print(f"{result.policy}: {missing} jobs did not end ({result.unrunnable} fit nowhere)")
    for note in (*workload.notes, *trace.notes):
        console.print(f"[dim]{note}[/]")
