"""The parts of scikit-learn that are used, with types: the library itself has none.

Its classes are imported by name where they are used, so that the type checker does not infer types from its sources.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Floats


class Regressor(Protocol):
    """A regression of scikit-learn."""

    def fit(self, x: Floats, y: Floats, /, sample_weight: Floats | None = None) -> Regressor:
        """Return itself, fitted: x is (n, features), y (n,) or (n, outputs), the weights of the rows (n,)."""
        ...

    def predict(self, x: Floats, /) -> Floats:
        """Return (n,) or (n, outputs) of (n, features)."""
        ...


class FittedTree(Protocol):
    """The arrays of a fitted tree, without what was only needed to fit it."""

    def predict(self, x: NDArray[np.float32], /) -> Floats:
        """Return (n, 1) of (n, features)."""
        ...
