"""One word for one thing, and the field's own: in names, docstrings, comments, messages and docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.rules import nodes_of
from tests.architecture.test_imports import ROOT

FOLDERS = (
    *("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "lab", "tools"),
    *("tests", "examples", "clients", "deploy", "docs"),
)
ALONE = ("README.md", "CONTRIBUTING.md", "docker-compose.yml")
SUFFIXES = {".py", ".md", ".yml", ".yaml", ".json", ".toml", ".service", ".example"}
BEGIN, END = r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))", r"(?![a-z])"
"""A word in prose, in snake_case and in CamelCase alike."""
INSTEAD = {
    r"foretold|foretell(s|ing)?|Foretold|Foretell(s|ing)?": "predicted, predicts",
    r"keepers?|Keepers?": "controller",
    r"[Ss]tanding[ -][Ss]ervices?|StandingServices?": "service instance",
    r"desks?|Desks?": "work queue",
    r"Judge": "resolver, criterion",
    r"deaf|Deaf|untold|Untold": "unacknowledged",
    r"wires?|Wires?": "exchange, JSON, protocol",
    r"Verbs?|verbs?": "command, method",
    r"([Cc]onnection|[Tt]hread|[Pp]rocess|GPU|gpu)[ _]pools?|pools? of (connections|threads|processes|GPUs|nodes)": (
        "connections, executor, GPU model: a pool is one of model servers"
    ),
    r"time slices?|slices? of time|(a|the|its|all|first) slices?(?= (begins|ends|of a measurement))": (
        "interval, quantum: a slice is one of MIG"
    ),
    r"[Tt]wice is as good as once|is told of operators|heard of operators": "say it plainly",
}
"""Regular expression -> what to say."""
WORDS = [(re.compile(f"{BEGIN}({pattern}){END}"), say) for pattern, say in INSTEAD.items()]
ANY = re.compile("|".join(pattern for pattern in INSTEAD))
FIXED = re.compile(
    r"""standing_service             # a reason code of the public API
    | \bwire_format\b
    | celery\ pool|billiard\.pool
    | "verbs":|\["verbs"\]|\bverbs:\ \[  # a field of Kubernetes' API
    """,
    re.VERBOSE,
)
"""Names that are not ours to choose any more: released fields and codes, other projects' names."""
NOT_READ = (
    "tests/architecture/test_words.py",
    "lab/reproductions/asrpt.py",  # reads results of an earlier version, in its words
    "lab/results/",  # measured pages quote the words of the commands that made them
)
ONLY_ONE = ("Step", "Grid")


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text of ours that the rule is for, by its path."""
    alone = [ROOT / name for name in ALONE]
    for path in (*alone, *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith(NOT_READ):
            yield name, path.read_text(encoding="utf-8")


def wrong_words(text: str) -> list[tuple[int, str, str]]:
    """Return (line, word, what to say instead)."""
    found: list[tuple[int, str, str]] = []
    lines = text.splitlines() if ANY.search(text) else []
    for number, line in enumerate(lines, start=1):
        shown = FIXED.sub("", line)
        found += [(number, match[0], say) for word, say in WORDS for match in word.finditer(shown)]
    return found


def test_the_words_are_the_fields_own() -> None:
    wrong = [
        f"{name}:{line}: {word!r}: {instead}" for name, text in texts() for line, word, instead in wrong_words(text)
    ]

    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "what was foretold of it",
        "class PoolKeeper:",
        "self._keeper = None",
        "a standing service",
        "class StandingServiceTable:",
        "shares that are deaf",
        "from gateway import wire",
        "a connection pool",
        "gpu_pool = {}",
        "a time slice",
        "Twice is as good as once.",
    ],
)
def test_a_wrong_word_is_seen(text: str) -> None:
    assert len(wrong_words(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        'reason = "standing_service"',
        "timekeepers and bookkeeping",
        "wireless, rewired",
        "a pool of model servers",
        "a MIG slice",
        "values[slice(0, 3)]",
        "desktop",
    ],
)
def test_a_right_word_is_let_be(text: str) -> None:
    assert wrong_words(text) == []


@pytest.mark.parametrize("name", ONLY_ONE)
def test_a_name_that_says_little_is_taken_once(name: str) -> None:
    places = [
        path.relative_to(ROOT).as_posix()
        for folder in ("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in nodes_of(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]

    assert len(places) <= 1, places


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are neither of a table, a code block nor a link that cannot be broken."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|") and not re.fullmatch(r"\s*\S{100,}\s*", line):
            yield number, line


def test_docs_wrap_at_120_characters() -> None:
    pages = [
        *sorted(page for room in ("docs", "lab") for page in (ROOT / room).rglob("*.md")),
        *(ROOT / name for name in ALONE if name.endswith(".md")),
    ]
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)}"
        for page in pages
        for number, line in _prose(page)
        if len(line) > 120
    ]

    assert long == []
