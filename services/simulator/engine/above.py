"""How long and how far a simulated cluster draws more than its policy's limit, because models have errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.core.domain.units import J_PER_KWH

ROUNDING = 1e-9


@dataclass
class AboveLimit:
    """Sums over a run.

    Attributes:
        limit_w: In force since the last round; inf for none.
        seconds, energy_j: Above the limit; the energy is that beyond it.
        most: The largest excess as a share of the limit.
        most_of_error: The largest excess over the error that the models stated then; NaN where they stated none.
    """

    limit_w: float = math.inf
    seconds: float = 0.0
    energy_j: float = 0.0
    most: float = 0.0
    most_of_error: float = 0.0

    def draw(self, power_w: float, seconds: float) -> None:
        """Add a period of constant power."""
        excess_w = power_w - self.limit_w
        if excess_w > ROUNDING * self.limit_w:
            self.seconds += seconds
            self.energy_j += excess_w * seconds
            self.most = max(self.most, excess_w / self.limit_w)

    def held(self, power_w: float, limit_w: float) -> bool:
        """Store the limit of a round and the cluster's power after it; return whether that keeps the limit."""
        self.limit_w = limit_w
        return power_w <= limit_w * (1 + ROUNDING)

    def stated(self, power_w: float, error_w: float) -> None:
        """Store the error that the models state when the limit is not kept."""
        known = error_w > 0 and not math.isnan(self.most_of_error)
        self.most_of_error = max(self.most_of_error, (power_w - self.limit_w) / error_w) if known else math.nan

    def figures(self, whole_s: float) -> dict[str, float]:
        """Return the figures for the result of a run of that length."""
        return {
            "above_limit_share": self.seconds / whole_s if whole_s > 0 else 0.0,
            "above_limit_kwh": self.energy_j / J_PER_KWH,
            "above_limit_most": self.most,
            "above_limit_of_error": self.most_of_error,
        }
