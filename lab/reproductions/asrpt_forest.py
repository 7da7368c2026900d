"""Ways to predict the lengths of recurring jobs, on history: ``python -m lab.reproductions.asrpt_forest PAGE``.

The jobs are those of recipe ``a-srpt`` before its workload begins, 606,578 of them; of these every fourth group, for
three seeds. Each way learns from the first four fifths and predicts the last, so that none is chosen by the jobs that
the policies are compared on. The table ``a-srpt-forest`` of PAGE is made anew.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.earlier_runs import EarlierRuns, GroupTable
from lab.foresight import Model, Predictor
from lab.forest import Forest
from lab.reproductions.marked import fill
from lab.reproductions.powerflow_day import rows_of
from services.core.domain.arrays import Bools, Ints
from services.core.profiles.recurrence import EXACT, Predictions, Runs, evaluate
from services.simulator.readers.jobs import read_jobs

SEEDS = (1, 2, 3)
EVERY = 4
TRAINED = 0.8


@dataclass(frozen=True)
class Logarithms:
    """A predictor of the logarithms of lengths: what it predicts is a geometric mean."""

    predictor: Predictor

    def fit(self, history: Runs) -> _OfLogarithms:
        """Fit the predictor to logarithms."""
        return _OfLogarithms(self.predictor.fit(Runs(history.group, history.user, np.log(history.amount))))


@dataclass(frozen=True)
class ExactFirst:
    """A group that repeats one length is predicted to repeat it; a predictor learns from the others.

    It repeats one if half of its jobs, or more, are within ``EXACT`` of their median.
    """

    predictor: Predictor

    def fit(self, history: Runs) -> _ExactFirst:
        """Fit the predictor to the groups that do not repeat."""
        medians = EarlierRuns("median").fit(history)
        at = np.searchsorted(medians.groups, history.group)
        value = medians.value[at]
        near = np.bincount(at, np.abs(history.amount - value) <= EXACT * value, minlength=medians.groups.size)
        repeats = near >= 0.5 * np.bincount(at, minlength=medians.groups.size)
        table = GroupTable(medians.groups[repeats], medians.value[repeats], medians.spread[repeats])
        return _ExactFirst(table, self.predictor.fit(_rows(history, ~repeats[at])))


@dataclass(frozen=True)
class _ExactFirst:
    exact: GroupTable
    model: Model

    def predict(self, group: Ints, user: Ints) -> Predictions:
        first, then = self.exact.predict(group, user), self.model.predict(group, user)
        return Predictions(
            np.where(first.seen, first.amount, then.amount),
            np.where(first.seen, first.spread, then.spread),
            first.seen | then.seen,
        )


@dataclass(frozen=True)
class _OfLogarithms:
    model: Model

    def predict(self, group: Ints, user: Ints) -> Predictions:
        found = self.model.predict(group, user)
        return Predictions(np.where(found.seen, np.exp(found.amount), 0.0), found.spread, found.seen)


WAYS: dict[str, Predictor] = {
    "forest, as the paper": Forest(),
    "without bootstrap": Forest(bootstrap=False),
    "of logarithms": Logarithms(Forest()),
    "of logarithms, without bootstrap": Logarithms(Forest(bootstrap=False)),
    "exact matches first": ExactFirst(Forest()),
    "exact matches first, without bootstrap": ExactFirst(Forest(bootstrap=False)),
    "exact matches first, of logarithms": ExactFirst(Logarithms(Forest())),
    "median of the group": EarlierRuns("median"),
    "mean of the group": EarlierRuns("mean"),
}


def figures(way: Predictor, history: Runs) -> tuple[float, float, float, float]:
    """Return shares predicted exactly and within a tenth, the mean error, and the mean factor.

    The factor is the exponential of the mean of ``|log(predicted / actual)|`` where the group was known.
    """
    cut = int(TRAINED * len(history))
    earlier, newest = (_rows(history, np.arange(len(history)) // cut == part) for part in (0, 1))
    found = way.fit(earlier).predict(newest.group, newest.user)
    errors = evaluate(found, newest.amount)
    ratio = np.log(np.maximum(found.amount[found.seen], 1.0) / newest.amount[found.seen])
    return errors.exact, errors.within_tenth, errors.mean_error, float(np.exp(np.abs(ratio).mean()))


def _rows(history: Runs, which: Bools) -> Runs:
    return Runs(history.group[which], history.user[which], history.amount[which])


def compared() -> str:
    """Return the table."""
    histories: list[Runs] = []
    for seed in SEEDS:
        jobs = read_jobs("a-srpt", start="2023-08-15", days=1, seed=seed)
        assert jobs.recurrence is not None
        whole = jobs.recurrence.history
        histories.append(_rows(whole, whole.group % EVERY == 0))
    rows: list[list[str]] = []
    for name, way in WAYS.items():
        exact, tenth, error, factor = np.mean([figures(way, history) for history in histories], axis=0).tolist()
        rows.append([name, f"{100 * exact:.1f} %", f"{100 * tenth:.1f} %", f"{error:,.0f}", f"{factor:.2f}"])
    head = ["predicted by", "exact", "within a tenth", "mean error, iterations", "off by a factor of, where known"]
    return rows_of(head, rows)


def main() -> None:
    """Make the table of a page anew."""
    fill(Path(sys.argv[1]), {"a-srpt-forest": compared})


if __name__ == "__main__":
    main()
