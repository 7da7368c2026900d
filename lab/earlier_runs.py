"""Predictors of a recurring job's length that need no forest: the mean and the median of its group's earlier jobs.

Source: A-SRPT section V-B, 2-d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.profiles.recurrence import Predictions, Runs


@dataclass(frozen=True)
class EarlierRuns:
    """The mean or the median of the group's earlier jobs, or of all of them (``of_all``); the user does not matter."""

    statistic: Literal["mean", "median"]
    of_all: bool = False

    def fit(self, history: Runs) -> GroupTable:
        order = np.lexsort((history.amount, history.group))
        groups, first, count = np.unique(history.group[order], return_index=True, return_counts=True)
        amount = history.amount[order]
        sums = [np.add.reduceat(each, first) if each.size else each for each in (amount, amount**2)]
        mean: Floats = sums[0] / count
        spread = np.sqrt(np.maximum(sums[1] / count - mean**2, 0.0))
        value = mean
        if self.statistic == "median" and len(history):
            value = (amount[first + (count - 1) // 2] + amount[first + count // 2]) / 2
        if self.of_all and len(history):
            whole = float(np.mean(amount) if self.statistic == "mean" else np.median(amount))
            value, spread = np.full(groups.size, whole), np.full(groups.size, float(np.std(amount)))
        return GroupTable(groups, value, spread, unseen=float(value[0]) if self.of_all and groups.size else 0.0)


@dataclass(frozen=True)
class GroupTable:
    """A value for every group: (n_groups,) ids, ascending, with values and their spread; and one for unseen groups."""

    groups: Ints
    value: Floats
    spread: Floats
    unseen: float = 0.0

    def predict(self, group: Ints, user: Ints) -> Predictions:
        del user
        if not self.groups.size:
            return Predictions(np.zeros(group.size), np.zeros(group.size), np.zeros(group.size, dtype=np.bool_))
        at = np.minimum(np.searchsorted(self.groups, group), self.groups.size - 1)
        seen = self.groups[at] == group
        return Predictions(np.where(seen, self.value[at], self.unseen), np.where(seen, self.spread[at], 0.0), seen)
