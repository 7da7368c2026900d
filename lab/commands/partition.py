"""``wattshift lab partition``: model variants on slices of GPUs, without a control plane."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.output import console, table
from services.cli.planning.solving import checked, print_solution, solved
from services.cli.values import json_document

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
    from services.contracts.partition import PartitionProblem, PartitionRequest
    from services.solving.partition import solve_partition

    if graph is not None:
        from lab.commands.graphs import check_graph_file

        check_graph_file(graph)
    request = checked(json_document(file), PartitionRequest, str(file))
    problem = PartitionProblem.model_validate(request.model_dump())
    result, solve_s = solved(file, lambda report: solve_partition(problem, report), quiet=as_json)
    if graph is not None:
        from lab.commands.graphs import configuration_graphs, write_graphs

        write_graphs(graph, configuration_graphs(request, result))
    if as_json:
        print_solution(result, solve_s)
    else:
        _show(result, solve_s)


def _show(result: PartitionResult, solve_s: float) -> None:
    shown = table("application", "instances", ">GPUs", ">accuracy", ">p95", ">SLA", ">mgCO2", ">objective", ">at most")
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
