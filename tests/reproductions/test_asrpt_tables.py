"""Tables of A-SRPT's page: ways to predict, layouts, and figures of policies side by side."""

from __future__ import annotations

import numpy as np
import pytest

from reproductions.asrpt_forest import ExactFirst, Logarithms, figures
from reproductions.asrpt_layouts import layouts, patterns
from services.core.profiles.recurrence import EarlierRuns, Runs


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
