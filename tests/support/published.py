"""Published pages of results as tables of texts, and what is run again to compare with them.

A table of a page stands between ``<!-- NAME -->`` and ``<!-- end -->``; a block of what a command printed counts as a
table too, under the name of its command's module.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from lab.experiments.cell import run_cell
from lab.experiments.plan import Cell, load_experiment

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "lab" / "results"
EXPERIMENTS = ROOT / "lab" / "examples"
MARK = re.compile(r"<!-- (?!end )([\w-]+)( \w+)? -->\n(.*?)<!-- end -->", re.DOTALL)
Table = tuple[str, str]
"""The name of a page and that of a table in it."""


def unchanged(text: str) -> str:
    """Return a text."""
    return text


def first(text: str) -> str:
    """Return the first of several figures in a cell, without its unit."""
    return text.split(",")[0].removesuffix(" h")


def but_for_rounding(text: str) -> str:
    """Return a text without differences in the last digits of a double."""
    return re.sub(r"[+-]\de-1[56]|\+0e\+00", "0", text)


@dataclass(frozen=True)
class Again:
    """What is run again of a table.

    Attributes:
        page, table: Where it stands.
        make: Returns the table, or some rows or columns of it, as Markdown.
        row: How the line begins, column by column without the bar in front; several where lines above it must be found
            first, one after the other. Empty: every line that is made stands in the table.
        column: Head of the one column that is compared; empty: the whole line.
        of: What of the cell, or of every line, is compared.
    """

    page: str
    table: str
    make: Callable[[], str]
    row: tuple[str, ...] = ()
    column: str = ""
    of: Callable[[str], str] = unchanged

    def check(self) -> None:
        """Assert that the page says what is made."""
        made, said = self.make(), tables(self.page)[self.table]
        if not self.row:
            lines, there = body(made), {self.of(line) for line in body(said)}
            assert lines, "nothing was made"
            assert [line for line in lines if self.of(line) not in there] == []
            return
        assert self.of(found(said, self.row, self.column)) == self.of(found(made, self.row, self.column))


@cache
def tables(page: str) -> dict[str, str]:
    """Return the tables of a page by name."""
    return {mark[1]: mark[3] for mark in MARK.finditer((PAGES / f"{page}.md").read_text(encoding="utf-8"))}


def body(table: str) -> list[str]:
    """Return the lines of Markdown tables less those of their heads."""
    lines = table.splitlines()
    ruled = [at for at, line in enumerate(lines) if re.fullmatch(r"\|[ :|-]+\|", line)]
    heads = {at - shift for at in ruled for shift in (0, 1)}
    return [line for at, line in enumerate(lines) if line.startswith("|") and at not in heads]


def found(table: str, row: Sequence[str], column: str = "") -> str:
    """Return a line of tables, or the cell of it in a column.

    Raises:
        LookupError: there is none.
    """
    head: list[str] = []
    wanted, lines = list(row), table.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if re.fullmatch(r"\|[ :|-]+\|", below):
            head = cells(line)
        if not line.removeprefix("| ").startswith(wanted[0]):
            continue
        wanted.pop(0)
        if not wanted:
            return cells(line)[head.index(column)] if column else line
    raise LookupError(f"no line {row} in {table}")


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def data() -> Path:
    """Return the folder of the papers' data, or skip the test."""
    places = [parent / "shared" / "data" for parent in ROOT.parents]
    if given := os.environ.get("PAPER_DATA"):
        places = [Path(given)]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        pytest.skip("needs the papers' data: name their folder in PAPER_DATA")
    return place


def part(module: ModuleType, make: Callable[[], Any], **constants: Any) -> Any:
    """Return what a reproduction makes with fewer values in some of its module's constants."""
    with patch.multiple(module, **constants):
        return make()


def cell(experiment: str, label: str, trace: str = "", *, zone: str = "", signal: str = "", seed: int = 1) -> Cell:
    """Return the first cell of an experiment with this policy; of a trace, zone and signal where they are given."""
    return next(
        each
        for each in load_experiment(EXPERIMENTS / f"{experiment}.toml").cells()
        if (each.choice.label, each.seed) == (label, seed)
        and trace in ("", each.trace.label)
        and zone in ("", each.zone)
        and signal in ("", each.signal)
    )


@cache
def ran(experiment: str, label: str, trace: str = "", seed: int = 1) -> dict[str, Any]:
    """Return what a cell of an experiment comes to."""
    return run_cell(cell(experiment, label, trace, seed=seed))


def figures(page: str) -> list[dict[str, str]]:
    """Return the figures of every simulation behind a page, as they are kept beside it."""
    with gzip.open(PAGES / f"{page}-cells.csv.gz", "rt", encoding="utf-8") as text:
        return list(csv.DictReader(text))
