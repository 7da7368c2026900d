"""Errors on points left out, and the correction of what a form leaves over: it follows stairs, keeps off noise and
fades away from the points."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fits import folds, judged_capped, judged_energy, judged_throughput
from lab.residuals import LEAST_POINTS, fit_residuals
from services.core.domain.arrays import Floats
from services.core.profiles.observations import Observations
from tests.support.performance import CLOCKS_MHZ, grid, measured
from tests.unit.core.profiles.test_capped import points as capped_points

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

    (_, noise), (_, steps) = (judged_throughput(points, residuals=True) for points in (noisy, stepped))

    assert noise.held_out_mape > 0.03, "as good as the noise allows and no better"
    assert steps.held_out_mape < 0.5 * steps.form_mape
    assert judged_throughput(stepped)[1].held_out_mape == steps.form_mape


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_is_owned_up_to(seed: int) -> None:
    model, judged = judged_throughput(measured(grid(clocks=CLOCKS_MHZ[::2]), noise=0.05, seed=seed))

    assert judged.mape == model.quality.mape < judged.held_out_mape < 0.06
    assert judged.noise == pytest.approx(0.05, rel=0.4)


def test_every_point_is_held_out_once() -> None:
    for n_points in (4, 9, 10, 57):
        assert (np.sum(folds(n_points), axis=0) == 1).all()
        assert max(mask.sum() for mask in folds(n_points)) <= max(1, -(-n_points // 10))


def test_planted_jobs_are_found_where_the_papers_form_is_not_enough() -> None:
    found = capped_points(noise=0.01)

    (_, capped_time, capped_energy), (_, time), (_, energy) = (
        judged_capped(found),
        judged_throughput(found),
        judged_energy(found),
    )

    assert capped_time.held_out_mape < 0.015
    assert capped_energy.held_out_mape < 0.015
    assert capped_energy.held_out_mape < 0.5 * energy.held_out_mape
    assert capped_time.held_out_mape <= time.held_out_mape
