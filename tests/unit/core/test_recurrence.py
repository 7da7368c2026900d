"""Groups of jobs that recur, and what earlier ones predict."""

from __future__ import annotations

import numpy as np
import pytest

from lab.earlier_runs import EarlierRuns
from lab.foresight import Predictor
from lab.forest import Forest
from services.core.profiles.recurrence import Runs, evaluate, group_id


def runs(*rows: tuple[int, int, float]) -> Runs:
    """Return jobs given as (group, user, amount)."""
    group, user, amount = zip(*rows, strict=True) if rows else ((), (), ())
    ids = [np.array(each, dtype=np.int64) for each in (group, user)]
    return Runs(ids[0], ids[1], np.array(amount, dtype=np.float64))


def told(predictor: Predictor, history: Runs, group: int, user: int = 0) -> tuple[float, float, bool]:
    """Return amount, spread and whether the group was seen."""
    found = predictor.fit(history).predict(np.array([group]), np.array([user]))
    return float(found.amount[0]), float(found.spread[0]), bool(found.seen[0])


def test_a_group_is_what_its_submissions_share() -> None:
    one = group_id({"user": "ada", "command": ["python", "train.py"], "lr": 0.1})

    assert one == group_id({"lr": 0.1, "command": ["python", "train.py"], "user": "ada"})
    assert one != group_id({"lr": 0.2, "command": ["python", "train.py"], "user": "ada"})
    assert 0 <= one < 2**63


HISTORY = runs((5, 0, 10.0), (5, 0, 10.0), (5, 1, 40.0), (9, 0, 7.0))


@pytest.mark.parametrize(
    ("predictor", "known", "unseen"),
    [
        (EarlierRuns("mean"), 20.0, 0.0),
        (EarlierRuns("median"), 10.0, 0.0),
        (EarlierRuns("mean", of_all=True), 67.0 / 4, 67.0 / 4),
        (EarlierRuns("median", of_all=True), 10.0, 10.0),
    ],
)
def test_statistics_of_earlier_runs(predictor: Predictor, known: float, unseen: float) -> None:
    assert told(predictor, HISTORY, 5)[0] == known
    assert told(predictor, HISTORY, 9)[2]
    assert told(predictor, HISTORY, 6) == (unseen, 0.0, False)


@pytest.mark.parametrize("predictor", [EarlierRuns("mean"), EarlierRuns("median", of_all=True), Forest(trees=3)])
def test_without_history_nothing_is_predicted(predictor: Predictor) -> None:
    assert told(predictor, runs(), 5) == (0.0, 0.0, False)


def test_a_forest_tells_groups_and_users_apart_and_says_how_sure_it_is() -> None:
    history = runs(*[(5, 0, 10.0)] * 30, *[(5, 1, 40.0)] * 30, *[(9, 0, 7.0)] * 30)

    assert told(Forest(), history, 5, 0) == pytest.approx((10.0, 0.0, True))
    assert told(Forest(), history, 5, 1) == pytest.approx((40.0, 0.0, True))
    assert told(Forest(), history, 6, 0) == (0.0, 0.0, False)
    amount, _, seen = told(Forest(), history, 5, 7)  # a new user of a known group
    assert seen
    assert amount in (10.0, 40.0)
    assert told(Forest(), HISTORY, 9)[1] > 0.0  # one job of it: some trees never drew it


def test_a_forest_of_pairs_is_the_forest_of_all_jobs() -> None:
    """Each tree, fitted to one weighted row per pair, predicts what it would fitted to every job drawn.

    One user, since splits by group and by user that are equally good may be chosen differently.
    """
    from sklearn.tree import DecisionTreeRegressor

    rng = np.random.default_rng(3)
    history = Runs(rng.integers(0, 9, 80), np.zeros(80, dtype=np.int64), rng.integers(1, 50, 80).astype(np.float64))
    model = Forest(trees=8, seed=4).fit(history)
    draws, total = np.random.default_rng(4), np.zeros(80)
    for seed in draws.integers(0, 2**31, 8).tolist():
        drawn = draws.integers(0, 80, 80)
        rows = np.stack([history.group, history.user], axis=1)
        total += DecisionTreeRegressor(random_state=seed).fit(rows[drawn], history.amount[drawn]).predict(rows)

    np.testing.assert_allclose(model.predict(history.group, history.user).amount, total / 8, rtol=1e-6)


def test_equal_seeds_grow_equal_forests() -> None:
    first, second = (Forest(trees=5, seed=2).fit(HISTORY).predict(HISTORY.group, HISTORY.user) for _ in range(2))

    np.testing.assert_array_equal(first.amount, second.amount)


def test_an_evaluation_counts_exact_near_and_unseen() -> None:
    predictions = EarlierRuns("median").fit(HISTORY).predict(np.array([5, 5, 9, 1]), np.zeros(4, dtype=np.int64))

    found = evaluate(predictions, np.array([10.0, 10.5, 14.0, 3.0]))

    assert (found.jobs, found.seen, found.exact, found.within_tenth) == (4, 0.75, 0.25, 0.5)
    assert found.mean_error == pytest.approx((0.0 + 0.5 + 7.0 + 3.0) / 4)
