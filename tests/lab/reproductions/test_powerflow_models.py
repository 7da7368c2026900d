"""The tables of the models' error that read Gavel's throughputs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lab.reproductions.powerflow import packing, unseen


def write(folder: Path, **rates: Any) -> Path:
    """Write Gavel's file; GPUs that are not named have no jobs."""
    with gzip.open(folder / "gavel_throughputs.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"k80": {}, "p100": {}, "v100": {}} | rates, file)
    return folder


def named(batch: int, gpus: int) -> str:
    """Return a job as Gavel names it."""
    return f"('LM (batch size {batch})', {gpus})"


def test_steps_of_all_gpus_together_are_steps_of_each_and_scattered_gangs_are_on_two_nodes(tmp_path: Path) -> None:
    def steps_per_s(batch: int, gpus: int, nodes: int) -> float:
        return gpus / (0.01 + 0.001 * batch + (0.004 * nodes if gpus > 1 else 0.0))

    own, scattered = (
        {named(batch, gpus): {"null": steps_per_s(batch, gpus, nodes)} for batch in (5, 10, 20) for gpus in (1, 2, 4)}
        for nodes in (1, 2)
    )

    rows = unseen(write(tmp_path, v100=own, v100_unconsolidated=scattered)).splitlines()

    model, gpu, configurations, error, _ = (each.strip() for each in rows[2].strip("|").split("|"))
    assert (len(rows), model, gpu, configurations) == (3, "LM", "V100", "15")
    assert float(error.removesuffix(" %")) < 1.0


def test_a_packed_pair_counts_by_what_each_does_alone(tmp_path: Path) -> None:
    one, other = named(5, 1), named(10, 1)
    rates = {
        one: {"null": 10.0, one: [6.0, 6.0], other: [8.0, 2.0]},
        other: {"null": 4.0, one: [2.0, 8.0], other: [0.0, 0.0]},
        named(5, 2): {"null": 20.0},
    }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.reproductions.powerflow.GPUS_PACKED", ("v100",))
        rows = packing(write(tmp_path, v100=rates)).splitlines()

    (row,) = rows[2:]
    assert row.startswith("| V100 | 3 | 1 | 100 % | 1.25 | 1.21 | 1.29 | ")
    cost, error = row.strip("| ").split(" | ")[-2:]
    assert 0 <= float(cost) < 0.25
    assert float(error.removesuffix(" %")) < 5
