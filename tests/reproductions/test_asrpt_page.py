"""What A-SRPT's page says is what the code does: a cheap cell of its tables, run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproductions.asrpt_forest import WAYS, compared
from reproductions.asrpt_layouts import by_layout
from services.simulator.experiments.cell import run_cell
from services.simulator.experiments.plan import load_experiment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "a-srpt.md").read_text(encoding="utf-8")


def rows(name: str) -> dict[str, list[str]]:
    """Return a table of the page, its cells by the first one of their row."""
    table = PAGE.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0]
    cells = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "label"),
    [
        ("a-srpt-small", "a-srpt"),
        ("a-srpt-small", "a-srpt, machine runs"),
        ("a-srpt-small", "wcs-duration"),
        ("a-srpt-jobs", "a-srpt"),
    ],
)
def test_a_policy_has_the_mean_completion_time_of_the_page(experiment: str, label: str) -> None:
    cells = load_experiment(ROOT / "examples" / "experiments" / f"{experiment}.toml").cells()

    found = run_cell(next(cell for cell in cells if cell.choice.label == label and cell.seed == 1))

    assert rows(experiment)[label][0].startswith(f"{found['summary']['avg_jct_s'] / 3_600.0:.2f}")


@pytest.mark.slow
def test_layouts_and_ways_to_predict_are_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(WAYS) - {"mean of the group", "median of the group"}:  # forests take a minute
        monkeypatch.delitem(WAYS, name)

    assert all(line in PAGE for line in (*by_layout().splitlines(), *compared().splitlines()))
