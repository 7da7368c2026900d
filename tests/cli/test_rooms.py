"""Commands load the module that has them, and nothing of the others; their help is shown whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
from rich.text import Text

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


def commands(path: str, command: Any, above: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield every command with its words, groups too."""
    yield path, command
    inside = typer.Context(command, info_name=path, parent=above)
    for name in command.list_commands(inside) if hasattr(command, "list_commands") else ():
        yield from commands(f"{path} {name}", command.get_command(inside, name), inside)


def test_no_help_loses_what_stands_in_brackets() -> None:
    """Help is Rich markup: a bracket that could begin a style vanishes with what is in it unless it is escaped."""
    lost = [
        (path, text)
        for path, command in commands("wattshift", typer.main.get_group(app))
        for text in (command.help, command.epilog, *(getattr(each, "help", None) for each in command.params))
        if text and Text.from_markup(text).plain != text.replace("\\[", "[")
    ]
    assert lost == []


def test_no_number_is_written_as_python_alone_reads_it() -> None:
    wrong = list[tuple[str, str]]()
    for path, command in commands("wattshift", typer.main.get_group(app)):
        context = typer.Context(command, info_name=path)
        for each in command.params:
            many = each.multiple if hasattr(each, "multiple") else each.nargs != 1
            given = (["50"], ["5_0"]) if many else ("50", "5_0")
            try:
                read = each.process_value(context, given[0])
                is_number = type(read[0] if isinstance(read, list | tuple) else read) in (int, float)
            except Exception:  # no number, or one below 50
                continue
            if is_number:
                try:
                    each.process_value(context, given[1])
                except typer.BadParameter:
                    continue
                wrong.append((path, each.name))
    assert wrong == []


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
