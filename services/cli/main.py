"""The command line's composition root."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from services.cli import (
    access,
    apps,
    budgets,
    certificates,
    cluster,
    clusters,
    demo,
    endpoints,
    engines,
    exec,
    export,
    factors,
    fit,
    fleets,
    jobs,
    local,
    output,
    plan,
    profile_inference,
    report,
    secrets,
    serving,
    shell,
    simulate,
    top,
    users,
    webhooks,
)
from services.cli.client import EXIT_USAGE, CliError
from services.cli.output import console
from services.cli.plugins import add_commands
from services.kit.extras import missing_extra
from services.kit.release import RELEASE

app = typer.Typer(
    name="wattshift",
    help="Run GPU work on time with the least carbon.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ROOMS = (
    *(
        local,
        certificates,
        jobs,
        top,
        exec,
        shell,
        cluster,
        engines,
        clusters,
        access,
        users,
        budgets,
        secrets,
        report,
        factors,
    ),
    *(serving, apps, fleets),
    *(webhooks, endpoints, export, simulate, fit, profile_inference, plan, demo),
)
for room in ROOMS:
    room.register(app)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"wattshift {RELEASE}")
        raise typer.Exit


@app.callback()
def wattshift(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Talk to this cluster (see `clusters`); also WATTSHIFT_CLUSTER."),
    ] = None,
) -> None:
    """Run GPU work on time with the least carbon."""
    if cluster:
        os.environ["WATTSHIFT_CLUSTER"] = cluster
        for name in ("WATTSHIFT_URL", "WATTSHIFT_API_KEY"):  # what is typed wins over variables
            os.environ.pop(name, None)


def main() -> None:
    """Run one command; an expected failure prints one line on standard error and has an exit code of its own."""
    try:
        add_commands(app, sys.argv[1:])
        app()
    except CliError as error:
        console.file.flush()
        output.say(f"wattshift: {error}")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (hint := missing_extra(error)) is None:
            raise
        console.file.flush()
        output.say(f"wattshift: {hint}")
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
