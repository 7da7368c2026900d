"""Equations 5 and 6 of GREEN and its shifting table, on numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.policies.green.carbon import lower_priority, mean_intensity, rescaled_power, shifting
from tests.support.builders import hourly_curve

NAN = float("nan")
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("mu", "expected"), [(1.0, [1.0, 1.0, 1.0, 1.0]), (2.0, [1.0, 1.25, 1.5, 2.0]), (3.0, [1.0, 1.5, 2.0, 3.0])]
)
def test_equation_6_rescales_power_to_one_up_to_mu(mu: float, expected: list[float]) -> None:
    assert rescaled_power(np.array([150.0, 200, 250, 350]), mu).tolist() == expected


def test_power_that_is_unknown_or_all_the_same_rescales_to_one() -> None:
    assert rescaled_power(np.array([NAN, 100, 300]), 2).tolist() == [1, 1, 2]
    assert rescaled_power(np.array([250.0, 250]), 2).tolist() == [1, 1]
    assert rescaled_power(np.array([NAN, NAN]), 2).tolist() == [1, 1]
    assert rescaled_power(np.array([]), 2).tolist() == []


@pytest.mark.parametrize(
    ("intensity", "expected"),
    [
        pytest.param(299.0, [1.0, 1.25, 1 / 1.5, 1 / 2.0], id="green: high power forward, low power back"),
        pytest.param(301.0, [1.0, 1 / 1.25, 1.5, 2.0], id="dirty: the other way round"),
        pytest.param(300.0, [1.0, 1 / 1.25, 1.5, 2.0], id="an average hour is not a green one"),
    ],
)
def test_shifting_follows_the_table_of_four_quadrants(intensity: float, expected: list[float]) -> None:
    power = np.array([150.0, 200, 250, 350])  # the median is 225 W

    assert shifting(power, intensity, 300.0, mu=2.0).tolist() == expected


def test_jobs_that_share_the_median_power_are_high_power_jobs() -> None:
    most_hungry, most_thrifty = np.array([120.0, 340, 340]), np.array([120.0, 120, 340])

    assert shifting(most_hungry, 500, 300, mu=2.0).tolist() == [1.0, 2.0, 2.0]
    assert shifting(most_hungry, 100, 300, mu=2.0).tolist() == [1.0, 0.5, 0.5]
    assert shifting(most_thrifty, 500, 300, mu=2.0).tolist() == [1.0, 1.0, 2.0]


def test_a_job_of_unknown_power_is_not_shifted() -> None:
    assert shifting(np.array([NAN, 100, 300]), 100, 300, mu=2.0).tolist() == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("intensity", [100.0, 300.0, 500.0])
def test_mu_of_one_switches_shifting_off_exactly(intensity: float) -> None:
    power = np.random.default_rng(3).uniform(90, 420, 200)

    assert (shifting(power, intensity, 300.0, mu=1.0) == 1.0).all()


def test_equation_5_divides_by_degradation_and_multiplies_by_shifting() -> None:
    priority = lower_priority(np.array([100.0, 100, 100]), np.array([1.0, 0.8, NAN]), np.array([1.5, 1.5, 0.5]))

    assert priority.tolist() == [150.0, 187.5, 50.0]


def test_footprints_below_zero_or_unknown_count_as_none() -> None:
    assert lower_priority(np.array([-5.0, NAN]), np.array([1.0, 1.0]), np.array([2.0, 2.0])).tolist() == [0, 0]


def test_the_average_looks_a_window_ahead_where_the_forecast_reaches_that_far() -> None:
    curve = hourly_curve([100] * 24 + [200] * 24 + [900], start_s=0)

    assert mean_intensity(curve, now_s=DAY_S, window_s=DAY_S) == 200


def test_the_average_looks_back_where_there_is_no_forecast() -> None:
    curve = hourly_curve([900] * 6 + [100] * 24, start_s=0)

    assert mean_intensity(curve, now_s=30 * 3600.0 - 1, window_s=DAY_S) == 100


def test_the_average_slides_with_the_end_of_a_short_forecast() -> None:
    curve = hourly_curve([100] * 24 + [200] * 6, start_s=0)

    assert mean_intensity(curve, now_s=DAY_S, window_s=DAY_S) == pytest.approx((18 * 100 + 6 * 200) / 24)


def test_the_average_of_a_short_curve_is_the_mean_of_all_of_it() -> None:
    assert mean_intensity(hourly_curve([100, 300], start_s=0), now_s=3600, window_s=DAY_S) == 200
