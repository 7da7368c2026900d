"""The table of PowerFlow's day: a baseline against PowerFlow at the same energy."""

from __future__ import annotations

import json
from pathlib import Path

from services.simulator.report.powerflow_day import table

KEYS = ("idle_energy_kwh", "peak_power_w", "p99_jct_s", "preemptions")


def test_a_baseline_is_set_against_the_curve_at_its_energy(tmp_path: Path) -> None:
    cells = tmp_path / "powerflow-day" / "cells"
    cells.mkdir(parents=True)
    points = [("las", "las", 150.0, 900.0), ("p1", "powerflow", 100.0, 600.0), ("p2", "powerflow", 200.0, 300.0)]
    points.append(("afs", "afs", 400.0, 600.0))
    for label, policy, energy_kwh, jct_s in points:
        summary = {"energy_kwh": energy_kwh, "avg_jct_s": jct_s, **dict.fromkeys(KEYS, 0)}
        cell = {"inputs": {"choice": {"label": label, "policy": policy}}, "summary": summary}
        (cells / f"{label}.json").write_text(json.dumps(cell))

    rows = {line.split("|")[1].strip(): line for line in table(tmp_path).splitlines()}

    assert "| 2.00 x | 1.73 x |" in rows["las"]
    assert "| 2.00 x (at 200 kWh) | 1.57 x |" in rows["afs"]
    assert rows["p1"].endswith("| 10.0 min | 0.0 h | 0 |  |  |")
