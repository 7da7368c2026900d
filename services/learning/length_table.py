"""Lengths of recurring jobs: a table of predictions for every (group, user) that has been seen.

A known pair is predicted the mean of its jobs. That is A-SRPT's random forest without its bootstrap, in which all trees
are one, with a leaf for every pair (``lab/forest.py``): a group's number is a hash, so a tree that did not draw a pair
predicts the length of one that has nothing to do with it. For a known group with a new user the table has the mean over
the group's users, weighted by their jobs: a tree's answer would depend on where the new user's hash happens to lie. It
is written as plain arrays, which cannot run code when they are read.

Source: A-SRPT section IV-C, 3.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cached_property
from zipfile import BadZipFile

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import Evaluation, Predictions, Runs, evaluate

HELD_OUT = 0.2
"""Share of the history, its newest part, on which the first model is tested; later models on half of the new jobs."""
QUANTILES = (0.1, 0.5, 0.9)
_NAMES = ("groups", "amount", "spread", "examples", "quantiles", "pairs", "pair_amount", "pair_spread")


@dataclass(frozen=True)
class LengthTable:
    """The predictions, in the history's unit."""

    groups: Ints  #: (n_groups,) ascending
    amount: Floats  #: (n_groups,) for a user that is new to the group
    spread: Floats  #: The same
    examples: Ints  #: (n_groups,) jobs of the history
    quantiles: Floats  #: (n_groups, 3) of the actual lengths of the group's jobs, at ``QUANTILES``
    pairs: Ints  #: (n_pairs, 2) known (group, user), ascending
    pair_amount: Floats  #: (n_pairs,) the mean of each pair's jobs
    pair_spread: Floats  #: (n_pairs,) their standard deviation

    @classmethod
    def of(cls, history: Runs) -> LengthTable:
        """Return the table of the jobs of a history, which may be empty."""
        if not len(history):
            no_ids, nothing = np.empty(0, dtype=np.int64), np.empty(0)
            return cls(no_ids, nothing, nothing, no_ids, np.empty((0, 3)), np.empty((0, 2), np.int64), nothing, nothing)
        order = np.lexsort((history.amount, history.group))
        groups, first, count = np.unique(history.group[order], return_index=True, return_counts=True)
        ranked = history.amount[order]
        at = first[:, None] + np.round((count[:, None] - 1) * np.array(QUANTILES)).astype(np.int64)
        each = np.stack([history.group, history.user], axis=1)
        pairs, pair_of, jobs = np.unique(each, axis=0, return_inverse=True, return_counts=True)
        pair_of = pair_of.reshape(-1)
        mean = np.bincount(pair_of, history.amount) / jobs
        spread = np.sqrt(np.bincount(pair_of, (history.amount - mean[pair_of]) ** 2) / jobs)
        group_of = np.searchsorted(groups, pairs[:, 0])
        amount = np.bincount(group_of, jobs * mean) / count
        variance = np.bincount(group_of, jobs * (spread**2 + (mean - amount[group_of]) ** 2)) / count
        return cls(groups, amount, np.sqrt(variance), count, ranked[at], pairs, mean, spread)

    def predict(self, group: Ints, user: Ints) -> Predictions:
        """Return the predictions for jobs of these groups and users: (n_jobs,)."""
        if not self.groups.size:
            return Predictions(np.zeros(group.size), np.zeros(group.size), np.zeros(group.size, dtype=np.bool_))
        at, seen = self.places(group)
        users, codes = self._users, self._codes
        who = np.minimum(np.searchsorted(users, user), users.size - 1)
        pair = np.minimum(np.searchsorted(codes, at * users.size + who), codes.size - 1)
        known = seen & (self.pairs[pair, 0] == group) & (self.pairs[pair, 1] == user)
        amount, spread = (
            np.where(known, of_pair[pair], np.where(seen, of_group[at], 0.0))
            for of_pair, of_group in ((self.pair_amount, self.amount), (self.pair_spread, self.spread))
        )
        return Predictions(amount, spread, seen)

    @cached_property
    def _users(self) -> Ints:
        return np.unique(self.pairs[:, 1])

    @cached_property
    def _codes(self) -> Ints:
        """One number per pair, ascending."""
        places = np.searchsorted(self.groups, self.pairs[:, 0])
        return places * self._users.size + np.searchsorted(self._users, self.pairs[:, 1])

    def places(self, group: Ints) -> tuple[Ints, Bools]:
        """Return the indices of groups in the table, and whether they are in it; the table must not be empty."""
        at = np.minimum(np.searchsorted(self.groups, group), self.groups.size - 1)
        return at, self.groups[at] == group

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez_compressed(file, **{name: getattr(self, name) for name in _NAMES})
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> LengthTable:
        """Return the table that ``to_bytes`` wrote; ``DomainError`` if the bytes are not a table."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return cls(**{name: arrays[name] for name in _NAMES})
        except (ValueError, KeyError, OSError, BadZipFile, EOFError) as error:
            raise DomainError(f"not a table of lengths: {error}") from error


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
