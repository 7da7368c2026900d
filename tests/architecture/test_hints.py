"""What a caller lets a round leave out for its speed is no business of policies."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "services/core"
READER = CORE / "cycle/rounds.py"


def reads_hints(source: str) -> bool:
    """Whether this source reads an attribute called ``hints``."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "hints" and isinstance(node.ctx, ast.Load)
        for node in ast.walk(ast.parse(source))
    )


def test_one_module_alone_reads_the_hints_of_a_round() -> None:
    readers = {path for path in CORE.rglob("*.py") if reads_hints(path.read_text())}

    assert readers == {READER}


@pytest.mark.parametrize(
    ("source", "reads"), [("snapshot.hints.reasons", True), ("Snapshot(hints=given)", False), ("hints = 1", False)]
)
def test_a_read_is_told_from_a_keyword(source: str, reads: bool) -> None:
    assert reads_hints(source) is reads
