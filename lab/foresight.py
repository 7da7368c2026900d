"""Predictions of a job's length at submission, by a predictor that learns during the run.

It is refitted every ``retrain_s`` to the workload's history and the jobs that have ended: no decision uses anything
that had not happened by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from lab.earlier_runs import EarlierRuns
from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.profiles.recurrence import Predictions, Runs
from services.simulator.engine.options import Foreseeing
from services.simulator.workload import Workload

RETRAIN_S = 86_400.0


class Model(Protocol):
    """A fitted predictor."""

    def predict(self, group: Ints, user: Ints) -> Predictions:
        """Return the predictions for jobs of these groups and users; (n_jobs,) each."""
        ...


class Predictor(Protocol):
    """A way to learn from a history."""

    def fit(self, history: Runs) -> Model:
        """Return the model fitted to a history, which may be empty."""
        ...


def learning(predictor: Predictor, retrain_s: float = RETRAIN_S) -> Foreseeing:
    """Return what a simulation's ``predictor`` is: foresight of its workload by this predictor.

    Args:
        retrain_s: How often it is refitted to the jobs that have ended.

    Raises:
        DomainError: The interval is not above 0; when it is called: the workload does not say which jobs recur.
    """
    if not retrain_s > 0:
        raise DomainError("a predictor is refitted at intervals above 0")
    return partial(Foresight, predictor=predictor, retrain_s=retrain_s)


def _forest(seed: int) -> Predictor:
    from lab.forest import Forest  # scikit-learn: loaded only where it is used

    if seed not in _FORESTS:
        _FORESTS[seed] = _Remembering(Forest(seed=seed))
    return _FORESTS[seed]


def _earlier(statistic: str, seed: int) -> Predictor:
    del seed
    return EarlierRuns("mean" if statistic.startswith("mean") else "median", of_all=statistic.endswith("of-all"))


_FORESTS: dict[int, Predictor] = {}
PREDICTORS: Mapping[str, Callable[[int], Predictor]] = {
    "forest": _forest,
    **{name: partial(_earlier, name) for name in ("mean", "median", "mean-of-all", "median-of-all")},
}
"""By name, from a seed."""


class _Remembering:
    """Caches the model of the last history: several policies begin with the same one, and a forest takes a minute."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._last: tuple[Runs, Model] | None = None

    def fit(self, history: Runs) -> Model:
        """Fit, unless the last fit was to this very history."""
        if self._last is None or self._last[0] is not history:
            self._last = history, self._predictor.fit(history)
        return self._last[1]


class Foresight:
    """Predictions by workload row, renewed whenever the predictor is trained."""

    def __init__(self, workload: Workload, predictor: Predictor, retrain_s: float) -> None:
        if workload.recurrence is None:
            raise DomainError("this trace does not say which jobs recur, so nothing can be predicted from it")
        self._predictor = predictor
        self._retrain_s = retrain_s
        self._recurrence = workload.recurrence
        self._submitted_s = workload.submitted_s
        units = np.array([profile.iteration_s for profile in workload.profiles])[workload.profile]
        self._iterations: Floats = workload.work_s / units
        self._units = units
        self._ids = tuple(map(JobId, workload.ids))
        self._spread: Floats = np.full(len(workload), math.nan)
        self._ended: list[int] = []
        self._due_s = -math.inf
        self.work_s: Floats = np.full(len(workload), math.nan)
        """(n_jobs,) as predicted at submission; NaN for jobs not yet submitted."""
        self.spreads: dict[JobId, float] = {}  #: Of the live jobs, as ``Snapshot.length_spreads`` has them

    def at_arrival(self, row: int, now_s: float) -> float:
        """Return the job's predicted work as a share of its true work."""
        if now_s >= self._due_s:
            self._train(row, now_s)
        if np.isfinite(spread := self._spread.item(row)):
            self.spreads[self._ids[row]] = spread
        return float(self.work_s[row] / (self._iterations[row] * self._units[row]))

    def ended(self, row: int) -> None:
        """Record a job whose length is now known."""
        self._ended.append(row)
        self.spreads.pop(self._ids[row], None)

    def _train(self, row: int, now_s: float) -> None:
        """Learn from the ended jobs, and predict those submitted until the next training."""
        self._due_s = now_s + self._retrain_s
        recurs = self._recurrence
        end = int(np.searchsorted(self._submitted_s, self._due_s))
        rows = slice(row, max(end, row + 1))
        predicted = self._predictor.fit(self._history()).predict(recurs.group[rows], recurs.user[rows])
        self.work_s[rows] = predicted.amount * self._units[rows]
        known = predicted.seen & (predicted.amount > 0)
        self._spread[rows] = np.where(known, predicted.spread / np.where(known, predicted.amount, 1.0), math.nan)

    def _history(self) -> Runs:
        known, history = self._recurrence, self._recurrence.history
        if not self._ended:
            return history
        ended: Ints = np.array(self._ended, dtype=np.int64)
        return Runs(
            np.concatenate((history.group, known.group[ended])),
            np.concatenate((history.user, known.user[ended])),
            np.concatenate((history.amount, self._iterations[ended])),
        )
