"""What messages tell people to type is what the command line reads."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from services.kit.plugins import load_plugins
from tests.support.commands import whole
from tests.support.servers import ROOT

ROOMS = ("services", "gateway", "gpu_agent", "carbon_service", "optimizer_service", "clients/python")
ADVICE = re.compile(r"(?:`|: |\n +)(?:\.venv/bin/)?(wattshift (?!\{)[^`\n]*)")
COMMAND: Any = whole()
for group in load_plugins("wattshift.commands", typer.Typer):  # the lab's
    COMMAND.add_command(get_command(group.value), group.name)
OPEN = ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage", "Exit: 0")
"""Errors of a line that is right as far as it goes, such as the name of a command."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the texts of a module, each with the number of its line; what is filled in is ``x``."""
    within: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            within.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.lineno, node.value


def advice() -> Iterator[tuple[str, str]]:
    """Return every line that a message shows, with its place."""
    for path in itertools.chain.from_iterable(sorted((ROOT / room).rglob("*.py")) for room in ROOMS):
        source = path.read_text(encoding="utf-8")
        for number, text in texts(ast.parse(source)) if "wattshift " in source else ():
            for found in ADVICE.finditer(text):
                yield f"{path.relative_to(ROOT)}:{number}", found[1]


def parse(words: list[str]) -> str:
    """Read a line as the command line does; return the kind of error, and what it says, if it does not."""
    command: Any = COMMAND
    context = None
    try:
        while True:
            context = command.make_context(words[0], list(words[1:]), parent=context)
            if not (below := getattr(command, "commands", None)):
                return (
                    ""
                    if not isinstance(given := context.params.get("file"), list | tuple) or len(given) < 2
                    else "several words before --"
                )
            words = [*context._protected_args, *context.args]
            if not words or words[0] == "x":  # the name of a command that is filled in
                return ""
            command = below[words[0]]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.sh", "train.py", "x"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "jobs.yaml").write_text("command: ['true']\n")


def test_every_line_that_a_message_shows_can_be_typed() -> None:
    shown = list(advice())

    wrong = [
        (place, line, said) for place, line in shown if (said := parse(shlex.split(line))) and not said.startswith(OPEN)
    ]

    assert not wrong, "\n".join(map(str, wrong))
    assert len(shown) > 60


def test_every_line_that_the_documentation_names_can_be_typed() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = [
        (page.name, line)
        for page in pages
        for line in re.findall(r"(?<!`)`(wattshift [^`]*)`", page.read_text(encoding="utf-8"))
    ]
    shown = [(page, line, shlex.split(" ".join(line.replace("...", "").split()))) for page, line in named]

    wrong = [(page, line, said) for page, line, words in shown if (said := parse(words)) and not said.startswith(OPEN)]

    assert not wrong, "\n".join(map(str, wrong))
    assert len(shown) > 100


@pytest.mark.parametrize(
    "line", ["wattshift nonsense", "wattshift jobs --nonsense", "wattshift submit train.sh x --hold"]
)
def test_a_line_that_cannot_be_typed_is_seen(line: str) -> None:
    said = parse(shlex.split(line))

    assert said
    assert not said.startswith(OPEN)
