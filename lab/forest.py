"""A random forest over (group, user), for ``services.core.profiles.recurrence``.

A history of recurring jobs has few distinct (group, user) pairs, and a tree can only tell jobs apart by them. So each
tree is fitted to one row per pair: its weight is how often the bootstrap of all jobs drew the pair, its target the mean
of the jobs drawn. Splits and leaves are those of the tree fitted to every job, since the squared error within a pair is
the same whatever the split; it takes a tenth of the time or less.

Known pairs are predicted when the forest is fitted, so that serving them is a look-up. Only a known group with a new
user needs the trees.

A group's number is a hash, so its neighbours in a tree have nothing to do with it. A tree whose bootstrap did not draw
a pair predicts a neighbour's length for it, so the mean over the trees is off for every pair with few jobs. Without the
bootstrap the forest is one tree, the mean of each pair's jobs, and is more accurate
(``python -m lab.reproductions.asrpt_forest``); the scheduler's predictions are these means
(``services/learning/length_table.py``).

Source: A-SRPT section IV-C, 3: 100 trees, squared error, the prediction for an unseen group is 0.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lab.earlier_runs import GroupTable
from services.core.domain.arrays import Floats, Ints
from services.core.profiles.recurrence import Predictions, Runs

TREES = 100

T = TypeVar("T")


class FittedTree(Protocol):
    """The arrays of a fitted tree, without what was needed only to fit it."""

    def predict(self, x: NDArray[np.float32], /) -> Floats:
        """Return the predictions, (n, 1), for (n, features)."""
        ...


class _TreeRegressor(Protocol):
    """scikit-learn's regression tree."""

    tree_: FittedTree

    def fit(self, x: NDArray[np.float32], y: Floats, *, sample_weight: Floats) -> object: ...


_new_tree = cast("Callable[..., _TreeRegressor]", import_module("sklearn.tree").DecisionTreeRegressor)


@dataclass(frozen=True)
class Forest:
    """How to grow a forest; equal history and equal seed give equal forests."""

    trees: int = TREES  #: How many, if there is a bootstrap
    seed: int = 1  #: Of the bootstraps and the trees
    keeps_trees: bool = True
    """Whether to keep the trees, which take a hundred bytes or more per pair each; without them there is no prediction
    for a new user of a known group."""
    bootstrap: bool = True
    """Whether each tree sees a sample of the jobs. Otherwise there is one tree, and ``spread`` is the standard
    deviation of a pair's jobs instead of that over the trees."""

    def fit(self, history: Runs) -> ForestModel | GroupTable:
        """Return the forest of a history; for an empty one, a table that predicts 0."""
        nothing = np.empty(0)
        if not len(history):
            return GroupTable(np.empty(0, dtype=np.int64), nothing, nothing)
        pairs, pair_of_job = np.unique(np.stack([history.group, history.user], axis=1), axis=0, return_inverse=True)
        pair_of_job = pair_of_job.reshape(-1)
        groups, users = (np.unique(pairs[:, column]) for column in (0, 1))
        coded = _coded(groups, users, pairs[:, 0], pairs[:, 1])
        rng = np.random.default_rng(self.seed)
        grown: list[FittedTree] = []
        sums, squares = np.zeros(len(pairs)), np.zeros(len(pairs))

        def grow(seed: int, weight: Floats, total: Floats) -> tuple[FittedTree, Floats]:
            there = np.flatnonzero(weight)
            tree = _new_tree(random_state=seed)
            tree.fit(coded[there], total[there] / weight[there], sample_weight=weight[there])
            return tree.tree_, tree.tree_.predict(coded)[:, 0]

        def draw(seed: int) -> tuple[int, Floats, Floats]:
            jobs = rng.integers(0, len(history), len(history)) if self.bootstrap else np.arange(len(history))
            drawn = pair_of_job[jobs]
            weight = np.bincount(drawn, minlength=len(pairs)).astype(np.float64)
            total = np.bincount(drawn, history.amount[jobs], minlength=len(pairs)).astype(np.float64)
            return seed, weight, total

        trees = self.trees if self.bootstrap else 1
        for tree, predicted in _in_order(grow, (draw(seed) for seed in rng.integers(0, 2**31, trees).tolist())):
            if self.keeps_trees:
                grown.append(tree)
            sums += predicted
            squares += predicted**2
        mean = sums / trees
        if not self.bootstrap:
            jobs_of_pair = np.bincount(pair_of_job, minlength=len(pairs))
            squares = np.bincount(pair_of_job, (history.amount - mean[pair_of_job]) ** 2) / jobs_of_pair
            return ForestModel(groups, users, pairs, mean, np.sqrt(squares), grown)
        spread = np.sqrt(np.maximum(squares / trees - mean**2, 0.0))
        return ForestModel(groups, users, pairs, mean, spread, grown)


@dataclass(frozen=True)
class ForestModel:
    """A fitted forest.

    Attributes:
        groups, users: Known ones, ascending; a tree sees their indices.
        mean, spread: (n_pairs,) mean over the trees, and standard deviation; see ``Forest``.
    """

    groups: Ints
    users: Ints
    pairs: Ints  #: (n_pairs, 2) known (group, user), ascending
    mean: Floats
    spread: Floats
    trees: list[FittedTree]  #: scikit-learn's trees

    def predict(self, group: Ints, user: Ints) -> Predictions:
        at_group = np.minimum(np.searchsorted(self.groups, group), self.groups.size - 1)
        seen = self.groups[at_group] == group
        low, high = (np.searchsorted(self.pairs[:, 0], group, side=side) for side in ("left", "right"))
        at = low + np.array(
            [np.searchsorted(self.pairs[a:b, 1], who) for a, b, who in zip(low, high, user, strict=True)],
            dtype=np.int64,
        )
        at = np.minimum(at, len(self.pairs) - 1)
        known = (self.pairs[at, 0] == group) & (self.pairs[at, 1] == user)
        amount, spread = np.where(known, self.mean[at], 0.0), np.where(known, self.spread[at], 0.0)
        new = np.flatnonzero(seen & ~known)
        if new.size:
            coded = _coded(self.groups, self.users, group[new], user[new])
            predicted = np.stack([tree.predict(coded)[:, 0] for tree in self.trees])
            amount[new], spread[new] = predicted.mean(axis=0), predicted.std(axis=0)
        return Predictions(amount, spread, seen)


def _in_order(call: Callable[..., T], arguments: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Yield the results of calls made on all cores, in the order of their arguments, which are drawn as needed."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as executor:  # a tree grows outside of Python's lock
        pending: deque[Future[T]] = deque()
        for each in arguments:
            pending.append(executor.submit(call, *each))
            if len(pending) > cores:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _coded(groups: Ints, users: Ints, group: Ints, user: Ints) -> NDArray[np.float32]:
    """Return the features of a tree: (n_rows, 2) indices into the known ones, exact in 32 bits below 16 million."""
    places = np.searchsorted(groups, group), np.searchsorted(users, user)
    return np.stack(places, axis=1).astype(np.float32)
