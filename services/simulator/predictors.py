"""Predictors of job length by name, whose predictions the policies of a simulation see when jobs are submitted."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import EarlierRuns, Model, Predictor, Runs
from services.simulator.workload import Workload

PREDICTORS = ("perfect", "none", "forest", "mean", "median", "mean-of-all", "median-of-all")


@lru_cache(maxsize=8)
def predictor_of(name: str, seed: int) -> Predictor | None:
    """Return the predictor of that name; None for ``perfect`` and ``none``, whose predictions are in the workload.

    Raises:
        DomainError: There is no such predictor.
    """
    if name not in PREDICTORS:
        raise DomainError(f"unknown predictor {name!r}; known: {', '.join(PREDICTORS)}")
    if name in ("perfect", "none"):
        return None
    if name == "forest":
        from services.learning.forest import Forest  # scikit-learn: loaded only where it is used

        return _Remembering(Forest(seed=seed))
    return EarlierRuns("mean" if name.startswith("mean") else "median", of_all=name.endswith("of-all"))


def predicted(name: str, workload: Workload) -> Workload:
    """Return the jobs prepared for that predictor; with ``none``, lengths are unknown until jobs report progress."""
    return replace(workload, predicted_work_s=np.full(len(workload), np.nan)) if name == "none" else workload


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
