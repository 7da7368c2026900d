"""The command line's composition root."""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from services.cli import output
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, CliError
from services.cli.output import console
from services.cli.plugins import add_commands, add_moved
from services.kit.extras import missing_extra
from services.kit.release import RELEASE

ROOMS = {
    "site.local": (
        *("up", "down", "status", "admin-key", "credential", "rotate-secret", "backup", "restore", "downgrade"),
    ),
    "site.join": ("join", "leave"),
    "site.certificates": ("ca",),
    "site.dashboard": ("dashboard",),
    "jobs.submit": ("submit",),
    "jobs.jobs": ("jobs", "job", "logs", "cancel", "hold", "release", "forget-checkpoint"),
    "jobs.explain": ("explain",),
    "site.top": ("top",),
    "jobs.exec": ("exec",),
    "jobs.forward": ("forward", "cp"),
    "jobs.notebook": ("notebook", "shell"),
    "jobs.mcp": ("mcp",),
    "site.cluster": ("check", "nodes", "policy", "carbon"),
    "site.engines": ("engine",),
    "site.cells": ("cells",),
    "site.grid": ("reserve", "reservations", "grid"),
    "accounts.clusters": ("login", "logout", "clusters"),
    "accounts.access": ("audit", "whoami", "tenants", "keys", "users"),
    "accounts.budgets": ("budgets",),
    "accounts.secrets": ("secrets",),
    "reports.report": ("report", "verify"),
    "reports.factors": ("factors",),
    "serving.pools": ("pools",),
    "serving.apps": ("apps",),
    "serving.fleets": ("fleets",),
    "accounts.webhooks": ("webhooks",),
    "serving.endpoints": ("endpoints",),
    "serving.profile_pool": ("profile",),
    "planning.export": ("export",),
    "planning.simulate": ("simulate",),
    "planning.pools": ("plan",),
}
"""The commands of each module, which is loaded when one of them is named: all of them take a second of CPU time."""
ROOM_OF = {command: room for room, commands in ROOMS.items() for command in commands}


def with_plain_numbers(command: Any) -> Any:
    """Return a command, or a group of them, that refuses ``1_0``, which Python alone reads as ten."""
    for each in getattr(command, "commands", {}).values():
        with_plain_numbers(each)
    for each in getattr(command, "params", ()):
        each.process_value = partial(_plain, each, each.process_value)
    return command


def _plain(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    found = process(context, value)
    lists = (each if isinstance(each, list | tuple) else [each] for each in (value, found))
    for given, read in zip(*lists, strict=False):  # a single value may become a list
        if isinstance(given, str) and "_" in given and isinstance(read, int | float):
            raise typer.BadParameter(f"{given!r} is not a number", ctx=context, param=parameter)
    return found


class Commands(TyperGroup):
    """The commands of the rooms, which `register` of each module adds, and those registered already."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*ROOM_OF, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        room = ROOM_OF.get(cmd_name)
        if room is None:
            return with_plain_numbers(super().get_command(ctx, cmd_name))
        loaded = typer.Typer()
        import_module(f"services.cli.{room}").register(loaded)
        return with_plain_numbers(typer.main.get_group(loaded).commands[cmd_name])


app = typer.Typer(
    name="wattshift",
    cls=Commands,
    help="Run GPU work on time with the least carbon.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

add_moved(app, {"fit": "wattshift lab fit", "demo": "./run"})


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"wattshift {RELEASE}")
        raise typer.Exit


@app.callback()
def wattshift(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Talk to this cluster (see `clusters`); also WATTSHIFT_CLUSTER.")
    ] = None,
) -> None:
    """Run GPU work on time with the least carbon."""
    if cluster:
        os.environ["WATTSHIFT_CLUSTER"] = cluster
        for name in ("WATTSHIFT_URL", "WATTSHIFT_API_KEY"):  # what is typed wins over variables
            os.environ.pop(name, None)


def main() -> None:
    if sys.argv[1:] != ["--version"]:
        run(lambda: add_commands(app, sys.argv[1:], ROOM_OF))
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command; an expected failure prints one line on standard error and has an exit code of its own."""
    try:
        command()
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
    except OSError as error:  # of a file of this machine, such as on a full disk
        console.file.flush()
        output.say(f"wattshift: {error}")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
