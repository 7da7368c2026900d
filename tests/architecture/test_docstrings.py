"""Where a docstring names the test that shows an effect, there is such a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.test_imports import ROOT, modules

NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def missing(source: str, root: Path) -> list[str]:
    """Return the tests that a source names and that are not there."""
    return [
        f"{file}::{test}"
        for file, test in NAMED.findall(source)
        if not (root / file).exists() or f"def {test}(" not in (root / file).read_text(encoding="utf-8")
    ]


def test_every_test_a_docstring_names_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for _, path in modules()]

    assert sum(len(NAMED.findall(source)) for source in sources) >= 4
    assert [name for source in sources for name in missing(source, ROOT)] == []


@pytest.mark.parametrize("name", ["tests/unit/nowhere.py::test_x", "tests/architecture/test_docstrings.py::test_x"])
def test_a_test_that_is_not_there_is_missed(name: str) -> None:
    assert missing(f'"""Shown by ``{name}``."""', ROOT) == [name]
