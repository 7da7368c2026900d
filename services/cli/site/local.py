"""Commands for this machine's installation: up, down, status and others."""

import asyncio
import contextlib
import importlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from services.cli import output
from services.cli.bars import bar
from services.cli.client import DataDir, Gateway, data_dir
from services.cli.commands import EXIT_DEGRADED, EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, AsJson, CliError
from services.cli.jobs.reach import runner_of
from services.cli.output import console, errors
from services.cli.site import nearest_zone
from services.cli.site.cluster import print_invitation
from services.cli.values import duration_s
from services.kit.callers import SERVICES
from services.kit.extras import first_missing
from services.standalone import joining, remembered, root_secret, stack
from services.standalone.data_folder import DataFolder, StackStatus
from services.standalone.process import BadInputError, StackError

SAY_EVERY_S = 5.0  #: What a start waits for, at most

Nodes = Annotated[
    str | None,
    typer.Option(
        help=r"Simulated nodes, COUNTxGPUS[:MODEL]\[@ZONE], separated by commas; this machine's GPUs by default."
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:PORT]",
        help=f"Let nodes on other hosts join over TLS, by default at {joining.DEFAULT}; '' lets no more of them in.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(min=1, max=65_535, help="Port of the public API; by default 8000, or a free one if that is taken."),
]


def register(app: typer.Typer) -> None:
    app.command(cls=_Up)(up)
    for command in (down, status, admin_key, credential, rotate_secret, backup, restore, downgrade):
        app.command()(command)


class _Up(TyperCommand):
    """``--listen`` without an address means the default one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at in [number for number, word in enumerate(args, 1) if word == "--listen"]:
            if at == len(args) or args[at].startswith("-"):
                args.insert(at, joining.DEFAULT)
        return super().parse_args(ctx, args)


@contextmanager
def stack_errors() -> Iterator[None]:
    """Give a failure of the installation its exit code: 2 if an option, setting or file is wrong."""
    try:
        yield
    except StackError as error:
        raise CliError(str(error), EXIT_USAGE if isinstance(error, BadInputError) else EXIT_FAILED) from error


def up(
    folder: DataDir = None,
    nodes: Nodes = None,
    port: Port = None,
    listen: Listen = None,
    zone: Annotated[
        str | None,
        typer.Option(help="Grid zone of this machine; auto: proposed by its time zone, with a free source."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take what --zone auto proposes without asking.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Give up after this long, such as 5m; by default once it makes no progress."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start the control plane on this machine, in the background, with the options it was last started with."""
    timeout_s = None if wait is None else duration_s(wait, "--wait")
    folder = folder or data_dir()
    is_first_start = not (folder / "admin.key").exists()
    if zone is not None:
        os.environ.update(_proposed(yes) if zone == "auto" else {"WATTSHIFT_ZONE": zone})
    with stack_errors():
        given = remembered.asked(nodes, port, os.environ, listen)
        _, changes = remembered.merge(remembered.read(DataFolder(folder)), given)
        with waiting_shown() as waiting:
            started = stack.up(folder, nodes=nodes, port=port, listen=listen, timeout_s=timeout_s, waiting=waiting)
    if as_json:
        return output.print_json(asdict(started))
    for change in changes:
        console.print(f"changed: {change}")
    print_up(started.gateway_url, folder, is_first_start)
    if listen:
        print_invitation(Gateway(started.gateway_url, own_key(folder / "admin.key")))


def _proposed(yes: bool) -> dict[str, str]:
    """Return the settings of the zone and the free source that were proposed and taken.

    Raises:
        CliError: There is none, it needs a key that is not given, or nobody is there to confirm it.
    """
    time_zone = nearest_zone.time_zone_of()
    choice = nearest_zone.choice_of(time_zone)
    if choice is None:
        where = f"of the time zone {time_zone}" if time_zone else "as this machine's time zone is not known"
        raise CliError(f"no zone with a free source is known {where}; name one: --zone ZONE", EXIT_USAGE)
    for line in choice.lines():
        errors.print(line, markup=False)
    if choice.variable and not os.environ.get(choice.variable):
        raise CliError(f"{choice.provider} needs {choice.variable}, which {choice.free_at} gives for free", EXIT_USAGE)
    if not yes and not sys.stdin.isatty():
        raise CliError("nothing was started: confirm it with --yes", EXIT_USAGE)
    if not yes:
        typer.confirm("Take it?", abort=True, err=True)
    return {"WATTSHIFT_ZONE": choice.zone, "CARBON_PROVIDERS": f"{choice.zone}={choice.provider}"}


def print_up(url: str, folder: Path, is_first_start: bool) -> None:
    """Say where the installation answers, what holds its usual port, where its admin key is, and whom jobs run as."""
    console.print(f"[green]up[/] at [bold]{url}[/]  ({url}/docs)")
    if detail := stack.read_status(folder).detail:
        console.print(detail, markup=False)
    print_admin_key(folder / "admin.key", is_first_start)
    if folder.resolve() != data_dir().resolve():
        console.print(f"for the other commands: export WATTSHIFT_DATA_DIR={shlex.quote(str(folder.resolve()))}")
    with contextlib.suppress(CliError):  # the installation is up, whatever became of the key
        identity = Gateway(url, own_key(folder / "admin.key")).get("/v1/whoami")
        if (runner := runner_of(identity, folder)) is not None:
            how = ", not as root; submit opens the folder that it is called in to it" if os.geteuid() == 0 else ""
            console.print(f"jobs run as the account {runner.name}{how}")


@contextmanager
def waiting_shown() -> Iterator[Callable[[StackStatus], None]]:
    """Show on standard error what a start waits for: always on a terminal, elsewhere when that has changed."""
    began_s, said_s, said = time.monotonic(), 0.0, ""
    with errors.status("starting") as spinner:

        def show(status: StackStatus) -> None:
            nonlocal said_s, said
            text = f"starting: waiting for {', '.join(status.late()) or 'the next processes'}"
            after_s = time.monotonic() - began_s
            if errors.is_terminal:
                spinner.update(text)
            elif text != said and after_s - said_s >= SAY_EVERY_S:
                said_s, said = after_s, text
                errors.print(f"{text} ({after_s:.0f} s so far)", markup=False)

        yield show


def print_admin_key(key_file: Path, is_first_start: bool) -> None:
    """Say where the admin key is kept; the key itself only once."""
    if not key_file.exists():
        console.print(f"no admin key in {key_file}: put it back, or run `wattshift admin-key --new`")
        return
    console.print(f"admin key, kept in {key_file}" + (f": {key_file.read_text().strip()}" if is_first_start else ""))


def down(
    folder: DataDir = None,
    erase: Annotated[bool, typer.Option("--erase", help="Also remove the data folder and the database.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Erase without asking.")] = False,
) -> None:
    """Stop the control plane on this machine; its data is kept unless --erase is given."""
    where = folder or data_dir()
    if erase and not yes:
        typer.confirm(f"Remove {where} with all its jobs and its records of energy and carbon?", abort=True)
    with stack_errors():
        was_running = stack.down(where)
        if erase:
            stack.erase(where)
    console.print("stopped" if was_running else "was not running")
    if erase:
        console.print(f"removed {where}")


def status(folder: DataDir = None, as_json: AsJson = False) -> None:
    """Show the processes of this machine's installation; exit 6 if some do not run, and 5 if it is not running."""
    with stack_errors():
        found = stack.read_status(folder or data_dir())
        options = remembered.read(DataFolder(folder or data_dir()))
    marked = _marked_intervals(found, folder or data_dir())
    if as_json:
        output.print_json({**asdict(found), "options": asdict(options), "marked_intervals": marked})
    else:
        _print_status(found)
        for node, count in sorted((marked or {}).items()):
            console.print(f"{node}: {count} intervals are not booked as its meters have it; see docs/method.md")
        console.print(f"[dim]data folder {folder or data_dir()}[/]")
        if shown := options.shown():
            console.print(f"[dim]made with {shown}; a plain `wattshift up` uses these again[/]")
    if found.state != "running":
        raise typer.Exit(EXIT_DEGRADED if found.state == "degraded" else EXIT_UNAVAILABLE)


def _marked_intervals(found: StackStatus, folder: Path) -> dict[str, int] | None:
    """Return, by node, how many intervals are not booked as its meters show; None if the gateway does not answer."""
    if not found.gateway_url or found.state != "running":
        return None
    try:
        nodes = Gateway(found.gateway_url, own_key(folder / "admin.key"), 5.0).get("/v1/nodes")["items"]
    except CliError:
        return None
    return {node["id"]: node["marked_intervals"] for node in nodes if node.get("marked_intervals")}


def credential(
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICES)}.")], folder: DataDir = None
) -> None:
    """Print the credential of one of this installation's services, to run that service on another host."""
    if service not in SERVICES:
        raise CliError(f"there is no service {service}: it is one of {', '.join(SERVICES)}", EXIT_USAGE)
    with stack_errors():
        found = stack.credential_of(service, folder or data_dir())
    console.print(f"WATTSHIFT_SERVICE_CREDENTIAL={found}", markup=False)


def rotate_secret(
    finish: Annotated[bool, typer.Option("--finish", help="Stop accepting the old secret.")] = False,
    folder: DataDir = None,
) -> None:
    """Replace the secret by which services know each other; the old one is accepted too, until --finish.

    A running installation stays up: its services are restarted one after the other. If this was killed, give the same
    command again.
    """
    of = DataFolder(folder or data_dir())
    if of.holder() is not None:
        errors.print(
            "starts every service again, one after the other, which takes a minute or more: jobs run on, new "
            "connections wait for some seconds, and requests that are under way to a service then are cut off"
        )
    with stack_errors(), console.status("starting the services again"):
        (root_secret.finish if finish else root_secret.rotate)(of)
    after = "the secret before is accepted no more" if finish else "the secret before is accepted until --finish"
    console.print(f"a new secret signs; {after}")


def admin_key(
    new: Annotated[bool, typer.Option("--new", help="Replace the key; the one that was lost is revoked.")] = False,
    folder: DataDir = None,
) -> None:
    """Show where this installation's admin key is, or replace it; works whether the installation is up or down."""
    key_file = (folder or data_dir()) / "admin.key"
    if new:
        with stack_errors(), console.status("replacing the key"):
            key_file = stack.new_admin_key(folder or data_dir())
    else:
        own_key(key_file)
    print_admin_key(key_file, is_first_start=new)


def backup(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.", show_default=False)],
    folder: DataDir = None,
) -> None:
    """Write the database and the secrets of this machine's installation into one file, whether it runs or not.

    Where DATABASE_URL names another database, that one is written. Outputs and checkpoints of jobs are not included.
    """
    backups = _backups()
    with stack_errors(), bar("writing") as advance:
        made = backups.back_up(DataFolder(folder or data_dir()), file, os.environ, advance)
    console.print(f"{file}: release {made.release}, {output.clock(made.made_at, output.SECONDS)}; it contains secrets")


def restore(
    file: Annotated[Path, typer.Argument(help="File that `wattshift backup` wrote.", show_default=False)],
    folder: DataDir = None,
) -> None:
    """Make an installation from a backup, in an empty data folder and database; `wattshift up` then starts it."""
    where, backups = folder or data_dir(), _backups()
    with stack_errors(), bar("restoring") as advance:
        lost = backups.restore(DataFolder(where), file, os.environ, advance)
    console.print(f"restored into {where}; `wattshift up` starts it")
    if lost:
        console.print(f"{lost} gang{'s' if lost > 1 else ''} ran when the backup was made; the jobs are queued again")


def downgrade(
    to: Annotated[str, typer.Option(metavar="RELEASE", help="Which release is to start next.", show_default=False)],
    folder: DataDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Undo it without asking.")] = False,
) -> None:
    """Undo in the database what an earlier release cannot start on, if there is any of it; all else in it is kept.

    It is this machine's installation, which has to be down, or the database that DATABASE_URL names.
    """

    def confirm(undone: list[str]) -> None:
        errors.print(f"{to} knows nothing of these, which are undone:", *undone, sep="\n  ", markup=False)
        if not yes:
            typer.confirm("Undo them?", abort=True, err=True)

    with stack_errors():
        asyncio.run(_backups().go_back(DataFolder(folder or data_dir()), to, os.environ, confirm))
    console.print(f"the database is one that {to} starts on")


def _backups() -> ModuleType:
    """Return the backup code, which needs packages that a client on another machine does not have."""
    if hint := first_missing("alembic", "asyncpg"):
        raise CliError(hint, EXIT_USAGE)
    return importlib.import_module("services.standalone.backup")


def _print_status(found: StackStatus) -> None:
    console.print(f"{found.state}" + (f" at [bold]{found.gateway_url}[/]" if found.gateway_url else ""))
    shown = output.table("process", "state", ">pid", "port or socket", ">restarts", "up")
    for process in found.processes:
        age = datetime.now(UTC).timestamp() - process.started_at_s if process.pid and process.started_at_s else None
        shown.add_row(
            process.name,
            process.state,
            str(process.pid or "-"),
            process.socket or str(process.port or "-"),
            str(process.restarts),
            output.duration(age) if age is not None else "-",
        )
    if found.processes:
        console.print(shown)
    if any(process.state == "asleep" for process in found.processes):
        console.print("asleep: it is started when there is work for it")
    if found.trusts_jobs:
        console.print(
            "jobs run as the user of the control plane, and are trusted: started by root, it keeps them apart"
        )
    for name, detail in [("", found.detail), *((process.name, process.detail) for process in found.processes)]:
        if detail:
            console.print(f"{name}: {detail}" if name else detail, markup=False)


def own_key(key_file: Path) -> str:
    """Return the admin key of an installation on this machine."""
    try:
        return key_file.read_text().strip()
    except OSError:
        raise CliError(
            f"no admin key in {key_file}: put it back, or run `wattshift admin-key --new`", EXIT_USAGE
        ) from None
