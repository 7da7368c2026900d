"""``wattshift exec``: a command in a running job."""

import os
import sys
from typing import Annotated, Any

import typer
import typer.core

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, CliError
from services.cli.jobs.names import job_id
from services.cli.terminal import run_session, terminal_size

_REST = "wattshift.rest"


class CommandAfterDashes(typer.core.TyperCommand):
    """Keeps what follows ``--`` apart, as it belongs to another program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_REST] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def words_after_dashes(context: typer.Context) -> list[str]:
    """Return the words after ``--``; empty if there are none."""
    return list(context.meta.get(_REST) or [])


def register(app: typer.Typer) -> None:
    app.command("exec", cls=CommandAfterDashes)(exec_in_job)


def exec_in_job(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The running job's number, id or name.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Program and arguments.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="The process whose environment and node it gets, by its GPU in the gang; 0."),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Instead of a rank: the first process on this node.")] = None,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Run it in a terminal; implies -i.")] = False,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on to it.")] = False,
) -> None:
    """Run a command in a running job: in its environment, folder and account, on its node.

    wattshift exec JOB -- nvidia-smi
    wattshift exec -t JOB -- bash -l

    The exit status is the command's, or 255 if the connection is lost; the command then ends too.
    """
    command = [*(words or []), *words_after_dashes(context)]
    if not command:
        raise CliError(f"what should run? wattshift exec {job} -- nvidia-smi", EXIT_USAGE)
    if rank is not None and node is not None:
        raise CliError("give --rank or --node, not both", EXIT_USAGE)
    gateway = Gateway()
    place = {name: value for name, value in (("rank", rank), ("node", node)) if value is not None}
    body = {"command": command, "stdin": stdin or tty, **place, **(in_this_terminal() if tty else {})}
    end_with(*run_session(gateway, job_id(gateway, job), body))


def in_this_terminal() -> dict[str, Any]:
    """Return what a request says about this process's terminal; ``CliError`` if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("a terminal is needed here, and standard input or output is none", EXIT_USAGE)
    return {"terminal": terminal_size(), "terminal_type": os.environ.get("TERM") or "dumb"}


def end_with(code: int, detail: str) -> None:
    """Exit with the exit status of the command that was run."""
    if detail:
        output.say(f"wattshift: {detail}")
    if code:
        raise typer.Exit(code if 0 < code < 256 else EXIT_FAILED)
