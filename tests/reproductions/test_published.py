"""What pages of results say is what the code does: cheap parts of their tables, made again.

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``. ``CELLS`` names what makes some or all of its rows within
seconds; ``ELSEWHERE`` says of pages without any why they have none. A new page needs a line in one of them.
Where a part needs data that the repository does not hold, it is made from ``PAPER_DATA``, the folder of the commands on
those pages (by default ``shared/data`` beside the repository), and skipped without.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from reproductions import clover, freesh_day, iteration_times, powerflow, router
from services.simulator.experiments.cell import run_cell
from services.simulator.experiments.plan import load_experiment
from services.simulator.inference.run import Scheme

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "results"
MARK = re.compile(r"<!-- ([\w-]+)[\w ]* -->\n(.*?)<!-- end -->", re.DOTALL)
Table = tuple[str, str]
"""The name of a page and that of a table in it."""


def data() -> Path:
    """Return the folder of the papers' data."""
    places = [parent / "shared" / "data" for parent in ROOT.parents]
    if given := os.environ.get("PAPER_DATA"):
        places = [Path(given)]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        pytest.skip("needs the papers' data: name their folder in PAPER_DATA")
    return found


def clover_row() -> str:
    """Return a scheme that needs no search on the second trace."""
    trace = clover.TRACES[1]
    found = clover.mean_run(clover.SEEDS[:1], carbon=trace, scheme=Scheme.CO2OPT)
    carbon, accuracy = f"{-found['carbon_saving_pct']:+.1f} %", f"{-found['accuracy_loss_pct']:+.2f} %"
    return f"| {trace}, CO2OPT | {carbon} | {accuracy} | {found['p95_over_sla']:.3f} | {found['objective_mean']:.2f} |"


def published_pools() -> str:
    """Return the table of the authors' problems, solved again."""
    return freesh_day.published(data(), freesh_day.read(data()))


CELLS: dict[Table, Callable[[], str]] = {
    ("clover", "schemes"): clover_row,
    ("freesh-pools", "published"): published_pools,
    ("powerflow", "h200"): lambda: powerflow.h200(data() / "profiles"),
    ("a-srpt", "speeds"): lambda: iteration_times.errors_table(list(iteration_times.speeds(data() / "profiles"))),
    ("a-srpt", "heavy"): lambda: iteration_times.heavy_table(list(iteration_times.speeds(data() / "profiles"))),
    ("router", "places"): lambda: router.places_table(data()),
}
SIMULATIONS: dict[str, tuple[str, str, str, str]] = {
    "green": ("green-day", "GREEN", "August 8", "GB"),
    "joint": ("joint-weeks", "joint", "July", "GB"),
}
"""Of pages whose rows are means of many simulations, one: experiment, policy, trace and zone. Its figures are in
``PAGE-cells.csv.gz``."""
ELSEWHERE: dict[str, str] = {
    "forecasts": "a year of forecasts by zone; no part is cheap",
    "freesh-serving": "each row is hours of requests with several seeds",
    "traffic": "each row fits forecasters many times over",
}


@cache
def tables(page: str) -> dict[str, str]:
    """Return the tables of a page by name."""
    return {mark[1]: mark[2] for mark in MARK.finditer((PAGES / f"{page}.md").read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), CELLS)
def test_a_page_says_what_the_code_does(page: str, name: str) -> None:
    made = [line for line in CELLS[page, name]().splitlines() if line.startswith("|")]

    assert made
    assert [line for line in made if line not in tables(page)[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", SIMULATIONS)
def test_a_simulation_behind_a_page_gives_its_figures(page: str) -> None:
    name, label, trace, zone = SIMULATIONS[page]
    wanted = (label, trace, zone, "direct", 1)
    (cell,) = (
        each
        for each in load_experiment(ROOT / "examples" / "experiments" / f"{name}.toml").cells()
        if (each.choice.label, each.trace.label, each.zone, each.signal, each.seed) == wanted
    )
    with gzip.open(PAGES / f"{page}-cells.csv.gz", "rt", encoding="utf-8") as text:
        (row,) = (
            row
            for row in csv.DictReader(text)
            if (row["experiment"], row["policy"], row["trace"], row["zone"], row["signal"], row["seed"])
            == (name, label, trace, zone, "direct", "1")
        )
    summary = run_cell(cell)["summary"]

    for figure in ("carbon_kg", "energy_kwh", "avg_jct_s", "p99_jct_s", "preemptions"):
        assert summary[figure] == pytest.approx(float(row[figure]), rel=1e-6), figure


def test_every_page_of_tables_is_made_again_or_says_why_not() -> None:
    pages = {page.stem for page in PAGES.glob("*.md") if tables(page.stem)}

    assert pages - {page for page, _ in CELLS} - set(SIMULATIONS) == set(ELSEWHERE)
    assert [(page, name) for page, name in CELLS if name not in tables(page)] == []
