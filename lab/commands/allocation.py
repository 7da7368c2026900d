"""``wattshift lab allocation``: GPUs, control values and places for jobs, without a control plane."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.output import console, table
from services.cli.planning.solving import checked, print_solution, solved
from services.cli.values import json_document
from services.core.domain.controls import ControlKind

if TYPE_CHECKING:
    from services.contracts.allocation import AllocationResult, JobAllocation

UNITS = {ControlKind.POWER_LIMIT: "W", ControlKind.CLOCK: "MHz"}
WHY = {
    "gpus": "too few GPUs are free",
    "power_limit": "the power limit leaves too little",
    "tensor_groups": "its tensor groups find no node with enough free GPUs",
}


def allocation(
    file: Annotated[Path, typer.Argument(help="Nodes and jobs as JSON; docs/optimizer.md describes it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give jobs GPUs, power limits or clocks, and places on nodes, within a power limit."""
    from services.contracts.allocation import AllocationProblem, AllocationRequest
    from services.solving.allocation import solve_allocation

    request = checked(json_document(file), AllocationRequest, str(file))
    problem = AllocationProblem.model_validate(request.model_dump())
    result, solve_s = solved(file, lambda report: solve_allocation(problem, report), quiet=as_json)
    if as_json:
        print_solution(result, solve_s)
    else:
        _show(result, request.power_limit_w, solve_s)


def _show(result: AllocationResult, power_limit_w: float | None, solve_s: float) -> None:
    shown = table("job", ">GPUs", ">control", ">speed", ">power", ">iteration", "nodes")
    for each in result.jobs:
        if each.waits is not None:
            shown.add_row(each.name, "-", "-", "-", "-", "-", f"waits: {WHY[each.waits]}")
            continue
        shown.add_row(
            each.name,
            str(each.gpus),
            _control(each),
            f"{each.speed:.3g}",
            f"{each.power_w:.0f} W",
            "-" if each.iteration_s is None else f"{1_000 * each.iteration_s:.1f} ms",
            ", ".join(f"{share.gpus} on {share.node}" for share in each.nodes),
        )
    console.print(shown)
    of = "" if power_limit_w is None else f" of {power_limit_w:.0f} W"
    console.print(
        f"{result.power_w:.0f} W{of}, {result.idle_w:.0f} W of it for {result.free_gpus} free GPUs; "
        f"found in {solve_s:.2f} s"
    )
    if result.note:
        console.print(f"[red]{result.note}[/]")


def _control(job: JobAllocation) -> str:
    return "default" if job.value is None else f"{job.value:g} {UNITS[job.control]}"
