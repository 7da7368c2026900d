"""``wattshift cells``: other installations that run jobs of this one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import AsJson, Group
from services.cli.output import console
from services.cli.values import text_of

Name = Annotated[str, typer.Argument(metavar="CELL", help="Its name here.")]


def register(app: typer.Typer) -> None:
    Group(app, "cells", "Show the installations that run jobs of this one; add, drain or remove one.", list_cells).add(
        add_cell, drain_cell, undrain_cell, remove_cell
    )


def list_cells(as_json: AsJson = False) -> None:
    """Show the cells, what waits and runs there, and what jobs of this installation used there."""
    found = Gateway().get("/v1/cells")["items"]
    shown = output.table("cell", "state", ">waiting", ">running", ">energy", ">CO2", "address")
    energies = output.energies(each["energy_j"] for each in found)
    emissions = output.emissions(each["carbon_gco2"] for each in found)
    for cell, energy, carbon in zip(found, energies, emissions, strict=True):
        counts = str(cell["waiting"]), str(cell["running"])
        shown.add_row(cell["name"], _state(cell), *counts, energy, carbon, cell["url"])
    output.tell(found, as_json, shown if found else "no cells")
    if not as_json:
        for cell in found:
            if cell["problem"]:
                console.print(f"{cell['name']}: {cell['problem']}")


def _state(cell: dict[str, Any]) -> str:
    if cell["heard_at"] is None:
        return "new"
    heard = "heard" if cell["problem"] is None else f"[red]problem[/], heard {output.age(cell['heard_at'])} ago"
    return f"draining, {heard}" if cell["draining"] else heard


def add_cell(
    name: Name,
    url: Annotated[str, typer.Option(help="Address of its gateway.")],
    key_file: Annotated[
        Path, typer.Option(help="File with a key of the role user that was made there for this alone.")
    ],
    as_json: AsJson = False,
) -> None:
    """Have another installation run jobs of this one that may run there (submit --cells)."""
    body = {"name": name, "url": url, "key": text_of(key_file).strip()}
    made = Gateway().call("POST", "/v1/cells", body=body)
    words = f"{name} is a cell: jobs run there as {made['tenant_id']}'s"
    output.tell(made, as_json, words + (f", in the project {made['project']}" if made["project"] else ""))


def drain_cell(name: Name) -> None:
    """Give a cell no new jobs; those that were not started there move elsewhere."""
    _change(name, draining=True)


def undrain_cell(name: Name) -> None:
    """Use a cell again that was drained."""
    _change(name, draining=False)


def _change(name: str, *, draining: bool) -> None:
    found = Gateway().call("PATCH", f"/v1/cells/{name}", body={"draining": draining})
    left = f"; running there: {found['running']}, waiting: {found['waiting']}" if draining else ""
    console.print(f"{name} is {'drained' if draining else 'used again'}{left}")


def remove_cell(
    name: Name,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="It is gone for good and runs nothing any more: its jobs begin anew elsewhere."),
    ] = False,
) -> None:
    """Remove a cell that has no jobs of this installation any more."""
    Gateway().call("DELETE", f"/v1/cells/{name}", lost=lost or None)
    console.print(f"{name} is removed")
