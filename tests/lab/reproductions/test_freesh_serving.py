"""The hour of FREESH's experiments: requests that have the authors' demand, and tables of what was simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.reproductions.freesh_day import TIE
from lab.reproductions.freesh_serving import (
    DIRTIEST,
    FREESH,
    PAPER_ABLATIONS,
    Hour,
    ablations,
    end_to_end,
    figure_6,
    mean_of_peak,
    raked,
)
from lab.reproductions.serving_profiles import fitted
from lab.serving.model_server import LLAMA_70B
from lab.serving.simulation import Frequency

FIGURES = dict.fromkeys(
    ("energy_wh", "carbon_kg", "e2e_mean_s", "e2e_p50_s", "e2e_p90_s", "e2e_p99_s", "ttft_mean_ms"), 10.0
) | dict.fromkeys(
    ("tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "server_ttft_p50_ms", "server_ttft_p99_ms", "violation_rate"), 10.0
)


def test_a_rate_is_found_whose_fullest_window_is_the_peak() -> None:
    random = np.random.default_rng(1)

    rate = mean_of_peak(15.0)

    windows = random.poisson(5 * rate, (20_000, 60)).max(axis=1) / 5
    assert windows.mean() == pytest.approx(15.0, rel=0.01)
    assert mean_of_peak(0.0) == 0
    assert mean_of_peak(0.2) < 0.1


def test_raking_meets_both_partitions_and_keeps_what_it_can() -> None:
    shares = np.array([4.0, 1.0, 2.0, 3.0])
    rows, columns = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])

    rates = raked(shares, [(rows, np.array([6.0, 4.0])), (columns, np.array([7.0, 3.0]))])

    assert np.bincount(rows, rates).tolist() == pytest.approx([6, 4])
    assert np.bincount(columns, rates).tolist() == pytest.approx([7, 3])
    odds = shares[0] * shares[3] / (shares[1] * shares[2])
    assert rates[0] * rates[3] / (rates[1] * rates[2]) == pytest.approx(odds)


def test_the_figure_has_one_knob_less_in_each_ablation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []
    planned: list[dict[str, Any]] = []

    class Recorded(Hour):
        def plans(self, **terms: Any) -> Any:
            planned.append(terms)
            return [terms]

        def simulated(self, plans: Any, options: Any, *_: Any, **__: Any) -> dict[str, float]:
            asked.append((plans[0], options))
            return FIGURES

    found = figure_6(Recorded({}, None, None))  # type: ignore[arg-type]

    assert list(found) == [*PAPER_ABLATIONS, DIRTIEST]
    by_name = dict(zip(found, asked, strict=True))
    assert by_name["FREESH"] == ({}, FREESH)
    assert by_name["w/o MultiParti"] == ({"partition": "a"}, FREESH)
    assert by_name["w/o TPchange"] == ({"hold": True}, FREESH)
    assert by_name["w/o MIAD"][1].frequency is Frequency.FIXED
    assert by_name["w/o LLF"][1].order.value == "fcfs"
    assert by_name["Baseline"][0] == {"hold": True, "objective": "energy"}
    assert by_name["Baseline"][1].classify is False
    assert by_name[DIRTIEST] == ({"hold": True, "objective": "cost", "tie": -TIE}, by_name["Baseline"][1])


def test_of_equal_plans_the_dirtiest_is_named_beside_the_cleanest() -> None:
    found = {name: {**FIGURES, "carbon_kg": 1.0} for name in PAPER_ABLATIONS}
    found[DIRTIEST] = {**FIGURES, "carbon_kg": 4.0}

    assert f"| emissions, against {DIRTIEST} | | -75.0 % | 4 | 1 |" in end_to_end(found)
    assert DIRTIEST not in ablations(found)


def test_tables_state_changes_against_the_right_row() -> None:
    found = {name: FIGURES | {"energy_wh": 10.0 + at} for at, name in enumerate([*PAPER_ABLATIONS, DIRTIEST])}

    assert "| energy | -28.6 % | -33.3 % | 15 | 10 |" in end_to_end(found)
    assert "| w/o MIAD | +38.8 %, +39.6 %" in ablations(found)
    assert ablations(found).splitlines()[5].count("+30.0 %") == 1


def test_a_line_through_measurements_is_found() -> None:
    server = LLAMA_70B["a100-tp2"]
    measured = {
        ("a100-80gb", 2, prompt, 1): (server.prefill_s(prompt, 1_410), server.step_s(1, 1_410))
        for prompt in (128, 512, 2_048)
    } | {("a100-80gb", 2, 512, batch): (1.0, server.step_s(batch, 1_410)) for batch in (4, 16, 32)}
    measured[("a100-80gb", 2, 512, 1)] = (server.prefill_s(512, 1_410), server.step_s(1, 1_410))

    assert fitted(measured, "a100-tp2") == pytest.approx((0.0329, 0.3373e-3, 0.05723, 0.489e-3, 0, 0), abs=1e-9)
