"""How long, and by how much, a simulated cluster exceeds its policy's power limit because of model errors."""

import math
from dataclasses import dataclass

from services.core.domain.units import J_PER_KWH

ROUNDING = 1e-9


@dataclass
class AboveLimit:
    """Time and energy above the limit, summed over a run.

    Attributes:
        seconds, energy_j: Time above the limit, and the energy in excess of it.
    """

    limit_w: float = math.inf  #: The limit in force since the last round; inf for none
    seconds: float = 0.0
    energy_j: float = 0.0
    most: float = 0.0  #: The largest excess as a share of a limit above 0 W
    most_of_error: float = 0.0
    """The largest ratio of the excess to the error that the models stated then; NaN if they stated none."""

    def draw(self, power_w: float, seconds: float) -> None:
        excess_w = power_w - self.limit_w
        if excess_w > ROUNDING * self.limit_w:
            self.seconds += seconds
            self.energy_j += excess_w * seconds
            if self.limit_w > 0:  # it is 0 where a share of the cluster's power is set, and all nodes are away
                self.most = max(self.most, excess_w / self.limit_w)

    def held(self, power_w: float, limit_w: float) -> bool:
        """Set the limit of a round; return whether the cluster's power after the round stays within it."""
        self.limit_w = limit_w
        return power_w <= limit_w * (1 + ROUNDING)

    def stated(self, power_w: float, error_w: float) -> None:
        """Set the error that the models state while the limit is exceeded."""
        known = error_w > 0 and not math.isnan(self.most_of_error)
        self.most_of_error = max(self.most_of_error, (power_w - self.limit_w) / error_w) if known else math.nan

    def figures(self, whole_s: float) -> dict[str, float]:
        return {
            "above_limit_share": self.seconds / whole_s if whole_s > 0 else 0.0,
            "above_limit_kwh": self.energy_j / J_PER_KWH,
            "above_limit_most": self.most,
            "above_limit_of_error": self.most_of_error,
        }
