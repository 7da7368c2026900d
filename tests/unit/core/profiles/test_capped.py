"""Under a power limit: the form that lets a limit bind only where the draw meets it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.profiles.capped import fit_capped, step_and_energy, unpacked
from services.core.profiles.models import mape
from services.core.profiles.observations import Observations
from services.core.profiles.profile import JobProfile
from tests.support.performance import SPEED, grid, measured

PLANTED = np.array(
    [0.004, 1e-5, 0.006, 2e-4, 1e-3, *[0.0] * 8, 3.0, 1.0, 36.0, 25.0, 4.0, 40.0, 0.0, 1.5], dtype=np.float64
)
LIMITS = tuple(range(100, 251, 25))
WHERE = grid(gpus=(1,), batches=(4, 16, 64, 256), clocks=LIMITS)


def points(noise: float = 0.0) -> Observations:
    """Return points of the planted job on one board."""
    step_s, energy = step_and_energy(unpacked(PLANTED), *WHERE)
    rng = np.random.default_rng(3)

    def noisy(values: Floats) -> Floats:
        return values * np.exp(noise * rng.standard_normal(len(values)))

    return Observations.of(
        noisy(step_s),
        local_batch=WHERE[1],
        control=WHERE[2],
        energy_j_per_iteration=noisy(energy),
        axis=ControlKind.POWER_LIMIT,
    )


def test_a_limit_above_the_demand_is_not_felt_and_one_below_it_is_kept() -> None:
    limits = np.array([100.0, 125.0, 240.0, 250.0])

    small_s, small_j = step_and_energy(unpacked(PLANTED), 1, 1, limits, 1)
    large_s, large_j = step_and_energy(unpacked(PLANTED), 1, 256, limits, 1)

    assert small_s[2] == pytest.approx(small_s[3], rel=0.001)
    assert large_s[0] > 1.15 * large_s[3]
    assert (large_j / large_s <= limits).all()
    assert (small_j / small_s < 130).all()


def test_more_power_is_never_slower_and_draws_no_less() -> None:
    for batch in (1, 8, 64, 512):
        step_s, energy = step_and_energy(unpacked(PLANTED), 1, batch, np.linspace(80, 400, 100), 1)
        power_w = energy / step_s

        assert (np.diff(step_s) <= 0).all()
        assert (np.diff(power_w) >= -1e-9).all()


def test_without_noise_every_prediction_is_right() -> None:
    model = fit_capped(points())
    truth_s, truth_j = step_and_energy(unpacked(PLANTED), 1, WHERE[1], WHERE[2] + 10, 1)

    found_s, found_j = model.step_and_energy(1, WHERE[1], WHERE[2] + 10, 1)

    assert mape(found_s, truth_s) < 0.003
    assert mape(found_j, truth_j) < 0.003


def test_it_needs_limits_and_energies() -> None:
    with pytest.raises(DomainError, match="needs power limits"):
        fit_capped(replace(points(), energy_j_per_iteration=np.full(len(WHERE[0]), np.nan)))
    with pytest.raises(DomainError, match="needs power limits"):
        fit_capped(measured(grid(gpus=(1,)), speed=SPEED))


def test_a_gang_of_one_size_is_fitted_from_its_belief_and_its_limits() -> None:
    """One size and batch at many limits is one configuration without them: too little for a fit of its own."""
    limits = np.linspace(100.0, 400.0, 8)
    points = Observations.of(
        0.1 * (1 + 60.0 / limits),
        gpus=np.full(8, 2.0),
        local_batch=np.full(8, 32.0),
        nodes=np.ones(8),
        control=limits,
        mean_power_w=np.minimum(limits, 360.0),
        axis=ControlKind.POWER_LIMIT,
    )
    profile = JobProfile.of("A100-SXM4-80GB", "vision", ControlKind.POWER_LIMIT).observe(points)
    step_s, _ = profile.foreseen(2.0, 32.0, limits, 1.0)
    assert step_s == pytest.approx(points.seconds_per_iteration, rel=0.1)
