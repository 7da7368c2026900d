"""Tables of lengths: what the forest tells, kept as arrays; and which of two is put in force."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lab.forest import Forest
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import Runs
from services.learning.length_table import LengthTable, learn


def runs(*rows: tuple[int, int, float]) -> Runs:
    """Return jobs given as (group, user, amount), in the order of their ends."""
    group, user, amount = zip(*rows, strict=True) if rows else ((), (), ())
    return Runs(np.array(group, np.int64), np.array(user, np.int64), np.array(amount, np.float64))


def table_of(history: Runs) -> LengthTable:
    return LengthTable.of(history)


def some_runs(jobs: int = 400, seed: int = 3) -> Runs:
    rng = np.random.default_rng(seed)
    group, user = rng.integers(0, 60, jobs) * 10**15, rng.integers(0, 4, jobs) * 10**16
    return Runs(group, user, 100.0 + 10.0 * (group // 10**15) + rng.random(jobs))


def test_known_jobs_are_told_what_the_forest_tells() -> None:
    history = some_runs()

    forest, table = Forest(bootstrap=False).fit(history), table_of(history)

    expected, found = (model.predict(history.group, history.user) for model in (forest, table))
    np.testing.assert_allclose(found.amount, expected.amount)
    np.testing.assert_allclose(found.spread, expected.spread)
    assert found.seen.all()


def test_without_a_bootstrap_a_pair_is_predicted_its_mean_however_few_its_runs() -> None:
    """Group 7's neighbours by number are a thousand times as long; the paper's forest takes some of that."""
    history = runs((6, 1, 9e3), (7, 1, 9.0), (8, 1, 9e3), (8, 1, 3e3), (8, 2, 5e3))
    ask = np.array([7, 8, 8]), np.array([1, 1, 2])

    one = Forest(bootstrap=False).fit(history).predict(*ask)
    many = Forest().fit(history).predict(*ask)
    served = learn(history, np.arange(5.0), None, 0.0).table.predict(*ask)

    assert one.amount.tolist() == [9.0, 6e3, 5e3]
    assert one.spread.tolist() == [0.0, 3e3, 0.0]
    assert many.amount[0] > 500.0
    assert served.amount.tolist() == one.amount.tolist()
    assert served.spread.tolist() == one.spread.tolist()


def test_a_new_group_is_told_0_and_a_new_user_the_mean_of_its_group() -> None:
    history = runs((7, 1, 10.0), (7, 1, 10.0), (7, 2, 40.0), (9, 1, 5.0))
    table = table_of(history)
    pair = table.predict(np.array([7, 7]), np.array([1, 2]))

    told = table.predict(np.array([8, 7]), np.array([1, 5]))

    assert (told.amount[0], told.seen[0]) == (0.0, False)
    assert told.seen[1]
    assert told.amount[1] == pytest.approx((2 * pair.amount[0] + pair.amount[1]) / 3)
    assert table.examples.tolist() == [3, 1]
    np.testing.assert_array_equal(table.quantiles, [[10, 10, 40], [5, 5, 5]])


def test_a_table_is_read_as_it_was_written_and_nothing_else_is() -> None:
    table, empty = table_of(some_runs()), table_of(runs())

    again = LengthTable.from_bytes(table.to_bytes())

    for name in ("groups", "amount", "spread", "examples", "quantiles", "pairs", "pair_amount", "pair_spread"):
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
    assert not LengthTable.from_bytes(empty.to_bytes()).predict(np.array([1]), np.array([1])).seen.any()
    for content in (b"", b"PK\x03\x04", pickle.dumps(table), table.to_bytes()[:-40]):
        with pytest.raises(DomainError, match="not a table"):
            LengthTable.from_bytes(content)


def test_what_is_tried_has_not_seen_the_jobs_it_is_tried_on() -> None:
    # The newest fifth is of one group, which nobody saw before.
    history = runs(*[(1, 1, 10.0)] * 8, *[(2, 1, 30.0)] * 2)

    learned = learn(history, np.arange(10.0), None, 0.0)

    assert (learned.new.jobs, learned.new.seen, learned.new.mean_error) == (2, 0.0, 30.0)
    assert learned.is_better, "the first one has nothing to beat"
    assert learned.table.predict(np.array([2]), np.array([1])).seen[0], "what is served knows them"


def test_beside_it_stands_the_median_of_the_users_earlier_jobs() -> None:
    # Other groups of the same user; the last job, which is tried, took as long as their median.
    history = runs((1, 1, 10.0), (2, 1, 20.0), (3, 1, 90.0), (4, 2, 500.0), (5, 1, 20.0))

    learned = learn(history, np.arange(5.0), None, 0.0)

    assert (learned.user_median.mean_error, learned.new.mean_error) == (0.0, 20.0)


def test_the_table_in_force_stays_while_the_new_one_errs_more() -> None:
    # Of the 4 jobs since, the last 2 try both: the group's length has changed back.
    first = runs(*[(1, 1, 10.0)] * 4)
    worse = runs(*[(1, 1, 10.0)] * 4, *[(1, 1, 50.0)] * 2, *[(1, 1, 10.0)] * 2)
    better = runs(*[(1, 1, 10.0)] * 4, *[(1, 1, 50.0)] * 4)

    kept, replaced = (learn(history, np.arange(8.0), table_of(first), 3.5) for history in (worse, better))

    assert (kept.new.jobs, kept.is_better) == (2, False)
    assert kept.last is not None
    assert kept.last.exact == 1.0
    assert (replaced.new.jobs, replaced.is_better) == (2, True)


def test_equal_histories_give_equal_tables() -> None:
    assert table_of(some_runs()).to_bytes() == table_of(some_runs()).to_bytes()
