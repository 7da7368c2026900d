"""What a configuration is worth: equations 1 to 3, and the energy that annealing minimises, equation 6."""

import math
from dataclasses import dataclass

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Baseline:
    """What configurations are compared with."""

    accuracy: float  #: Accuracy of the variant with the highest quality, in the profile's unit; above 0
    carbon_gco2: float  #: Per request: that variant's energy on whole GPUs times a baseline intensity; above 0
    p95_s: float  #: Its 95th percentile latency at the same load, which is the SLA

    def __post_init__(self) -> None:
        if not (self.accuracy > 0 and self.carbon_gco2 > 0 and self.p95_s > 0):
            raise DomainError("a baseline needs an accuracy, a carbon footprint and a latency above 0")


@dataclass(frozen=True)
class Goal:
    """What is maximised, and within which limits."""

    baseline: Baseline  #: What configurations are compared with
    carbon_weight: float = 0.5  #: Lambda of equation 3, 0 to 1
    max_accuracy_loss_pct: float | None = None
    """The accuracy floor, as the permitted loss against the baseline, per cent."""

    def __post_init__(self) -> None:
        if not 0 <= self.carbon_weight <= 1:
            raise DomainError(f"lambda is a weight from 0 to 1, not {self.carbon_weight:g}")
        if self.max_accuracy_loss_pct is not None and not 0 <= self.max_accuracy_loss_pct <= 100:
            raise DomainError(f"a greatest accuracy loss is a percentage, not {self.max_accuracy_loss_pct:g}")

    def objective(self, accuracy: float, carbon_gco2: float) -> float:
        """Return f in per cent; higher is better (equation 3)."""
        delta_carbon = delta_carbon_pct(carbon_gco2, self.baseline.carbon_gco2)
        delta_accuracy = delta_accuracy_pct(accuracy, self.baseline.accuracy)
        return self.carbon_weight * delta_carbon + (1 - self.carbon_weight) * delta_accuracy

    @property
    def floor(self) -> float:
        """The lowest permitted accuracy, in the profile's unit; minus infinity without a floor."""
        if self.max_accuracy_loss_pct is None:
            return -math.inf
        return self.baseline.accuracy * (1 - self.max_accuracy_loss_pct / 100)

    def allows(self, accuracy: float, p95_s: float) -> bool:
        """Return whether a configuration with these figures keeps the SLA and the accuracy floor."""
        return p95_s <= self.baseline.p95_s and self.keeps_floor(accuracy)

    def keeps_floor(self, accuracy: float) -> bool:
        """Return whether an accuracy is at or above the floor."""
        loss_pct = -delta_accuracy_pct(accuracy, self.baseline.accuracy)
        return self.max_accuracy_loss_pct is None or loss_pct <= self.max_accuracy_loss_pct + 1e-9


def delta_accuracy_pct(accuracy: float, baseline: float) -> float:
    """Return the accuracy difference from the baseline, per cent of the baseline (equation 1)."""
    return (accuracy - baseline) / baseline * 100


def delta_carbon_pct(carbon_gco2: float, baseline_gco2: float) -> float:
    """Return the reduction in carbon per request, per cent of the baseline (equation 2)."""
    return (baseline_gco2 - carbon_gco2) / baseline_gco2 * 100


def annealing_energy(objective: float, p95_s: float, limit_s: float) -> float:
    """Return h, which annealing minimises (equation 6).

    As printed, ``-f * min(1, L_tail / L)`` rewards a violation if f is negative. Our reading: in that case multiply by
    ``max(1, L / L_tail)``. ``test_a_violation_is_never_rewarded`` shows the effect.
    """
    return -objective * (min(1.0, limit_s / p95_s) if objective >= 0 else max(1.0, p95_s / limit_s))
