"""The tables of the model's errors: no error where measurements follow the model, and the reading that they follow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from lab.reproductions import iteration_times
from lab.reproductions.iteration_times import Measured, collectives, errors_table, heavy_table, speeds, training_steps
from services.core.parallel.graph import data_parallel
from services.core.parallel.iteration import IterationModel, Network

SHARES = [(1, 1), (2, 2), (1, 3), (4, 4), (2, 1, 1), (3, 3, 2), (4,), (2,)]


def by_the_book(server_gpus: int) -> list[Measured]:
    """Return steps of a model of 1 GB that take exactly what eq. 6 says, twice each."""
    network = Network(1e9, 50e9, server_gpus)
    times = [float(IterationModel(data_parallel(sum(s), 1e9, 0.2), network).time_s(np.array([s]))) for s in SHARES]
    measured = zip(SHARES, times, strict=True)
    return [Measured("steps", "model", s, 1.0, 0.2, time_s, 4) for s, time_s in measured for _ in range(2)]


def cells(table: str) -> list[list[str]]:
    """Return a table's cells without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_measurements_that_follow_the_model_have_no_error() -> None:
    one, across = cells(errors_table(by_the_book(4)))

    assert [row[1] for row in (one, across)] == ["one server", "across servers"]
    assert [row[4] for row in (one, across)] == ["0.0 % (0.0 %)", "0.0 % (0.0 %)"]
    assert across[5] != "0.0 % (0.0 %)"
    assert across[6] != "0.0 % (0.0 %)"


def test_pairs_are_told_heavy_or_light() -> None:
    pairs = [Measured("steps", f"m{at}", s, 1.0, 1.0, time_s, 8)
             for at, spread_s in enumerate((9.0, 1.1))
             for s, time_s in (((2,), 1.05), ((1, 1), spread_s))]  # fmt: skip

    assert cells(heavy_table(pairs)) == [["steps", "1", "0", "0", "1"]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with a few rows of each source."""
    for kind in ("all_reduce", "send_recv"):
        head = f"time_stats.{kind}.median,num_workers,size,devices_per_node\n"
        (tmp_path / "vidur").mkdir(exist_ok=True)
        packed = gzip.compress((head + "2.0,2,20000000,1\n0.5,2,20000000,2\n4.0,2,40000000,1\n").encode())
        (tmp_path / f"vidur/{kind}_a100_dgx.csv.gz").write_bytes(packed)
    (tmp_path / "sia/bert").mkdir(parents=True)
    rows = "placement,local_bsz,step_time,sync_time\n1,4,0.4,0\n11,4,0.8,0.4\n11,6,0.9,0.4\n24,4,1.2,0.8\n"
    (tmp_path / "sia/bert/placements-aws.csv").write_text(rows)
    entries = {"('LM', 1)": {"null": 50.0}, "('LM', 2)": {"null": 90.0}}
    table = dict.fromkeys(("k80", "p100", "v100"), entries)
    table |= {f"{gpu}_unconsolidated": entries for gpu in table}
    (tmp_path / "gavel_throughputs.json.gz").write_bytes(gzip.compress(json.dumps(table).encode()))
    return tmp_path


def test_the_sources_are_read_as_they_are_meant(data: Path) -> None:
    first, second, *_ = collectives(data)
    steps, pairs = list(training_steps(data)), list(speeds(data))

    assert (first.shares, second.shares, first.size, first.time_s) == ((1, 1), (2,), 2e7, 0.002)
    assert [(step.shares, step.computation_s) for step in steps] == [((1, 1), 0.4), ((2, 4), 0.4)]
    assert {step.server_gpus for step in steps} == {4}
    assert [pair.shares for pair in pairs[:2]] == [(2,), (1, 1)]
    assert (pairs[0].computation_s, pairs[0].time_s) == (1 / 50, 2 / 90)


def test_a_page_is_filled_where_it_is_marked(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n<!-- training-steps -->\nold\n<!-- end -->\n<!-- other -->\nkept\n<!-- end -->\n")
    monkeypatch.setattr("sys.argv", ["iteration_times", str(page), str(data)])

    iteration_times.main()

    text = page.read_text()
    assert text.startswith("by hand\n")
    assert "old" not in text
    assert "kept" in text
    assert "| training step, aws | across servers |" in text
