"""Energy, emissions and completion times against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.core.accounting.carbon import carbon_gco2, percent_change, relative_change
from services.core.accounting.completion import completion_times
from services.core.accounting.host_power import CpuPowerModel
from services.core.domain.errors import DomainError


def test_a_kilowatt_hour_at_300_grams_with_overhead() -> None:
    assert carbon_gco2(3_600_000, 300, pue=1.5) == 450
    assert carbon_gco2(3_600_000, -20) == -20
    for arguments in ((-1.0, 300.0, 1.0), (1.0, 300.0, 0.9), (math.nan, 300.0, 1.0)):
        with pytest.raises(DomainError):
            carbon_gco2(*arguments)


def test_a_cpu_draws_between_idle_and_peak() -> None:
    line = CpuPowerModel.between(50, 250)
    assert [line.at(usage) for usage in (0, 0.5, 1, 1.2, -0.1)] == [50, 150, 250, 250, 50]
    bent = CpuPowerModel((0, 0.2, 1), (50, 130, 250))
    assert bent.at(0.1) == 90
    assert bent.at(0.6) == 190
    for points, watts in (((0.0, 0.5), (1.0, 2.0)), ((0.0, 1.0), (2.0, 1.0)), ((0.0,), (1.0,))):
        with pytest.raises(DomainError):
            CpuPowerModel(points, watts)


def test_completion_times_are_mean_and_99th_percentile() -> None:
    times = completion_times(np.zeros(101), np.arange(101.0))

    assert (times.jobs, times.mean_s, times.p99_s) == (101, 50, 99)
    assert math.isnan(completion_times(np.array([]), np.array([])).mean_s)
    with pytest.raises(DomainError):
        completion_times(np.array([5.0]), np.array([4.0]))


@pytest.mark.parametrize(
    ("value", "base", "expected"), [(90.0, 100.0, -0.1), (0.0, 5.0, -1.0), (1.0, 0.0, None), (-2.0, -1.0, None)]
)
def test_a_relative_change_needs_a_base_above_zero(value: float, base: float, expected: float | None) -> None:
    assert relative_change(value, base) == (None if expected is None else pytest.approx(expected))
    assert (percent_change(value, base) == "-") == (expected is None)


@pytest.mark.parametrize(
    ("value", "base", "shown"),
    [(150, 100, "+50.0 %"), (99.99, 100, "0.0 %"), (-50, 100, "-150.0 %"), (-60, -50, "-"), (float("nan"), 1, "-")],
)
def test_a_change_in_per_cent_has_its_sign(value: float, base: float, shown: str) -> None:
    assert percent_change(value, base) == shown
