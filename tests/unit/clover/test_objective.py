"""Equations 1 to 3 and 6, with the paper's worked numbers."""

from __future__ import annotations

import pytest

from services.core.domain.errors import DomainError
from services.core.policies.clover.objective import Baseline, Goal, annealing_energy

BASELINE = Baseline(accuracy=100.0, carbon_gco2=1_000.0, p95_s=0.1)


@pytest.mark.parametrize(
    ("accuracy", "energy", "intensity", "objective"),
    [(96, 0.4, 500, 4.4), (98, 1.2, 500, 2.2), (96, 0.4, 100, 6.0), (98, 1.2, 100, 7.0)],
)
def test_the_table_of_figure_6(accuracy: float, energy: float, intensity: float, objective: float) -> None:
    """The second row prints 3.2, where its own columns give 0.1 * 40 - 0.9 * 2 = 2.2; the preference is the same."""
    assert Goal(BASELINE, carbon_weight=0.1).objective(accuracy, energy * intensity) == pytest.approx(objective)


@pytest.mark.parametrize("objective", [-20.0, -0.5, 0.5, 20.0])
def test_a_violation_is_never_rewarded(objective: float) -> None:
    """As printed, equation 6 makes a late configuration with f < 0 better than one in time."""
    in_time, late, later = (annealing_energy(objective, p95_s, 0.1) for p95_s in (0.09, 0.11, 0.2))

    assert in_time == -objective
    assert in_time < late < later


def test_sla_and_floor_are_limits() -> None:
    goal = Goal(BASELINE, max_accuracy_loss_pct=0.5)

    assert goal.allows(99.5, 0.1)
    assert not goal.allows(99.4, 0.1)
    assert not goal.allows(99.5, 0.1001)


@pytest.mark.parametrize(("carbon_weight", "loss_pct"), [(1.1, None), (-0.1, None), (float("nan"), None), (0.5, -1.0)])
def test_parameters_out_of_range_are_refused(carbon_weight: float, loss_pct: float | None) -> None:
    with pytest.raises(DomainError):
        Goal(BASELINE, carbon_weight, loss_pct)
