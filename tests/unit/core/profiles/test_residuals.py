"""The correction of what a form leaves over: it follows stairs, keeps off noise and fades away from the points."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.domain.arrays import Floats
from services.core.profiles.learn import fit_throughput
from services.core.profiles.observations import Observations
from services.core.profiles.residuals import LEAST_POINTS, fit_residuals

BATCHES = np.geomspace(8, 512, 40).round()


def seen(time_s: Floats) -> Observations:
    """Return step times over the batches."""
    return Observations.of(time_s, local_batch=BATCHES)


def stairs(batch: Floats) -> Floats:
    """Return a factor that is higher between two batches: another kernel."""
    return np.where((batch > 32) & (batch < 128), 1.5, 1.0)


def test_stairs_are_followed_between_points_and_the_form_alone_holds_far_away() -> None:
    points = seen(0.1 * stairs(BATCHES))
    found = fit_residuals(points, np.full(len(points), 0.1), points.seconds_per_iteration)

    assert found is not None
    assert found.factor(1, 70.0, 1_000.0, 1) == pytest.approx(1.5, rel=0.1)
    assert found.factor(1, 20.0, 1_000.0, 1) == pytest.approx(1.0, rel=0.1)
    assert found.factor(1, 1e7, 1_000.0, 1) == pytest.approx(1.0, rel=0.02)
    assert found.factor(np.ones(3), np.array([[70.0], [20.0]]), 1_000.0, 1).shape == (2, 3)


def test_noise_is_not_corrected_nor_are_few_points() -> None:
    rng = np.random.default_rng(5)
    points = seen(0.1 * np.exp(0.05 * rng.standard_normal(len(BATCHES))))
    predicted = np.full(len(points), 0.1)

    assert fit_residuals(points, predicted, points.seconds_per_iteration) is None
    few = seen(0.1 * stairs(BATCHES)).take(np.arange(0, 40, 6))
    assert len(few) == LEAST_POINTS - 1
    assert fit_residuals(few, predicted[: len(few)], few.seconds_per_iteration) is None


def test_left_out_points_are_left_out_of_the_correction_too() -> None:
    planted = 0.01 + 0.001 * BATCHES
    rng = np.random.default_rng(7)
    noisy = seen(planted * np.exp(0.05 * rng.standard_normal(len(BATCHES))))
    stepped = seen(planted * stairs(BATCHES))

    noise, steps = (fit_throughput(points, held_out=True, residuals=True) for points in (noisy, stepped))

    assert noise.quality.held_out_mape > 0.03, "as good as the noise allows and no better"
    assert steps.quality.held_out_mape < 0.5 * steps.quality.form_mape
    assert fit_throughput(stepped, held_out=True).quality.held_out_mape == steps.quality.form_mape
    low, high = steps.interval(1, 70.0, 1_000.0, 1)
    assert low[0] < 1.5 * 0.08 < high[0], "the interval lies about the corrected prediction"
