"""`wattshift factors`: values for reports that the ledger does not have, from a catalogue with the source of each."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from services.cli import output
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import console
from services.cli.reports.forms import Facts
from services.cli.values import made, text_of

CATALOGUE: dict[str, Any] = json.loads(Path(__file__).with_name("factors.json").read_text())
app = typer.Typer(help="Values for reports that the ledger does not have.", invoke_without_command=True)


@app.callback()
def factors(context: typer.Context) -> None:
    """Show the catalogue, and where to get what is not in it."""
    if context.invoked_subcommand is not None:
        return
    shown = output.table("factor", "of", ">value", "source")
    for kind, values in CATALOGUE.items():
        for name, factor in values.items() if kind != "unknown" else ():
            shown.add_row(kind, name, f"{factor['value']:g} (estimate)", factor["source"])
    console.print(shown)
    for kind, where in CATALOGUE["unknown"].items():
        console.print(f"[dim]{kind}: {where}[/]")


@app.command()
def add(
    file: Annotated[
        Path, typer.Argument(help="The facts that `report --as FORM --facts FILE` reads; made if missing.")
    ],
    source: Annotated[Literal["catalogue"], typer.Option("--from", help="What is added.")] = "catalogue",
) -> None:
    """Add the catalogue's values, marked as estimates, to a file of facts; values already in the file stay."""
    known = read_facts(file).model_dump(mode="json", exclude_unset=True) if file.exists() else {}
    for kind, values in CATALOGUE.items():
        if kind != "unknown":
            known[kind] = {**values, **known.get(kind, {})}
    with made(file) as part:
        part.write_text(json.dumps(known, indent=2) + "\n")
    console.print(f"wrote {file}")


def read_facts(file: Path) -> Facts:
    """Return the facts of a file; ``CliError`` names what is not a fact in it."""
    try:
        return Facts.model_validate_json(text_of(file))
    except ValidationError as error:
        first = error.errors()[0]
        raise CliError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}", EXIT_USAGE) from None


def register(parent: typer.Typer) -> None:
    """Add the commands to the command line."""
    parent.add_typer(app, name="factors")
