"""What pages of results and of docs say is what the code does: of every published table something cheap is run again.

``AGAIN`` (``tests/support/published_tables.py``) says what of which table: a figure of a page that is changed by hand,
and code that has come to give another, both fail. ``SIMULATIONS`` are the tables whose rows are means of many
simulations: one of these is run again and compared with the figures kept beside the page, and the table is made again
of all of them. ``MEASURED`` are those of processor times alone, which no second run repeats, and ``DERIVED`` those that
are made of other tables. A new table needs a line in one of the four. What needs data that the repository does not hold
takes them from ``PAPER_DATA``, the folder of the commands on those pages (by default ``shared/data`` beside the
repository), and is skipped without.
"""

from __future__ import annotations

import re

import pytest

from lab.experiments.cell import run_cell
from lab.report.markdown import KINDS, kept_cells
from tests.benchmarks import bench_peers
from tests.support.published import MARK, PAGES, ROOT, Again, Table, body, cell, figures, found, tables
from tests.support.published_tables import AGAIN

SIMULATIONS: dict[Table, tuple[str, str, str, str]] = {
    ("green", "green-reconstruction"): ("GREEN", "150 W once per job, August 8", "GB", "direct"),
    ("green", "green-waiting"): ("GREEN", "waiting GPUs draw 30 %, August 8", "PL", "direct"),
    ("green", "green-day"): ("GREEN", "August 8", "GB", "direct"),
    ("green", "green-year"): ("GREEN", "2023", "GB", "direct"),
    ("green", "green-slack"): ("slack 12 h, forecasts as issued", "two weeks from July 10", "SE", "direct"),
    ("green", "green-day-users"): ("GREEN+", "August 22", "SE", "direct"),
    ("green", "green-quarter-users"): ("GREEN+, 1 GPU", "April to June", "SE", "direct"),
    ("green", "green-quarter-busy"): ("SRTF (perfect)", "April to June", "GB", "direct"),
    ("green", "green-starvation"): ("GREEN, nobody starves", "April", "GB", "direct"),
    ("green", "green-ablations"): ("theta 1", "August 8", "SE", "lifecycle"),
    ("green", "green-settings"): ("GREEN, step back", "users' gangs", "SE", "direct"),
    ("joint", "joint-weeks"): ("joint", "July", "GB", "direct"),
    ("joint", "joint-year"): ("Tiresias (LAS), nodes sleep", "2023", "GB", "direct"),
    ("joint", "joint-day-seeds"): ("joint", "August 8", "GB", "direct"),
    ("joint", "joint-levers"): ("joint without batches", "July", "SE", "direct"),
    ("joint", "joint-a-srpt"): ("joint", "1 Gb/s", "GB", "direct"),
    ("joint", "joint-untuned"): ("joint, 12 h slack, 130 Wh per hour", "July", "GB", "direct"),
    ("joint", "joint-cloud-bound"): ("joint, 24 h, carbon alone", "a week from July 1", "GB", "direct"),
    ("joint", "joint-cloud"): ("joint, 24 h, carbon alone", "a week from July 1", "GB", "direct"),
    ("joint", "joint-quantiles"): (
        *("joint, 12 h slack, lengths by the 0.9 quantile", "A-SRPT's trace, 2.4 h, 80x8 V100", "GB", "direct"),
    ),
    ("joint", "joint-day"): ("joint", "August 8", "GB", "direct"),
    ("joint", "joint-day-levers"): ("joint without order", "August 8", "GB", "direct"),
    ("joint", "joint-users-levers"): ("joint without width", "August 8", "SE", "direct"),
    ("joint", "joint-powerflow-levers"): ("joint, 1,000 Wh per hour, without sleep", "day", "GB", "direct"),
    ("joint", "joint-cloud-levers"): ("joint, 24 h, carbon alone, without hours", "a week from July 1", "SE", "direct"),
    ("joint", "joint-unseen-levers"): ("joint without limits", "three days of October, 12x4 V100", "CA-ON", "direct"),
    ("joint", "joint-intensity"): (
        *("joint, 12 h slack, intensity by the 0.75 quantile", "the day, August 8", "SE", "direct"),
    ),
    ("joint", "joint-a-srpt-levers"): ("joint without seats", "10 Gb/s", "GB", "direct"),
    ("joint", "joint-year-levers"): ("joint, 12 h slack, without hours", "October", "SE", "direct"),
    ("joint", "joint-year-bound"): ("joint, 24 h slack", "October", "CA-ON", "direct"),
    ("joint", "joint-users"): ("joint", "August 8", "GB", "direct"),
    ("joint", "joint-powerflow-day"): ("joint, 300 Wh per hour", "day", "GB", "direct"),
    ("joint", "joint-powerflow-day-seeds"): ("joint, 1,000 Wh per hour", "day", "GB", "direct"),
    ("joint", "joint-gap"): ("joint, 12 h slack", "April", "GB", "direct"),
    ("joint", "joint-together"): ("carbon alone, 24 h, as it comes", "a cloud, a week from July 1", "GB", "direct"),
    ("joint", "joint-scarce"): ("12 h, as it comes", "32x2, two weeks in April", "GB", "direct"),
    ("joint", "joint-default"): ("joint, the default", "July", "GB", "direct"),
    ("joint", "joint-year-default"): ("joint, the default", "2023", "GB", "direct"),
    ("joint", "joint-unseen"): ("joint", "six hours of PowerFlow's day, 16x8 A100", "CA-ON", "direct"),
}
"""Policy, trace, zone and signal of the simulation that is run again."""
MEASURED: dict[Table, str] = {("traffic", "speed"): "processor times"}
DERIVED: dict[Table, str] = {
    ("first-days", "grids"): "the grids of a copy of CarbonX",
    ("first-days", "folds"): "a training for each quarter of the grids of a copy of CarbonX",
    ("README", "year"): "figures kept beside other pages; made again by test_overview.py",
}
TEXT: dict[str, str] = {
    "control-plane": "times of the live system, by benchmarks",
    "mutations": "a survey of tests, by hours of runs",
    "simulator": "processor times; the completion times beside them are checked below",
}
"""Pages without marked tables, and why none of them is made again here."""


@pytest.mark.slow
@pytest.mark.parametrize("again", AGAIN, ids=lambda again: f"{again.page}-{again.table}-{again.column or 'lines'}")
def test_a_page_says_what_the_code_does(again: Again) -> None:
    again.check()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), SIMULATIONS)
def test_a_simulation_behind_a_table_gives_its_figures(page: str, name: str) -> None:
    label, trace, zone, signal = SIMULATIONS[page, name]
    kept, *_ = (
        row
        for row in figures(page)
        if (row["experiment"], row["policy"], row["trace"], row["zone"], row["signal"])
        == (name, label, trace, zone, signal)
    )

    of_seed = cell(name, label, trace, zone=zone, signal=signal, seed=int(kept["seed"]))
    summary = run_cell(of_seed)["summary"]

    for figure in ("carbon_kg", "energy_kwh", "avg_jct_s", "p99_jct_s", "peak_power_w", "preemptions"):
        assert summary[figure] == pytest.approx(float(kept[figure]), rel=1e-6), figure


@pytest.mark.parametrize(("page", "name"), SIMULATIONS)
def test_a_table_of_means_is_that_of_the_figures_beside_its_page(page: str, name: str) -> None:
    """Bounds and completion times by size are not among those figures."""
    ((which, said),) = ((mark[2], mark[3]) for mark in MARK.finditer(text_of(page)) if mark[1] == name)
    results = kept_cells(name, (PAGES / f"{page}-cells.csv.gz").read_bytes())

    made = body("\n\n".join(KINDS[(which or "zones").strip()](results, [])))

    assert len(made) > len({row["inputs"]["choice"]["label"] for row in results}) / 2
    there = {unsigned(line) for line in body(said)}
    assert [line for line in made if unsigned(line) not in there] == []


def unsigned(line: str) -> str:
    """Return a line without the sign of what rounds to zero: the figures beside a page have seven digits."""
    return re.sub(r"[+-]0\.0 ", "0.0 ", line)


def text_of(page: str) -> str:
    """Return a page."""
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def test_every_table_is_made_again_or_is_of_times_alone() -> None:
    again = [(each.page, each.table) for each in AGAIN]
    there = {(page.stem, name) for page in PAGES.glob("*.md") for name in tables(page.stem)}
    pages = (f"../../docs/{page.stem}" for page in (ROOT / "docs").glob("*.md"))
    of_docs = {(page, name) for page in pages for name in tables(page)}

    assert there | of_docs == {*again, *SIMULATIONS, *MEASURED, *DERIVED}
    assert {page.stem for page in PAGES.glob("*.md")} == {page for page, _ in there} | set(TEXT)
    empty = re.compile(r"<!-- ((?!end )[^>]+) -->\s*<!-- end -->")
    assert [
        (page.stem, empty.findall(page.read_text())) for page in PAGES.glob("*.md") if empty.search(page.read_text())
    ] == []


def test_a_figure_that_is_changed_does_not_pass() -> None:
    """The comparison itself, on a table that costs nothing."""
    said = "| a | b | c |\n|---|---:|---:|\n| x | 1 | 2 |\n| y | 3 | 4 |\n"

    assert (found(said, ("y",), "c"), body(said)) == ("4", ["| x | 1 | 2 |", "| y | 3 | 4 |"])
    with pytest.raises(LookupError):
        found(said, ("z",), "c")


@pytest.mark.slow
def test_the_simulators_page_has_our_completion_time_beside_the_peers() -> None:
    of = bench_peers.tiresias_ours(1_800.0)

    (line,) = re.findall(r"^ours, rounds every 30 min .*", text_of("simulator"), re.MULTILINE)
    assert [float(each) for each in re.findall(r"mean JCT +([\d.]+) s +(\d+) rounds", line)[0]] == pytest.approx(
        [of["mean_jct_s"], of["rounds"]], abs=0.05
    )
