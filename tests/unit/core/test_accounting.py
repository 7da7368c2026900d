"""Energy, emissions and completion times against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.core.accounting.carbon import carbon_gco2, carbon_of_power_gco2
from services.core.accounting.completion import completion_times
from services.core.accounting.efficiency import efficiency_per_j
from services.core.accounting.energy import counter_energy_j, idle_energy_j, idle_share, integrate_power
from services.core.accounting.host_power import CpuPowerModel, job_power_w
from services.core.domain.errors import DomainError
from tests.support.builders import hourly_curve


def test_power_samples_integrate_by_trapezoids() -> None:
    energy = integrate_power(np.array([0.0, 30, 60]), np.array([100.0, 200, 200]), start_s=0, end_s=60)

    assert energy.energy_j == 150 * 30 + 200 * 30
    assert energy.measured_s == 60


def test_a_window_between_samples_is_cut_out_of_the_line() -> None:
    energy = integrate_power(np.array([0.0, 60]), np.array([0.0, 60.0]), start_s=15, end_s=45)

    assert energy.energy_j == pytest.approx((15 + 45) / 2 * 30)


def test_windows_next_to_each_other_add_up() -> None:
    times, power = np.array([0.0, 25, 50, 100, 120]), np.array([80.0, 120, 300, 50, 60])
    whole = integrate_power(times, power, start_s=10, end_s=110)
    parts = [integrate_power(times, power, start_s=at, end_s=at + 20) for at in range(10, 110, 20)]

    assert sum(part.energy_j for part in parts) == pytest.approx(whole.energy_j)


def test_a_long_gap_is_not_measured() -> None:
    energy = integrate_power(np.array([0.0, 30, 600]), np.array([100.0, 100, 100]), start_s=0, end_s=600)

    assert (energy.energy_j, energy.measured_s) == (3000, 30)


@pytest.mark.parametrize(
    ("times", "power"),
    [([0.0, 0.0], [1.0, 1.0]), ([0.0, 1.0], [1.0]), ([0.0, 1.0], [1.0, -1.0]), ([0.0, 1.0], [1.0, np.nan])],
)
def test_samples_that_cannot_be_are_refused(times: list[float], power: list[float]) -> None:
    with pytest.raises(DomainError):
        integrate_power(np.array(times), np.array(power), start_s=0, end_s=1)


def test_no_samples_measure_nothing() -> None:
    assert integrate_power(np.array([]), np.array([]), start_s=0, end_s=9).measured_s == 0


def test_a_counter_that_was_reset_counts_from_there() -> None:
    assert counter_energy_j(np.array([1000.0, 1500, 20, 70])) == 500 + 20 + 50
    assert counter_energy_j(np.array([5.0])) == 0
    with pytest.raises(DomainError):
        counter_energy_j(np.array([1.0, -1.0]))


def test_what_jobs_did_not_use_is_idle() -> None:
    assert idle_energy_j(1000, 750) == 250
    assert idle_energy_j(1000, 1000.5) == 0
    assert (idle_share(250, 1000), idle_share(0, 0)) == (0.25, 0)
    with pytest.raises(DomainError):
        idle_energy_j(1000, 1100)


def test_a_kilowatt_hour_at_300_grams_with_overhead() -> None:
    assert carbon_gco2(3_600_000, 300, pue=1.5) == 450
    assert carbon_gco2(3_600_000, -20) == -20
    for arguments in ((-1.0, 300.0, 1.0), (1.0, 300.0, 0.9), (math.nan, 300.0, 1.0)):
        with pytest.raises(DomainError):
            carbon_gco2(*arguments)


def test_a_constant_draw_follows_the_curve() -> None:
    curve = hourly_curve([100, 300], start_s=0)

    assert carbon_of_power_gco2(1000, 1800, 5400, curve) == pytest.approx(0.5 * 100 + 0.5 * 300)


def test_a_cpu_draws_between_idle_and_peak() -> None:
    line = CpuPowerModel.between(50, 250)
    assert [line.at(usage) for usage in (0, 0.5, 1, 1.2, -0.1)] == [50, 150, 250, 250, 50]
    bent = CpuPowerModel((0, 0.2, 1), (50, 130, 250))
    assert bent.at(0.1) == 90
    assert bent.at(0.6) == 190
    assert job_power_w(300, bent.at(0.1), 40) == 430
    for points, watts in (((0.0, 0.5), (1.0, 2.0)), ((0.0, 1.0), (2.0, 1.0)), ((0.0,), (1.0,))):
        with pytest.raises(DomainError):
            CpuPowerModel(points, watts)


def test_efficiency_is_progress_per_joule_since_the_last_scaling() -> None:
    assert efficiency_per_j(0.10, 0.15, 1000, 3000) == pytest.approx(0.05 / 2000)
    assert efficiency_per_j(0.2, 0.1, 0, 10) == 0
    assert math.isnan(efficiency_per_j(0.1, 0.2, 10, 10))


def test_completion_times_are_mean_and_99th_percentile() -> None:
    times = completion_times(np.zeros(101), np.arange(101.0))

    assert (times.jobs, times.mean_s, times.p99_s) == (101, 50, 99)
    assert math.isnan(completion_times(np.array([]), np.array([])).mean_s)
    with pytest.raises(DomainError):
        completion_times(np.array([5.0]), np.array([4.0]))
