"""``wattshift plan partition``: model variants on slices of GPUs, without a control plane."""

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
from services.core.domain.errors import DomainError

if TYPE_CHECKING:
    from services.contracts.partition import PartitionResult


def partition(
    file: Annotated[Path, typer.Argument(help="GPUs and applications as JSON; docs/optimizer.md describes it.")],
    graph: Annotated[
        Path | None, typer.Option(help="Also write the configuration graphs to a file that ends in .graphml or .dot.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Choose model variants and the slices of GPUs they run on, for little carbon at high accuracy within an SLA."""
    from pydantic import ValidationError

    from services.contracts.partition import PartitionProblem, PartitionRequest
    from services.solving.partition import solve_partition

    if graph is not None:
        from services.cli.graphs import check_graph_file

        check_graph_file(graph)
    try:
        request = PartitionRequest.model_validate(json_document(file))
    except ValidationError as error:
        raise CliError(f"{file}: {first_error(error, whole='the file')}", EXIT_USAGE) from None
    began_s = time.perf_counter()
    try:
        with solving_bar(quiet=as_json) as report:
            result = solve_partition(PartitionProblem.model_validate(request.model_dump()), report)
    except DomainError as error:
        raise CliError(f"{file}: {error}", EXIT_USAGE) from None
    solve_s = time.perf_counter() - began_s
    if graph is not None:
        from services.cli.graphs import configuration_graphs, write_graphs

        write_graphs(graph, configuration_graphs(request, result))
    if as_json:
        print_json(result.model_dump(mode="json", exclude={"kind"}) | {"solve_s": round(solve_s, 4)})
    else:
        _show(result, solve_s)


def _show(result: PartitionResult, solve_s: float) -> None:
    right = ("GPUs", "accuracy", "p95", "SLA", "mgCO2", "objective", "at most")
    shown = table("application", "instances", *right, right=right)
    for each in result.applications:
        shown.add_row(
            each.name,
            ", ".join(f"{one.count} {one.variant} on {one.slice}" for one in each.instances),
            str(each.gpus),
            f"{-each.accuracy_loss_pct:+.2f} %",
            f"{each.p95_ms:.1f} ms",
            f"{each.sla_p95_ms:.1f} ms",
            f"{1_000 * each.carbon_gco2_per_request:.4f}",
            f"{each.objective_pct:.2f}",
            "-" if each.bound_pct is None else f"{each.bound_pct:.2f}",
        )
    console.print(shown)
    layouts = ", ".join(map(str, result.layouts))
    console.print(f"layouts {layouts}; {len(result.recut)} GPUs are cut anew; found in {solve_s:.2f} s")
    if result.note:
        console.print(f"[red]{result.note}[/]")
