"""The parts of scikit-learn that are used, with types, which the library itself lacks.

Its classes are imported by name where they are used, so that the type checker does not infer types from its sources.
"""

from __future__ import annotations

from typing import Protocol

from services.core.domain.arrays import Floats


class Regressor(Protocol):
    """A scikit-learn regression."""

    def fit(self, x: Floats, y: Floats, /, sample_weight: Floats | None = None) -> Regressor:
        """Fit and return the regressor: x is (n, features), y (n,) or (n, outputs), the weights of the rows (n,)."""
        ...

    def predict(self, x: Floats, /) -> Floats:
        """Return the predictions, (n,) or (n, outputs), for (n, features)."""
        ...
