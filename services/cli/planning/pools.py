"""``wattshift plan pools``: LLM instances by place, mode and class of requests, without a control plane."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands import EXIT_USAGE, CliError, Group
from services.cli.output import console, table
from services.cli.planning.solving import print_solution, solved
from services.cli.plugins import add_moved
from services.cli.values import json_object
from services.contracts.invalid import explained, field_of

if TYPE_CHECKING:
    from services.contracts.pools import PoolsRequest, PoolsResult

ANY = "any"
WHY = {
    "no_mode": "no mode keeps its limits",
    "gpus": "all GPUs together could not serve it",
    "gpus_shared": "there are not enough GPUs for it and the other classes",
    "gpus_held": "other pools, or jobs that may not be preempted, hold GPUs that it needs",
    "no_gpus": "no node has GPUs of a model that it may use, or only for fleets",
}


def register(app: typer.Typer) -> None:
    plan = Group(app, "plan", "Plan without a control plane.")
    plan.add(pools)
    add_moved(plan, {name: f"wattshift lab {name}" for name in ("allocation", "partition", "placement")})


def pools(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Locations, modes and demand as JSON; docs/pools.md describes it.")],
    objective: Annotated[str | None, typer.Option(help="carbon, energy or cost.")] = None,
    solver: Annotated[str | None, typer.Option(help="highs, cbc or gurobi.")] = None,
    negative_rates: Annotated[
        str | None,
        typer.Option(help="frugal: start no instance that could be dropped; paper: take negative rates literally."),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Use only this partition; any: choose among all, whatever the file says.")
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(help="Stop within this share of the bound; by default the optimum, or 1 % if that takes long."),
    ] = None,
    time_limit_s: Annotated[float | None, typer.Option(help="Time limit for solving, seconds; by default 60.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan pools of LLM instances: how many, where, in which mode, for which class of requests.

    Options take precedence over the file.
    """
    from services.solving.pools import solve_pools

    said = {name: value for name, value in context.params.items() if name not in ("file", "as_json")}
    given = {name: value for name, value in said.items() if value is not None}
    if partition == ANY:
        given["partition"] = None
    request = _request(file, given)
    result, solve_s = solved(file, lambda report: solve_pools(request, report), quiet=as_json)
    if as_json:
        print_solution(result, solve_s)
    else:
        hours = request.step_s * len(request.locations[0].intensity) / 3_600
        show_plan(result, hours=hours, has_running=bool(request.running), found_in_s=solve_s)


def _request(file: Path, given: dict[str, Any]) -> PoolsRequest:
    from pydantic import ValidationError

    from services.contracts.pools import PoolsRequest

    document = json_object(file)
    try:
        return PoolsRequest.model_validate(document | given)
    except ValidationError as error:
        first = error.errors()[0]
        at = field_of(first["loc"])
        where = f"--{at.replace('_', '-')}" if at in given else f"{file}: {at}" if at else str(file)
        raise CliError(f"{where}: {explained(first)}", EXIT_USAGE) from None


def show_plan(result: PoolsResult, *, hours: float, has_running: bool, found_in_s: float | None = None) -> None:
    """Print a plan for this many hours; what starts and stops is shown only where something runs already."""
    from services.core.domain.solving import SolveStatus

    if result.instances:
        shown = table("location", "class", "mode", ">instances", ">power")
        for each in result.instances:
            power = f"{each.count * each.power_w / 1_000:.2f} kW"
            shown.add_row(each.location, each.request_class or "kept", each.mode, str(each.count), power)
        console.print(shown)
    gap = ""
    if result.gap is not None and result.status not in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE):
        gap = f", at most {100 * result.gap:.2g} % above the least possible"
    partition = "" if result.partition is None else f", partition {result.partition}"
    found = "" if found_in_s is None else f", found in {found_in_s:.2f} s"
    is_short = result.status is SolveStatus.INFEASIBLE and result.partition is not None
    status = "not all demand can be served: the plan that leaves the least" if is_short else result.status
    console.print(f"{status}{partition}{gap}{found}")
    if result.energy_kwh is not None:
        cost = "" if result.cost is None else f", cost {result.cost:.2f}"
        emissions = "emissions unknown" if result.emissions_kg is None else f"{result.emissions_kg:.3f} kgCO2"
        console.print(f"{emissions}, {result.energy_kwh:.3f} kWh in {hours:g} h{cost}")
    for unserved in result.shortfall:
        why = WHY[unserved.reason]
        console.print(f"[red]{unserved.request_class}: {unserved.qps:.3g} requests/s are not served: {why}[/]")
    if result.full:
        console.print("no GPUs left: " + ", ".join(f"{each.gpu_type} in {each.location}" for each in result.full))
    for what, changes in (("start", result.starts), ("stop", result.stops)):
        if changes and has_running:
            console.print(f"{what}: " + ", ".join(f"{each.count} x {each.mode} in {each.location}" for each in changes))
    if result.note:
        console.print(f"[dim]{result.note}[/]")
