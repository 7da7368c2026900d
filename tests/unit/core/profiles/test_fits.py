"""Fits find what was planted, say how sure they are, and refuse nonsense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.profiles.fitting import noise_of
from services.core.profiles.learn import fit_energy, fit_throughput
from services.core.profiles.models import mape
from services.core.profiles.observations import Observations, PointError
from services.core.profiles.throughput import ThroughputParameters, times
from tests.support.performance import CLOCKS_MHZ, DRAW, SPEED, grid, measured

EVERYWHERE = grid()
SOME = grid(clocks=CLOCKS_MHZ[::3])


def test_planted_times_are_found_exactly_without_noise() -> None:
    model = fit_throughput(measured(SOME, draw=None))

    assert np.array(model.parameters) == pytest.approx(np.array(SPEED), rel=0.02)
    assert mape(model.times(*EVERYWHERE).iter_s, times(SPEED, *EVERYWHERE).iter_s) < 1e-4
    assert model.quality.mape < 1e-4
    assert not model.fixed


def test_planted_energy_is_found_without_noise() -> None:
    model = fit_energy(measured(grid(clocks=CLOCKS_MHZ[::2])))
    truth = measured(EVERYWHERE).energy_j_per_iteration

    assert mape(model.energy_j(*EVERYWHERE), truth) < 1e-3
    assert model.quality.mape < 1e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_is_averaged_out_and_owned_up_to(seed: int) -> None:
    points = measured(grid(clocks=CLOCKS_MHZ[::2]), noise=0.05, seed=seed)
    truth = measured(EVERYWHERE)

    model = fit_throughput(points)
    energy = fit_energy(points, model)

    assert mape(model.times(*EVERYWHERE).iter_s, truth.seconds_per_iteration) < 0.03
    assert mape(energy.energy_j(*EVERYWHERE), truth.energy_j_per_iteration) < 0.04
    assert 0.02 < model.quality.mape < 0.06


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.floats(0.001, 0.05)] * 2, st.floats(1e-5, 1e-3), st.floats(0.1, 10)), st.floats(1, 4))
@example((0.05, 0.001, 1e-4, 0.1), 4.0)  # reading is the floor: from elsewhere the fit ends 0.7 % off
def test_whatever_one_gpu_does_is_found(parts: tuple[float, float, float, float], gamma: float) -> None:
    alpha_io, alpha_grad, beta, kappa = parts
    planted = ThroughputParameters(alpha_io, beta, alpha_grad, beta, kappa, *[0.0] * 8, gamma1=gamma, gamma2=1.0)
    where = grid(gpus=(1,), batches=(8, 16, 64, 256), clocks=CLOCKS_MHZ[::2])

    model = fit_throughput(measured(where, speed=planted, draw=None))

    assert model.quality.mape < 0.005
    assert set(model.fixed) == {name for name in ThroughputParameters._fields if "sync" in name} | {"gamma2"}


def test_an_absent_column_fixes_its_terms_and_says_so() -> None:
    seen = measured(grid(gpus=(1,), clocks=(900,)), draw=None)
    points = Observations.of(seen.seconds_per_iteration, local_batch=seen.local_batch)

    model = fit_throughput(points)

    assert model.fixed["kappa_grad"] == "clock_mhz is absent"
    assert model.fixed["theta_sync_node"] == "gpus is absent"
    assert model.parameters.kappa_grad == 0
    assert model.covariance[ThroughputParameters._fields.index("kappa_grad")].tolist() == [0.0] * 15
    assert model.quality.mape < 1e-3


def test_without_clocks_the_part_that_grows_with_the_batch_is_the_one_that_draws() -> None:
    batch = np.array([32.0, 64.0, 128.0, 256.0, 512.0])
    time_s = np.maximum(0.0075, 7.2e-5 * batch)
    points = Observations.of(time_s, local_batch=batch, mean_power_w=150 + 80 * np.log(batch / 8))

    model = fit_energy(points)

    assert model.throughput.parameters.beta_grad > model.throughput.parameters.beta_io
    assert model.quality.mape < 0.05


def test_an_outlier_does_not_bend_the_fit() -> None:
    points = measured(SOME, draw=None)
    disturbed = points.seconds_per_iteration.copy()
    disturbed[[5, 40]] *= 4.0

    model = fit_throughput(replace(points, seconds_per_iteration=disturbed))

    assert mape(model.times(*EVERYWHERE).iter_s, times(SPEED, *EVERYWHERE).iter_s) < 0.02


def test_equal_points_give_equal_fits_and_repeats_count_as_one_configuration() -> None:
    points = measured(SOME, noise=0.02)
    once, again = fit_throughput(points), fit_throughput(points)
    twice = fit_throughput(points.take(np.tile(np.arange(len(points)), 2)))

    assert once.parameters == again.parameters
    assert twice.quality.configurations == len(points) == twice.quality.measurements / 2
    assert np.array(twice.parameters) == pytest.approx(np.array(once.parameters), rel=1e-6)


def test_the_limit_of_power_serves_as_the_clock_does() -> None:
    limits = tuple(range(100, 251, 25))
    seen = measured(grid(gpus=(1,), clocks=limits), draw=DRAW._replace(f0_mhz=1_000.0))
    points = replace(seen, axis=ControlKind.POWER_LIMIT)

    assert fit_energy(points).quality.mape < 0.01
    assert fit_throughput(points).axis is ControlKind.POWER_LIMIT


GOOD = {"gpus": [1.0, 2.0, 4.0, 8.0], "local_batch": [32.0] * 4, "control": [900.0, 1_200.0, 900.0, 1_200.0]}
TIMES_S = [0.1, 0.11, 0.12, 0.13]


@pytest.mark.parametrize(
    ("times_s", "changed", "complaint", "row"),
    [
        ([0.1, -0.1, 0.1, 0.1], {}, "-0.1, not positive", 1),
        ([0.1, 0.1, float("nan"), 0.1], {}, "nan, not a number", 2),
        ([100_000.0] * 4, {}, "wrong units", 0),
        (TIMES_S, {"control": [900, 1_200, 900, 1.2]}, "1.2, outside 100..5000 MHz; wrong units", 3),
        (TIMES_S, {"gpus": [1, 2, 2.5, 8]}, "not a whole number", 2),
        (TIMES_S, {"nodes": [1, 4, 1, 1]}, "4 nodes for 2 GPUs", 1),
        (TIMES_S, {"energy_j_per_iteration": [20, 40_000, 80, 160]}, "W each, which no board draws", 1),
    ],
)
def test_a_point_that_cannot_be_is_named(
    times_s: list[float], changed: dict[str, list[float]], complaint: str, row: int
) -> None:
    with pytest.raises(PointError, match=complaint) as caught:
        Observations.of(times_s, **(GOOD | changed))

    assert caught.value.row == row


def test_points_that_do_not_vary_or_do_not_belong_together_are_refused() -> None:
    same = Observations.of([0.1, 0.11, 0.1], gpus=[2] * 3, local_batch=[8] * 3)
    with pytest.raises(DomainError, match="do not vary"):
        fit_throughput(same)
    with pytest.raises(DomainError, match="too few"):
        fit_throughput(Observations.of([0.1, 0.2], local_batch=[8, 16]))

    points = measured(SOME, draw=None)
    wrong = points.seconds_per_iteration.copy()
    wrong[7] *= 1_000
    with pytest.raises(PointError, match="times off") as caught:
        fit_throughput(replace(points, seconds_per_iteration=wrong))
    assert caught.value.row == 7


def test_noise_is_the_typical_error_for_the_points_that_are_to_spare() -> None:
    """A fit of five parameters to ten points follows half of their noise; one wild point hardly counts."""
    error = np.array([0.1, -0.1] * 5)

    assert noise_of(error, 0) == pytest.approx(0.14826)
    assert noise_of(error, 5) == pytest.approx(0.14826 * 2**0.5)
    assert noise_of(error, 40) == pytest.approx(0.14826 * 10**0.5)
    assert noise_of(np.append(error, 50.0), 0) == pytest.approx(0.14826)
    assert noise_of(np.zeros(10), 5) == 1e-6
