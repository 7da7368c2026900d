"""Commands for secrets. A value is read from a prompt, standard input or a file, never from the command line."""

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group
from services.cli.jobs.names import checked_name
from services.cli.output import console
from services.cli.values import text_of
from services.contracts.secrets import MAX_SECRET_BYTES

Project = Annotated[str | None, typer.Option(help="The project whose jobs get it; by default all of the tenant's.")]
SecretName = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


def register(app: typer.Typer) -> None:
    secrets = Group(app, "secrets", "Show which secrets there are, set or delete one.", list_secrets)
    secrets.add(list_secrets, set_secret, delete_secret)


def list_secrets(as_json: AsJson = False) -> None:
    """Show which secrets there are; values are never shown."""
    found = Gateway().get("/v1/secrets")["items"]
    shown = output.table("name", "project", ">version", "last set")
    for secret in found:
        when = f"{output.age(secret['updated_at'])} ago"
        shown.add_row(secret["name"], secret["project"] or "(all)", str(secret["version"]), when)
    output.tell(found, as_json, shown if found else "no secrets")


def set_secret(
    name: SecretName,
    project: Project = None,
    from_file: Annotated[
        Path | None, typer.Option(help="A file whose whole content is the value.", show_default=False)
    ] = None,
) -> None:
    """Set a secret: prompt for its value, or read it from standard input (less one line break at the end) or a file."""
    if from_file is not None:
        value = text_of(from_file)
    elif sys.stdin.isatty():
        value = getpass.getpass(f"Value of {name}: ")
    else:
        value = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise CliError(f"the value of {name} is empty; nothing was set", EXIT_USAGE)
    if len(value.encode(errors="replace")) > MAX_SECRET_BYTES:
        raise CliError(f"the value of {name} has more than {MAX_SECRET_BYTES:,} bytes; nothing was set", EXIT_USAGE)
    body = {"value": value, "project": project}
    stored = Gateway().call("PUT", f"/v1/secrets/{checked_name(name, 'secret')}", body=body)
    whose = f" for project {project}" if project else ""
    console.print(f"{name} is set{whose} (version {stored['version']})")


def delete_secret(name: SecretName, project: Project = None) -> None:
    """Delete a secret; running jobs keep its value."""
    Gateway().call("DELETE", f"/v1/secrets/{checked_name(name, 'secret')}", project=project)
    console.print(f"{name} is deleted")
