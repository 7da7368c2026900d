"""All commands of the command line at once, which loads them as each is named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from services.cli.main import ROOMS, wattshift


def whole() -> Any:
    """Return the group of all commands."""
    found = typer.Typer()
    found.callback()(wattshift)
    for room in ROOMS:
        import_module(f"services.cli.{room}").register(found)
    return typer.main.get_group(found)
