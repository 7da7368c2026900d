"""``wattshift simulate experiment``: many simulations from one file, to tables and a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.client import EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.core.domain.errors import DomainError, PolicyConfigError


def add_to(group: typer.Typer) -> None:
    """Add the command to the ``simulate`` group."""
    group.command()(experiment)


def experiment(
    file: Annotated[Path, typer.Argument(help="What to compare (TOML); examples/experiments has some.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; a second run does what is missing there.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes at once.")] = max((os.cpu_count() or 2) - 1, 1),
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as one JSON list.")] = False,
) -> None:
    """Run an experiment: every policy on every trace, zone, signal and seed; leaves results.csv and report.html."""
    from services.simulator.experiments.plan import load_experiment
    from services.simulator.experiments.runner import run_bounds, run_experiment
    from services.simulator.report.page import render
    from services.simulator.report.tables import compare, write_csv

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        plan = load_experiment(file)
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as bar:
            task = bar.add_task(plan.name, total=None)
            results = run_experiment(
                plan,
                out,
                workers=workers,
                tell=lambda done, total, what: bar.update(
                    task, completed=done, total=total, description=what or plan.name
                ),
            )
            bar.update(task, description="bounds")
            bounds = run_bounds(plan, out, results)
    except (DomainError, PolicyConfigError) as error:
        raise CliError(str(error), EXIT_USAGE) from None
    write_csv(out / "results.csv", results)
    (out / "report.html").write_text(render(plan.name, plan.baseline, results, bounds), encoding="utf-8")
    rows = compare(results, plan.baseline)
    if as_json:
        print_json([dict(row.__dict__) for row in rows])
        return
    head = ("carbon", "energy", "mean JCT", "p99 JCT")
    shown = table("policy", "zone", "signal", *head, right=head, title=f"{plan.name}: ratios to {plan.baseline}")
    for row in rows:
        figures = (row.carbon, row.energy, row.avg_jct, row.p99_jct)
        shown.add_row(row.label, row.zone, row.signal, *(f"{figure:.3f}" for figure in figures))
    console.print(shown)
    console.print(f"{out / 'results.csv'} and {out / 'report.html'}")
