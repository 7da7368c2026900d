"""From the history of ended jobs to a table of lengths, and whether it is better than the one in force."""

import math
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.profiles.recurrence import Evaluation, Predictions, Runs, evaluate
from services.learning.length_table import QUANTILES, LengthTable

HELD_OUT = 0.2
"""Share of the history, its newest part, on which the first model is tested; later models on half of the new jobs."""


@dataclass(frozen=True)
class Learned:
    """A new table, and how well tables that had not seen the newest jobs predict them."""

    table: LengthTable  #: Fitted to the whole history
    new: Evaluation  #: Errors of a table of all but the newest jobs
    last: Evaluation | None  #: Errors of the table in force on those jobs; None without one
    user_median: Evaluation  #: Errors of the median of the user's earlier jobs on them
    is_better: bool  #: Whether the table should come into force: its mean absolute error is not above the last one's


def learn(history: Runs, ended_s: Floats, last: LengthTable | None, last_through_s: float) -> Learned:
    """Return the table learned from a history.

    Neither table has seen the jobs that both are tested on: they are the later half of those that ended after the table
    in force was made, and the table under test is fitted to the jobs that ended before them.

    Args:
        history: At least one job, in the order in which they ended.
        ended_s: (n_jobs,) when they ended, UTC seconds.
        last: The table in force.
        last_through_s: It was fitted to the jobs that had ended by then, UTC seconds.
    """
    jobs = len(history)
    news = int((ended_s > last_through_s).sum()) if last is not None else math.ceil(2 * HELD_OUT * jobs)
    cut = jobs - max(math.ceil(news / 2), 1)
    earlier, newest = _rows(history, slice(None, cut)), _rows(history, slice(cut, None))
    tried = LengthTable.of(earlier).predict(newest.group, newest.user)
    new = evaluate(tried, newest.amount)
    old = None if last is None else evaluate(last.predict(newest.group, newest.user), newest.amount)
    return Learned(
        table=LengthTable.of(history),
        new=new,
        last=old,
        user_median=evaluate(_medians_of_users(earlier, newest.user), newest.amount),
        is_better=old is None or new.mean_error <= old.mean_error,
    )


def _medians_of_users(earlier: Runs, user: Ints) -> Predictions:
    by_user = LengthTable.of(Runs(earlier.user, earlier.user, earlier.amount))
    if not len(earlier):
        return by_user.predict(user, user)
    at, seen = by_user.places(user)
    return Predictions(np.where(seen, by_user.quantiles[at, QUANTILES.index(0.5)], 0.0), np.zeros(user.size), seen)


def _rows(history: Runs, which: slice) -> Runs:
    return Runs(history.group[which], history.user[which], history.amount[which])
