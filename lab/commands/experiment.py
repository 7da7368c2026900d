"""``wattshift lab experiment``: many simulations from one file, to tables and a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.bars import bar
from services.cli.client import data_dir
from services.cli.commands import EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.cli.plugins import add_plugins
from services.core.domain.errors import DomainError, PolicyConfigError

if TYPE_CHECKING:
    from lab.experiments.plan import Experiment
    from lab.experiments.runner import RunGroups
    from lab.report.tables import Compared


def experiment(
    files: Annotated[list[Path], typer.Argument(help="What to compare (TOML); lab/examples has some.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the results, with one folder per file if there are several; a second run completes it."
        ),
    ],
    page: Annotated[
        Path | None, typer.Option(help="A Markdown page whose marked tables are filled from all results in OUT.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Number of processes; or celery, for the installation's workers at REDIS_URL.")
    ] = str(max((os.cpu_count() or 2) - 1, 1)),
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON list.")] = False,
) -> None:
    """Run experiments: every policy on every trace, zone, signal and seed; each leaves results.csv and report.html."""
    from redis.exceptions import RedisError

    from lab.experiments.plan import load_experiment
    from lab.report.markdown import fill_page

    add_plugins()
    if page is not None and not page.is_file():
        raise CliError(f"there is no page {page}", EXIT_USAGE)
    processes = _processes(workers)
    try:
        plans = [load_experiment(file) for file in files]
        compared = [_run(plan, out if len(plans) == 1 else out / plan.name, processes, as_json) for plan in plans]
    except (DomainError, PolicyConfigError) as error:
        raise CliError(str(error), EXIT_USAGE) from None
    except RedisError as error:
        raise CliError(f"the broker does not answer: {error}", EXIT_UNAVAILABLE) from error
    if as_json:
        print_json([dict(row.__dict__) for rows in compared for row in rows])
    if page is not None:
        fill_page(page, out if len(plans) > 1 else out.parent)
        if not as_json:
            console.print(str(page))


def _run(plan: Experiment, out: Path, processes: int, quiet: bool) -> list[Compared]:
    """Run one experiment, leave its table and page in ``out``, show it, and return the comparison."""
    from lab.experiments.runner import run_bounds, run_experiment
    from lab.report.page import render
    from lab.report.tables import compare, write_csv

    with bar(plan.name, quiet=quiet) as advance:

        def report(done: int, total: int, what: str) -> None:
            advance(what, done, total)

        elsewhere = None if processes else _celery()
        results = run_experiment(plan, out, workers=processes, elsewhere=elsewhere, report=report)
        advance("bounds", len(results), None)
        bounds = run_bounds(plan, out, results)
    write_csv(out / "results.csv", results)
    (out / "report.html").write_text(render(plan.name, plan.baseline, results, bounds), encoding="utf-8")
    rows = compare(results, plan.baseline)
    if not quiet:
        head = (">carbon", ">energy", ">mean JCT", ">p99 JCT")
        shown = table("policy", "zone", "signal", *head, title=f"{plan.name}: ratios to {plan.baseline}")
        for row in rows:
            figures = (row.carbon, row.energy, row.avg_jct, row.p99_jct)
            shown.add_row(row.label, row.zone, row.signal, *(f"{figure:.3f}" for figure in figures))
        console.print(shown)
        console.print(f"{out / 'results.csv'} and {out / 'report.html'}")
    return rows


def _processes(workers: str) -> int:
    """Return how many processes to run here; 0: by Celery workers."""
    if workers == "celery":
        return 0
    if not workers.isdecimal() or not int(workers):
        raise CliError(f"--workers takes a number of processes or celery, not {workers!r}", EXIT_USAGE)
    return int(workers)


def _celery() -> RunGroups:
    from lab.experiments.remote import Client, connect_blocking
    from services.simulator.queue import simulator_celery
    from services.simulator.settings import SimulatorSettings

    url = os.environ.get("REDIS_URL") or _local_broker()
    settings = SimulatorSettings(redis_url=url, service_token="a client of the broker alone")  # type: ignore[call-arg]
    return Client(connect_blocking(settings), simulator_celery(settings)).run


def _local_broker() -> str:
    """Return the address of the Valkey of this machine's installation."""
    from services.standalone import valkey
    from services.standalone.data_folder import DataFolder

    folder = DataFolder(data_dir())
    address = folder.status().socket_of("valkey")
    if address is None:
        raise CliError("no broker: set REDIS_URL, or start the control plane with `wattshift up`", EXIT_UNAVAILABLE)
    return valkey.url(folder.secret("valkey"), address)
