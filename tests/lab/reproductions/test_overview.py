"""The page of all results is what its program makes of the figures beside the other pages."""

from __future__ import annotations

from statistics import fmean

import pytest

from lab.reproductions.overview import year, year_picture, year_table
from tests.support.published import PAGES, body, tables


def test_the_table_of_the_year_is_that_of_the_figures() -> None:
    assert body(tables("README")["year"]) == body(year_table(year(PAGES)))


def test_the_picture_of_the_year_is_that_of_the_figures() -> None:
    assert (PAGES / "year.svg").read_text(encoding="utf-8") == year_picture(year(PAGES))


def test_the_readme_says_what_the_table_says() -> None:
    """Its figures are rounded from the same."""
    rows = {
        "the same scheduler on nodes that sleep": "Tiresias (LAS), nodes sleep",
        "... with power limits by Zeus, never asleep": "Zeus + Tiresias",
        "GREEN, as measured here": "GREEN",
        "**`joint`, the default**": "joint, the default",
        "`joint`, tuned to this cluster, jobs may end up to 12 h later": "joint, 12 h slack",
    }
    check(rows, year(PAGES), "| policy | carbon | mean completion time |")


def test_the_readme_says_what_each_of_its_conditions_is_worth() -> None:
    rows = {
        "power limits by Zeus, and nodes that sleep": "Zeus + Tiresias, nodes sleep",
        "**`joint`, the default**": "joint, the default",
        "... where no user lets the batch follow": "joint, nobody tunes batches",
        "... on nodes that never sleep": "joint without sleep",
        "... without power limits": "joint without power limits",
        "... with GREEN's levers alone": "joint with GREEN's levers alone",
    }
    check(rows, year(PAGES, [("joint", "joint-default")]), "| two weeks of July, five grids | carbon")


def check(rows: dict[str, str], of: dict[str, dict[str, list[float]]], head: str) -> None:
    """Compare rows of the README's table with this head with figures, by the policy that each is of."""
    said = (PAGES.parents[1] / "README.md").read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0]
    for row, policy in rows.items():
        line, *_ = (line for line in said.splitlines() if line.startswith(f"| {row}"))
        shown = [cell.strip(" *%") for cell in line.split("|")[2:4]]
        changes = [100 * (fmean(of[policy][figure]) - 1) for figure in ("carbon_kg", "avg_jct_s")]
        assert [float(cell) for cell in shown] == pytest.approx(changes, abs=0.51), row
