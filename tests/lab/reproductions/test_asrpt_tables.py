"""Tables of A-SRPT's page: ways to predict, layouts, and figures of policies side by side."""

from __future__ import annotations

import numpy as np
import pytest

from lab.earlier_runs import EarlierRuns
from lab.reproductions.asrpt import Run, compared, predictors, waits_for_servers, with_shared_runs
from lab.reproductions.asrpt_forest import ExactFirst, Logarithms, figures
from lab.reproductions.asrpt_layouts import layouts, patterns
from services.core.profiles.recurrence import Runs


def runs(*rows: tuple[int, float]) -> Runs:
    """Return jobs of one user given as (group, amount)."""
    group, amount = zip(*rows, strict=True)
    return Runs(np.array(group, np.int64), np.ones(len(rows), np.int64), np.array(amount, np.float64))


def test_a_group_that_repeats_a_length_is_predicted_to_and_the_others_by_what_is_learned_from_them() -> None:
    """Group 1 repeats 100, in half of its jobs; group 2 does not; group 3 occurs once, which is a repetition."""
    history = runs((1, 100.0), (1, 100.5), (1, 7.0), (1, 900.0), (2, 10.0), (2, 1_000.0), (3, 5.0))

    model = ExactFirst(EarlierRuns("mean", of_all=True)).fit(history)
    found = model.predict(np.array([1, 2, 3, 4]), np.ones(4, np.int64))

    assert found.amount.tolist() == [100.25, 505.0, 5.0, 505.0]
    assert found.seen.tolist() == [True, True, True, False]


def test_logarithms_give_the_geometric_mean() -> None:
    model = Logarithms(EarlierRuns("mean")).fit(runs((2, 10.0), (2, 1_000.0)))

    found = model.predict(np.array([2, 5]), np.ones(2, np.int64))

    assert found.amount.tolist() == pytest.approx([100.0, 0.0])


def test_a_way_to_predict_has_not_seen_what_it_is_compared_on() -> None:
    """Of five jobs the last is predicted: 10 where it was 40, off by a factor of 4."""
    history = runs(*[(1, 10.0)] * 4, (1, 40.0))

    assert figures(EarlierRuns("median"), history) == pytest.approx((0.0, 0.0, 30.0, 4.0))


def test_every_layout_takes_all_the_gpus_of_its_job() -> None:
    for gpus in (8, 16):
        assert {graph.gpus for graph in layouts(gpus).values()} == {gpus}
        assert all(sum(free) == gpus and min(free) >= 1 for free in patterns(gpus))


def a_run(label: str, trace: str, hours: float, *, seed: int = 1, exact: float = 0.5, **params: float) -> Run:
    """Return a run of the real first hour of jobs that claims this mean completion time."""
    jobs = {"label": trace, "jobs": "a-srpt", "recipe": "a-srpt", "start": "2023-08-15", "days": 1 / 24}
    policy = {"policy": label.split(",")[0], "label": label, "params": params, "options": {}}
    summary = {"avg_jct_s": 3_600.0 * hours, "completed": 100, "makespan_s": 86_400.0 * hours}
    errors = {"exact": exact, "within_tenth": exact, "mean_error": 1.0}
    return Run({"choice": policy, "trace": jobs, "seed": seed}, summary, errors)


def test_policies_are_compared_by_mean_first_and_by_the_diluted_sum_beside_it() -> None:
    runs = [a_run("a-srpt", "t", 2.0), a_run("a-srpt", "t", 3.0, seed=2), a_run("spwf", "t", 4.0)]
    runs.append(a_run("spwf", "t", 4.0, seed=2))

    head, _, ours, theirs = compared(runs).splitlines()

    assert head == "| policy | t: mean JCT | t: a-srpt's mean against it | t: a-srpt's sum |"
    assert ours == "| a-srpt | 2.00, 3.00 h | - | - |"
    cells = theirs.strip("| ").split(" | ")
    assert cells[:3] == ["spwf", "4.00, 4.00 h", "-50 to -25 %"]
    assert all(-50 < float(each) < 0 for each in cells[3].removesuffix(" %").split(" to "))


def test_a_cell_that_was_not_run_leaves_a_dash() -> None:
    rows = compared([a_run("a-srpt", "x", 2.0), a_run("spwf", "y", 4.0)]).splitlines()

    assert rows[2:] == ["| a-srpt | 2.00 h | - | - | - | - | - |", "| spwf | - | 4.00 h | - | - | - | - |"]


def test_experiments_share_the_runs_that_both_would_do() -> None:
    found = with_shared_runs(
        {
            "a-srpt-jobs": [
                a_run("a-srpt", "t", 2.0, exact=0.6),
                a_run("spjf", "t", 2.0),
                a_run("a-srpt", "t", 9.0, seed=2),
            ],
            "a-srpt-single": [a_run("a-srpt", "40 %", 3.0), a_run("a-srpt", "0 %", 4.0)],
            "a-srpt-bandwidth": [a_run("a-srpt", "50 Gb/s", 5.0), a_run("a-srpt", "1 Gb/s", 6.0)],
            "a-srpt-tau": [a_run("a-srpt", "1 Gb/s", 7.0, tau=10.0)],
            "a-srpt-predictors": [a_run("a-srpt, perfect", "t", 1.0, exact=1.0), a_run("a-srpt, forest", "t", 3.0)],
        }
    )

    assert [run.trace for run in found["a-srpt-bandwidth"]] == ["1 Gb/s", "10 Gb/s", "50 Gb/s"]
    assert [row.split(" | ")[0] for row in waits_for_servers(found["a-srpt-tau"]).splitlines()[2:]] == ["| 1", "| 10"]
    assert "| a-srpt, median | 60 % | 60 % | 1 | 2.00 h | 2.0 days |" in predictors(found["a-srpt-predictors"])
    labels = [run.label for run in found["a-srpt-predictors"]]
    assert labels == ["a-srpt, perfect", "a-srpt, median", "a-srpt, forest"]
