"""``wattshift lab placement``: which free GPUs a distributed job gets, by a chosen method."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.cli.values import json_document
from services.contracts.invalid import first_error
from services.core.domain.errors import DomainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.placement.mapping import Mapping
    from services.core.parallel.graph import JobGraph

TIMES = 5  #: A placement is timed so often; a programme, which may take a minute, once


def placement(
    job: Annotated[Path | None, typer.Argument(help="The job as JSON: stages, a model, or a parameter size.")] = None,
    servers: Annotated[str, typer.Option(help="Free GPUs of each server, separated by commas, such as 4,1,1.")] = "",
    model: Annotated[str | None, typer.Option(help="A common model instead of a file, such as vgg19.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs for that model.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Mini-batch of that model, samples; by default the paper's.")
    ] = None,
    method: Annotated[str, typer.Option(help="heavy-edge, refined or ilp.")] = "refined",
    inter_gbps: Annotated[float, typer.Option(help="Bandwidth between servers, gigabits per second.")] = 10.0,
    intra_gbytes: Annotated[float, typer.Option(help="Bandwidth within a server, gigabytes per second.")] = 300.0,
    server_gpus: Annotated[int, typer.Option(help="GPUs of a whole server; they share its NIC evenly.")] = 8,
    solver: Annotated[str, typer.Option(help="Solver of method ilp: highs, cbc or gurobi.")] = "highs",
    time_limit_s: Annotated[float, typer.Option(help="Time limit of method ilp, seconds.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Place a distributed training job on free GPUs so that its iterations are short."""
    from lab.placement.mapping import Mapper, Method
    from services.core.parallel.graph import data_parallel
    from services.core.parallel.iteration import Network

    free = _servers(servers)
    try:
        graph = _graph(job, model, gpus, batch)
        network = Network(inter_gbps * 1e9 / 8, intra_gbytes * 1e9, server_gpus)
        if max(free) > server_gpus:
            raise DomainError(f"a server has {server_gpus} GPUs (--server-gpus), so {max(free)} cannot be free")
        mapper, first = Mapper(graph, network), Mapper(data_parallel(2, 1.0), network)
        first.map([1, 1], method, backend=solver)  # a process's first placement loads what later ones find loaded
        found, solve_ms = _timed(
            lambda: mapper.map(free, method, backend=solver, time_limit_s=time_limit_s),
            1 if method == Method.ILP else TIMES,
        )
    except DomainError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    document = _document(graph, found, len(free), solve_ms)
    if as_json:
        print_json(document)
    else:
        _show(document, free, mapper.model.worst_s)


def _timed(place: Callable[[], Mapping], times: int) -> tuple[Mapping, float]:
    """Return a placement and the shortest time it took, ms: other load on the machine only adds to it."""
    taken_s: list[float] = []
    while True:
        began_s = time.perf_counter()
        found = place()
        taken_s.append(time.perf_counter() - began_s)
        if len(taken_s) == times:
            return found, 1_000 * min(taken_s)


def _servers(text: str) -> list[int]:
    try:
        free = [int(part) for part in text.split(",")]
    except ValueError:
        raise CliError(f"--servers {text!r} is not a list of free GPUs such as 4,1,1", EXIT_USAGE) from None
    if min(free) < 0:
        raise CliError("a server cannot have fewer than 0 free GPUs", EXIT_USAGE)
    return free


def _graph(job: Path | None, model: str | None, gpus: int | None, batch: int | None) -> JobGraph:
    from pydantic import ValidationError

    from lab.placement.jobs import graph_of, placement_job

    if (job is None) == (model is None):
        raise CliError("give a JOB.json, or a --model with its --gpus", EXIT_USAGE)
    if job is None:
        if gpus is None:
            raise CliError("--model needs --gpus", EXIT_USAGE)
        document: Any = {"model": model, "gpus": gpus} | ({} if batch is None else {"batch": batch})
    else:
        if gpus is not None or batch is not None:
            raise CliError("--gpus and --batch need --model; a file contains them already", EXIT_USAGE)
        document = json_document(job)
    try:
        return graph_of(placement_job(document))
    except ValidationError as error:
        raise CliError(f"{job or '--model'}: {first_error(error, whole='the job')}", EXIT_USAGE) from None


def _document(graph: JobGraph, found: Mapping, servers: int, solve_ms: float) -> dict[str, Any]:
    """Return the answer; ``assignment`` has a list per server, with a name for each GPU taken."""
    assignment: list[list[str]] = [[] for _ in range(servers)]
    vertices = iter(found.server.tolist())
    for at, stage in enumerate(graph.stages, start=1):
        for replica in range(1, stage.replicas + 1):
            name, wide = f"S{at}-R{replica}", stage.tensor_parallel
            names = [name] if wide == 1 else [f"{name}-T{rank}" for rank in range(1, wide + 1)]
            assignment[next(vertices)].extend(names)
    return {
        "assignment": assignment,
        "iteration_time_s": found.iteration_time_s,
        "cut_bytes": found.cut_bytes,
        "solve_ms": round(solve_ms, 3),
        **({"note": found.note} if found.note else {}),
    }


def _show(document: dict[str, Any], free: list[int], worst_s: float) -> None:
    shown = table(">server", ">free", ">taken", "replicas")
    for server, (names, there) in enumerate(zip(document["assignment"], free, strict=True), start=1):
        shown.add_row(str(server), str(there), str(len(names)), " ".join(names) or "-")
    console.print(shown)
    console.print(
        f"iteration {1_000 * document['iteration_time_s']:.2f} ms (one GPU per server: {1_000 * worst_s:.2f} ms), "
        f"{document['cut_bytes'] / 1e6:.1f} MB between servers, found in {document['solve_ms']:.1f} ms"
    )
    if "note" in document:
        console.print(f"[dim]{document['note']}[/]")
