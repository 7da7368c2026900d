"""The scheduler's rooms import each other in one direction, so that each can be read without the ones that use it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from services import scheduler

FOLDER = Path(scheduler.__path__[0])

ROOMS = {
    "repository": set[str](),
    "power": {"repository"},
    "learning": {"repository", "power"},
    "ingest": {"repository", "power"},
    "engines": {"repository", "ingest"},
    "grid": {"repository"},
    "planning": {"repository", "power", "learning", "ingest", "engines", "grid"},
    "explaining": {"repository", "power", "learning", "ingest", "grid", "planning"},
}
"""Per room the others that it may import; ``FREE`` ones are free to all."""

FREE = {"commands", "counters", "failures", "reasons", "settings"}


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("services.scheduler"):
            inside = (node.module or "").split(".")[2:]
            found |= {inside[0]} if inside else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_rests_on(room: str) -> None:
    files = sorted((FOLDER / room).glob("*.py"))
    assert len(files) > 1
    for path in files:
        assert imported_rooms(path) <= ROOMS[room] | FREE | {room}, path.name


def test_the_repository_knows_no_settings() -> None:
    assert all(imported_rooms(path) <= {"repository"} for path in (FOLDER / "repository").glob("*.py"))


def test_every_folder_is_a_room() -> None:
    assert {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()} == set(ROOMS)
