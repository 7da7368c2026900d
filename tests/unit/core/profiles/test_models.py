"""The two models as printed: limits, monotonicity, and one job at a time equal to all at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, energy_j, powers, times
from tests.support.performance import DRAW, SPEED, grid

sizes = st.floats(0, 10)
speeds = st.builds(ThroughputParameters, *[sizes] * 13, gamma1=st.floats(1, 10), gamma2=st.floats(1, 10))
draws = st.builds(
    EnergyParameters,
    **{
        name: st.floats(1, 50) if name.startswith("theta") else sizes
        for name in EnergyParameters._fields
        if name != "f0_mhz"
    },
    f0_mhz=st.floats(300, 2_000),
)


def test_one_gpu_does_not_synchronise_and_no_overlap_is_the_sum() -> None:
    plain = SPEED._replace(gamma1=1.0, gamma2=1.0)

    one, two, spread = (times(plain, gpus, 32, 1_000, nodes) for gpus, nodes in ((1, 1), (2, 1), (16, 2)))

    assert one.sync_s == 0
    assert two.sync_s == pytest.approx(8.0 / 1_000 + 0.004)
    assert spread.sync_s == pytest.approx(20 / 1_000 + (1.5 / 1_000 + 0.002) * 14 + 0.02)
    assert spread.io_s == pytest.approx(0.01 + 2e-4 * 32 * 8)
    for step in (one, two, spread):
        assert step.iter_s == pytest.approx(step.io_s + step.grad_s + step.sync_s)


def test_full_overlap_nears_the_longest_part() -> None:
    step = times(SPEED._replace(gamma1=10.0, gamma2=10.0), 8, 64, 600, 1)

    assert step.iter_s == pytest.approx(max(step.io_s, step.grad_s, step.sync_s), rel=0.08)


@settings(deadline=None)
@given(speeds, st.integers(1, 64), st.floats(1, 512), st.integers(1, 8))
def test_more_clock_is_never_slower_nor_is_less_work(
    p: ThroughputParameters, gpus: int, batch: float, nodes: int
) -> None:
    clocks = np.linspace(200, 2_000, 50)
    by_clock = times(p, gpus, batch, clocks, min(nodes, gpus)).iter_s
    by_batch = times(p, gpus, np.linspace(1, batch + 1, 50), 900.0, min(nodes, gpus)).iter_s

    assert (np.diff(by_clock) <= 1e-9 * by_clock[:-1]).all()
    assert (np.diff(by_batch) >= -1e-9 * by_batch[:-1]).all()


@settings(deadline=None)
@given(draws, st.floats(1, 512))
def test_power_does_not_fall_at_the_breaking_point(p: EnergyParameters, batch: float) -> None:
    drawn = powers(p, batch, np.linspace(200, 2_500, 200))

    for part in drawn:
        assert (np.diff(part) >= -1e-9 * np.abs(part[:-1])).all()


def test_power_grows_with_the_logarithm_of_the_batch() -> None:
    at = [float(powers(DRAW, batch, 600).grad_w) for batch in (12, 28, 60)]  # theta is 4: each step doubles

    assert at[1] - at[0] == pytest.approx(at[2] - at[1])
    assert at[2] > at[0]


def test_energy_is_power_by_the_time_of_each_part() -> None:
    step = times(SPEED, 4, 64, 700, 1)
    drawn = powers(DRAW, 64, 700)
    expected = 4 * (drawn.grad_w * step.grad_s + drawn.sync_w * step.sync_s + drawn.static_w * step.iter_s)

    assert energy_j(DRAW, step, 4, 64, 700) == pytest.approx(expected)
    assert drawn.static_w == 45.0


def test_arrays_give_what_numbers_give() -> None:
    where = grid()
    together = times(SPEED, *where)
    energies = energy_j(DRAW, together, *where[:3])

    for row in range(0, len(where[0]), 13):
        at = [float(column[row]) for column in where]
        step = times(SPEED, *at)
        assert float(step.iter_s) == pytest.approx(together.iter_s[row], rel=1e-12)
        assert float(energy_j(DRAW, step, *at[:3])) == pytest.approx(energies[row], rel=1e-12)
