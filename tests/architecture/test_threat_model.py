"""Each line of the threat model names its tests, and these are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.test_imports import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(test_\w+)`|`(tests/[\w/]+\.py)`")


def lines_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each row of the tables whose last column is headed `test`, and what that column says."""
    is_model = False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_model = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == "test":
            is_model = True
        elif is_model and not set(cells[-1]) <= set("-: "):
            yield line, cells[-1]


def lacking(text: str) -> list[str]:
    """Return the rows that name no test, a test without its file, or one that is not in it.

    A test stands in the file that is named after it, as in `test_a` and `test_b` (`tests/x/test_y.py`).
    """
    found: list[str] = []
    for line, cell in lines_of(text):
        waiting: list[str] = []
        checked = 0
        for test, file in NAMED.findall(cell):
            if test:
                waiting.append(test)
                continue
            there = names_in(file)
            checked += bool(there)
            found += [f"{test} in {file}" for test in waiting if test not in there]
            waiting = []
        if waiting or not checked:
            found.append(line)
    return found


def names_in(file: str) -> set[str]:
    """Return the names of a file's tests; none where there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return set()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_")}


def test_every_line_of_the_threat_model_names_a_test_that_is_there() -> None:
    assert len([*lines_of(TEXT)]) >= 30
    assert lacking(TEXT) == []


def test_every_attack_is_in_the_table_of_its_room() -> None:
    room = ROOT / "tests" / "attacks"
    rows = [cell for _, cell in lines_of((room / "README.md").read_text(encoding="utf-8"))]
    named = {file for cell in rows for file in re.findall(r"\]\(([\w./]+\.py)\)", cell)}
    assert {path.name for path in room.glob("test_*.py")} <= named
    assert [file for file in named if not (room / file).is_file()] == []


def test_what_names_none_is_found() -> None:
    head = "| who | cannot | test |\n|---|---|---|\n"
    here = "`tests/architecture/test_threat_model.py`"
    wrong = (
        "| a | b | the same |",
        f"| a | b | `test_gone` ({here}) |",
        "| a | b | `test_alone` |",
        "| a | b | `tests/x.py` |",
    )
    right = (f"| a | b | {here}, of all |", f"| a | b | `test_what_names_none_is_found` ({here}) |")

    assert [len(lacking(head + row)) for row in wrong] == [1, 1, 1, 1]
    assert [lacking(head + row) for row in right] == [[], []]
