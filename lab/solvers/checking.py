"""How far a solution is from keeping its model."""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Floats
from services.core.solvers.model import LinearModel


def violation(model: LinearModel, values: Floats) -> float:
    """Return the largest violation of a bound, row or integrality by ``values`` (n,); 0 if there is none."""
    rows = np.repeat(np.arange(model.rows), np.diff(model.starts))
    activity = np.bincount(rows, model.coefficients * values[model.columns], minlength=model.rows)
    fractions = np.abs(values - np.round(values))[model.integer]
    bounds = (model.lower - values, values - model.upper)
    excesses = (*bounds, model.row_lower - activity, activity - model.row_upper, fractions)
    return max(0.0, *(float(part.max(initial=0.0)) for part in excesses))
