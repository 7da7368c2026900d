"""The table of fitted against profiled: against the cell of the same eta and seed, and at the same energy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.reproductions.powerflow_fitted import table


def put(folder: Path, label: str, eta: float, seed: int, **figures: Any) -> None:
    cells = folder / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    summary = {"idle_energy_kwh": 10.0, "preemptions": 100, "above_limit_share": 0.25, "above_limit_most": 0.017}
    cell = {
        "inputs": {"choice": {"label": label, "params": {"eta": eta}}, "seed": seed},
        "summary": {**summary, "above_limit_of_error": None, **figures},
    }
    (cells / f"{label}-{seed}.json").write_text(json.dumps(cell))


def test_cells_stand_beside_their_own_eta_and_seed_and_at_equal_energy(tmp_path: Path) -> None:
    profiled, fitted = tmp_path / "powerflow-profiled", tmp_path / "powerflow-fitted"
    put(profiled, "low", 0.4, 1, energy_kwh=100.0, avg_jct_s=1_000.0)
    put(profiled, "high", 0.5, 1, energy_kwh=200.0, avg_jct_s=600.0)
    put(profiled, "high", 0.5, 2, energy_kwh=400.0, avg_jct_s=500.0)
    put(fitted, "a", 0.4, 1, energy_kwh=150.0, avg_jct_s=1_040.0, above_limit_of_error=0.5, preemptions=90)
    put(fitted, "b", 0.5, 2, energy_kwh=404.0, avg_jct_s=505.0)
    put(fitted, "c", 0.7, 1, energy_kwh=404.0, avg_jct_s=505.0)

    rows = table(tmp_path).splitlines()[2:]

    assert rows == [
        "| a | +4.0 % | +50.0 % | +0.0 % | +30.0 % | -10.0 % | 25.0 % | 1.7 % | 50 % |",
        "| b, seed 2 | +1.0 % | +1.0 % | +0.0 % |  | +0.0 % | 25.0 % | 1.7 % |  |",
    ]
