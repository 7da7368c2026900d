"""Files that docstrings, comments and documents name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_imports import ROOT, modules

TREES = "carbon_service|deploy|docs|examples|gateway|gpu_agent|lab|migrations|optimizer_service|services|tests"
CITED = re.compile(rf"(?<![\w/.{{}}-])((?:{TREES})/[\w./-]*\w)(?P<open>[/\w.-]*[*{{<])?")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
DOCUMENTS = ("*.md", "docs/**/*.md", "lab/**/*.md", "lab/**/*.toml", "examples/**/*.toml", "deploy/**/*")
OTHERS = {"CHANGELOG.md", "CONTRIBUTING.md"}
"""Tell of files as they were, and of files to be made, which `test_contributing.py` makes."""


def absent(text: str) -> list[str]:
    """Return the paths of ours that a text names and that are not there; ``a/b*`` stands for what begins so."""
    found: list[str] = []
    for cited in CITED.finditer(text):
        path = cited[1]
        is_there = any(ROOT.glob(f"{path}*")) if cited["open"] else (ROOT / path).exists()
        if not is_there:
            found.append(path)
    return found


def sources() -> Iterator[Path]:
    """Every module, and every document that is kept up to date."""
    yield from (path for _, path in modules())
    for pattern in DOCUMENTS:
        found = (path for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc")
        yield from (path for path in found if path.name not in OTHERS)


def test_every_file_that_is_named_exists() -> None:
    cited = {path: path.read_text(encoding="utf-8") for path in sources()}

    assert sum(len(CITED.findall(text)) for text in cited.values()) >= 50
    assert {str(path.relative_to(ROOT)): gone for path, text in cited.items() if (gone := absent(text))} == {}


def test_every_link_of_a_document_leads_to_a_file() -> None:
    links = [(path, link) for path in sources() if path.suffix == ".md" for link in LINK.findall(path.read_text())]

    assert len(links) >= 20
    assert [(path.name, link) for path, link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("see ``tests/unit/core/test_nowhere.py``", ["tests/unit/core/test_nowhere.py"]),
        ("`services/core/nothing/` and docs/architecture.md", ["services/core/nothing"]),
        ("lab/examples/green*.toml, lab/examples/blue*.toml", ["lab/examples/blue"]),
        ("https://example.org/tests/there.py and theirs/docs/there.md", []),
        ("lab/results/a-srpt.md, lab/results/a-srpt.md's tables", []),
    ],
)
def test_a_file_that_is_not_there_is_seen(text: str, gone: list[str]) -> None:
    assert absent(text) == gone
