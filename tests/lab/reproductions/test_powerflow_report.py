"""The tables of PowerFlow's page: baselines against PowerFlow at equal energy, section 6.4, and the traces it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.reproductions.powerflow_day import AFS, DAY, DOWN, MARGINAL, SENSITIVITY, filled
from lab.reproductions.powerflow_traces import draw, write
from services.simulator.readers.jobs import read_jobs

Cell = tuple[str, str, float, float]
"""A policy's label, its name, kWh of which a tenth is idle, and the mean completion time in seconds."""
CELLS: list[Cell] = [
    ("las", "las", 150.0, 900.0),
    ("las, 148 W", "las", 200.0, 950.0),
    ("afs", "afs", 400.0, 600.0),
    ("powerflow, eta 0.4", "powerflow", 100.0, 600.0),
    ("powerflow, eta 1", "powerflow", 200.0, 300.0),
    ("zeus+las", "zeus+las", 160.0, 840.0),
    ("gandiva", "gandiva", 50.0, 1200.0),
    ("gandiva+zeus", "gandiva+zeus", 160.0, 840.0),
]


def results(folder: Path, name: str, cells: list[Cell], *, seeds: tuple[int, ...] = (1,), trace: str = "day") -> None:
    """Write what an experiment leaves."""
    (folder / name / "cells").mkdir(parents=True)
    index: list[list[str]] = []
    for seed in seeds:
        for label, policy, energy_kwh, jct_s in cells:
            options: dict[str, Any] = {"power_limit_w": 148.0} if "148" in label else {}
            params = {"eta": float(label.split()[-1])} if "eta" in label else {}
            summary = {"energy_kwh": energy_kwh, "idle_energy_kwh": 0.1 * energy_kwh, "avg_jct_s": jct_s * seed}
            summary |= dict.fromkeys(("peak_power_w", "p99_jct_s", "preemptions"), 0)
            choice = {"label": label, "policy": policy, "options": options, "params": params}
            inputs = {"choice": choice, "trace": {"label": trace}, "seed": seed}
            index.append([f"{label}-{seed}", label, "direct"])
            file = folder / name / "cells" / f"{label}-{seed}.json"
            file.write_text(json.dumps({"inputs": inputs, "summary": summary}))
    (folder / name / "index.json").write_text(json.dumps(index))


def rows(folder: Path, mark: str) -> dict[str, str]:
    """Return the lines of a table by their first cell."""
    page = filled(f"before\n<!-- {mark} -->\nold\n<!-- end -->\nafter\n", folder)
    assert page.startswith("before\n")
    assert page.endswith("<!-- end -->\nafter\n")
    return {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("|")}


def test_a_baseline_is_set_against_the_curve_where_both_reach(tmp_path: Path) -> None:
    results(tmp_path, DAY, CELLS)
    results(tmp_path, DOWN, [("las", "las", 100.0, 900.0), ("las, 148 W", "las", 90.0, 990.0)])

    found = rows(tmp_path, "powerflow-day")

    # 900 s against 450 s at 150 kWh; las at 148 W takes more of both and is no part of its curve.
    assert found["las"] == "| las | 150 kWh | 2.00 x |  | 1.73 x |"
    assert found["las, unused nodes powered down"] == "| las, unused nodes powered down | 100 kWh | 1.50 x |  |  |"
    assert found["las, running gangs alone"] == "| las, running gangs alone | 135 kWh | 2.00 x |  |  |"
    # AFS needs 400 kWh where PowerFlow's most is 200; 600 s take 400 kWh and 100 kWh.
    assert found["afs"] == "| afs | none | 2.00 x at 50 % of its least | 4.00 x | 1.57 x |"


def test_seeds_are_compared_each_with_its_own_and_the_spread_is_told(tmp_path: Path) -> None:
    results(tmp_path, DAY, CELLS, seeds=(1, 2))
    results(tmp_path, DOWN, CELLS)

    found = rows(tmp_path, "powerflow-day")

    assert "| 2.00 x (± 0.00) |" in found["las"]
    assert "| 900.0" not in found["powerflow, eta 0.4"]
    assert "| 15.0 min |" in found["powerflow, eta 0.4"]  # mean of 600 s and 1,200 s


def test_a_baseline_below_powerflows_energies_has_none_in_common(tmp_path: Path) -> None:
    results(tmp_path, DAY, CELLS)
    results(tmp_path, DOWN, CELLS)

    assert rows(tmp_path, "powerflow-day")["gandiva"] == "| gandiva | none |  |  | 3.39 x |"


def test_points_stand_by_setting_and_policy(tmp_path: Path) -> None:
    results(tmp_path, DAY, CELLS)
    results(tmp_path, DOWN, CELLS[:1])

    found = rows(tmp_path, "powerflow-points")

    assert found["148 W"] == "| 148 W |  | 200, 16 |  |  |  |  |"
    assert found["Zeus, default"] == "| Zeus, default | 160, 14 | 160, 14 |  |  |  |  |"


def test_sensitivity_compares_at_the_energy_of_the_two_with_zeus(tmp_path: Path) -> None:
    results(tmp_path, SENSITIVITY, CELLS, trace="4 nodes")

    found = rows(tmp_path, "sensitivity")["4 nodes"].split("|")[2:-1]

    # PowerFlow is interpolated: 420 s at 160 kWh. LAS ends at 150 kWh, Gandiva at 50, AFS begins at 400.
    assert [each.strip() for each in found[:2]] == ["160 kWh", "7 min"]
    times = dict(zip(("gandiva", "las", "gandiva+zeus", "zeus+las", "afs"), map(str.strip, found[2:]), strict=True))
    assert times["zeus+las"] == times["gandiva+zeus"] == "2.00 x"
    assert times["las"] == "2.14 x at -6 % energy"
    assert times["gandiva"] == "2.86 x at -69 % energy"
    assert times["afs"] == "1.43 x at +150 % energy"


def test_what_lengths_and_measuring_are_worth_stands_by_trace(tmp_path: Path) -> None:
    afs: list[Cell] = [("afs", "afs", 200.0, 600.0), ("afs, lengths unknown", "afs", 205.0, 660.0)]
    ours: list[Cell] = [
        ("powerflow, eta 1", "powerflow", 200.0, 500.0),
        ("powerflow, nothing measured, eta 1", "powerflow", 200.0, 400.0),
    ]
    results(tmp_path, AFS, [*afs, ("afs, 148 W", "afs", 150.0, 900.0), *ours])

    found = rows(tmp_path, "powerflow-afs")["day"]

    assert found == "| day | 10.0 min, 200 kWh | 11.0 min, 205 kWh | 1.20 x | 1.50 x |"


def test_the_two_ways_to_give_power_out_stand_by_eta(tmp_path: Path) -> None:
    results(tmp_path, MARGINAL, [("powerflow, eta 0.4", "powerflow", 100.0, 600.0)])

    assert rows(tmp_path, "marginal")["0.4"] == "| 0.4 | `energy` | 100 kWh | 10.0 min |"


def test_a_table_without_its_results_stays_as_it_is(tmp_path: Path) -> None:
    results(tmp_path, DAY, CELLS)
    page = "<!-- powerflow-points -->\nkept\n<!-- end -->\n<!-- sensitivity -->\nkept too\n<!-- end -->\n"

    assert filled(page, tmp_path) == page

    results(tmp_path, DOWN, [("las", "las", 140.0, 900.0)])

    assert "las, all nodes on" in filled(page, tmp_path)
    assert "kept too" in filled(page, tmp_path)

    (tmp_path / DAY / "cells" / "afs-1.json").unlink()

    assert filled(page, tmp_path) == page, "an experiment under way"


def test_traces_differ_in_what_they_are_to_show_only(tmp_path: Path) -> None:
    gaps, durations_s, gpus = draw(7)
    for minutes in (10, 20):
        write(tmp_path / f"{minutes}.csv", minutes, gaps, durations_s, gpus)

    short, long = (read_jobs(tmp_path / f"{minutes}.csv", recipe="powerflow", seed=1) for minutes in (10, 20))

    assert len(short) == len(long) == 100
    assert short.submitted_s[-1] == pytest.approx(100 * 600.0, abs=1.0)
    assert long.submitted_s == pytest.approx(2 * short.submitted_s, abs=1.1)
    assert np.array_equal(short.work_s, long.work_s)
    assert np.array_equal(short.requested_gpus, gpus)
