"""Commands for logins: login, logout, clusters."""

import os
import sys
from typing import Annotated
from urllib.parse import urlsplit

import typer

from services.cli import output
from services.cli.client import Gateway, is_local
from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.contracts.codes import ProblemCode
from wattshift.logins import LOCAL, Login, LoginsError, read_logins, write_logins


def register(app: typer.Typer) -> None:
    app.command()(login)
    app.command()(logout)
    Group(app, "clusters", "Show the clusters you are logged in to, or choose one.", list_clusters).add(use)


def login(
    url: Annotated[str, typer.Argument(help="Address of the gateway, such as https://gpu.example.org.")],
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to call it; by default its host name.")
    ] = None,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the API key from standard input.")] = False,
) -> None:
    """Log in to a cluster: check an API key and keep it for later commands."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # which is looked at only now
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{url!r} is not the address of a gateway; write https://HOST or http://HOST:PORT", EXIT_USAGE)
    name = cluster or parts.hostname
    if name == LOCAL:
        raise CliError(f"{LOCAL} names the installation of this machine; choose another --cluster NAME", EXIT_USAGE)
    if parts.scheme == "http" and not is_local(url):
        output.say(f"wattshift: {url} is not encrypted; the key can be read on the way")
    key = (sys.stdin.readline() if key_stdin else typer.prompt("API key", hide_input=True, err=True)).strip()
    if not key:
        raise CliError("the API key is empty", EXIT_USAGE)
    url = url.rstrip("/")
    try:
        Gateway(url, key).get("/v1/jobs", limit=1)
    except CliError as error:
        if error.code == ProblemCode.UNAUTHENTICATED:
            raise CliError(f"{url} does not accept this API key; nothing was stored", EXIT_REFUSED) from None
        raise
    try:
        file = write_logins(read_logins().with_login(name, Login(url, key)))
    except LoginsError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    console.print(f"logged in to [bold]{name}[/] at {url}; the key is in {file}")


def logout(
    cluster: Annotated[str | None, typer.Argument(metavar="[CLUSTER]", help="By default the current one.")] = None,
) -> None:
    """Forget the key of a cluster. The key itself stays valid until an administrator revokes it."""
    try:
        logins = read_logins()
        name = cluster or logins.current
        if name is None:
            raise CliError("you are not logged in to any cluster", EXIT_NOT_FOUND)
        write_logins(logins.without(name))
    except LoginsError as error:
        raise CliError(str(error), EXIT_NOT_FOUND) from None
    console.print(f"logged out of {name}")


def list_clusters(as_json: AsJson = False) -> None:
    """Show the clusters you are logged in to."""
    try:
        logins = read_logins()
    except LoginsError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    named = os.environ.get("WATTSHIFT_CLUSTER")
    current = named or (LOCAL if os.environ.get("WATTSHIFT_DATA_DIR") else logins.current or LOCAL)
    rows = [(LOCAL, None), *((name, each.url) for name, each in sorted(logins.clusters.items()))]
    shown = output.table("", "cluster", "address")
    for name, url in rows:
        shown.add_row("[green]●[/]" if name == current else "", name, url or "this machine's installation")
    output.tell([{"name": name, "url": url, "current": name == current} for name, url in rows], as_json, shown)


def use(cluster: str) -> None:
    """Choose the cluster that commands talk to; local is this machine's installation."""
    try:
        write_logins(read_logins().using(cluster))
    except LoginsError as error:
        raise CliError(str(error), EXIT_NOT_FOUND) from None
    console.print(f"commands talk to {cluster}")
