"""Commands load the module that has them, and nothing of the others."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer

from services.cli.main import ROOM_OF, ROOMS, app

LOADED = (
    "import sys, services.cli.main; services.cli.main.app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_registers_the_commands_that_it_is_loaded_for(room: str) -> None:
    found = typer.Typer()
    import_module(f"services.cli.{room}").register(found)
    assert tuple(typer.main.get_group(found).commands) == ROOMS[room]


def test_each_command_is_in_the_help_once() -> None:
    group = typer.main.get_group(app)
    names = group.list_commands(typer.Context(group))
    assert sorted(names) == sorted(set(names))
    assert set(ROOM_OF) <= set(names)


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["--version"], {"httpx", "pydantic", "numpy"}),
        (["jobs", "--help"], {"numpy", "services.cli.jobs.submit", "services.contracts.schema", "wattshift.models"}),
    ],
)
def test_what_a_command_needs_not_is_not_loaded(words: list[str], without: set[str]) -> None:
    asked = [sys.executable, "-c", LOADED, *words]
    printed = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    assert not without & set(printed.splitlines()[-1].split())
