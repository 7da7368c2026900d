"""``wattshift plan allocation``: GPUs, control values and places for jobs, without a control plane."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.errors import EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.cli.planning.solving import solving_bar
from services.cli.values import json_document
from services.contracts.invalid import first_error
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError

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
    from pydantic import ValidationError

    from services.contracts.allocation import AllocationProblem, AllocationRequest
    from services.solving.allocation import solve_allocation

    try:
        request = AllocationRequest.model_validate(json_document(file))
    except ValidationError as error:
        raise CliError(f"{file}: {first_error(error, whole='the file')}", EXIT_USAGE) from None
    began_s = time.perf_counter()
    try:
        with solving_bar(quiet=as_json) as report:
            result = solve_allocation(AllocationProblem.model_validate(request.model_dump()), report)
    except DomainError as error:
        raise CliError(f"{file}: {error}", EXIT_USAGE) from None
    solve_s = time.perf_counter() - began_s
    if as_json:
        print_json(result.model_dump(mode="json", exclude={"kind"}) | {"solve_s": round(solve_s, 4)})
    else:
        _show(result, request.power_limit_w, solve_s)


def _show(result: AllocationResult, power_limit_w: float | None, solve_s: float) -> None:
    right = ("GPUs", "control", "speed", "power", "iteration")
    shown = table("job", *right, "nodes", right=right)
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
