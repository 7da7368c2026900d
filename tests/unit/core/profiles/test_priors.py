"""What is believed of a job before its first point: how long a step takes, of what it is made, and what it draws."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.profiles.boards import ANY_BOARD, RELATIVE_SPEED, Board, board_of
from services.core.profiles.capped import CappedParameters
from services.core.profiles.priors import (
    ANY_FAMILY,
    FAMILIES,
    believed_capped,
    believed_draw,
    believed_speed,
    family_of,
)
from services.core.profiles.throughput import powers, times

BOARD = Board(idle_w=60.0, peak_w=360.0, top_mhz=1_500.0, speed=2.0)
NAMED = [name for name in FAMILIES if name != ANY_FAMILY]


@pytest.mark.parametrize(
    ("name", "step_s", "watts_above_idle"),
    [("vision", 0.192, 240.0), ("language", 0.32, 270.0), ("speech", 0.8, 180.0), ("recommendation", 0.01024, 60.0)],
)
def test_a_usual_step_on_a_v100(name: str, step_s: float, watts_above_idle: float) -> None:
    family, v100 = family_of(name), Board(60.0, 360.0, 1_500.0, RELATIVE_SPEED["V100"])

    assert times(believed_speed(v100, family, top=1_500.0), 1, family.batch, 1_500.0, 1).grad_s == pytest.approx(step_s)
    assert family.demand * (v100.peak_w - v100.idle_w) == pytest.approx(watts_above_idle)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_has_a_floor_a_share_that_goes_with_the_clock_and_a_share_that_does_not(name: str) -> None:
    family = family_of(name)
    believed = believed_speed(BOARD, family, top=1_500.0)
    step_s = family.sample_s * family.batch / BOARD.speed
    by_batch_s = (1 - family.floor) * step_s

    usual, half, empty = (
        times(believed, 1, batch, clock, 1)
        for batch, clock in ((family.batch, 1_500.0), (family.batch, 750.0), (0, 1_500.0))
    )

    assert usual.grad_s == pytest.approx(step_s)
    assert half.grad_s == pytest.approx(step_s + family.clocked * by_batch_s)
    assert (empty.grad_s, empty.io_s) == pytest.approx((family.floor * step_s, 0))
    assert usual.io_s == pytest.approx(0.05 * by_batch_s)
    assert (believed.gamma1, believed.gamma2) == (3.0, 1.5)  # both overlap, synchronisation less


@pytest.mark.parametrize("name", FAMILIES)
def test_gangs_synchronise_for_their_familys_share_of_a_step_and_little_more_as_they_grow(name: str) -> None:
    family = family_of(name)
    believed = believed_speed(BOARD, family, top=1_500.0)
    step_s = family.sample_s * family.batch / BOARD.speed

    def sync_s(gpus: int, nodes: int, clock_mhz: float = 1_500.0) -> float:
        return float(times(believed, gpus, family.batch, clock_mhz, nodes).sync_s)

    local_s, node_s = family.sync_local * step_s, family.sync_node * step_s
    assert sync_s(1, 1) == 0
    assert (sync_s(2, 1), sync_s(2, 2)) == pytest.approx((local_s, node_s))
    assert (sync_s(7, 1), sync_s(12, 2)) == pytest.approx((1.1 * local_s, 1.05 * node_s))
    assert (sync_s(2, 1, 750.0), sync_s(2, 2, 750.0)) == pytest.approx((1.3 * local_s, 1.1 * node_s))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_board_draws_linearly_up_to_its_breaking_point_and_with_its_voltage_beyond(name: str) -> None:
    family = family_of(name)
    believed = believed_draw(BOARD, family)
    top, at_break = powers(believed, family.batch, 1_500.0), powers(believed, family.batch, 900.0)

    assert BOARD.break_mhz == 900
    assert float(top.static_w) == pytest.approx(60 * 1_500 / 900)
    assert float(top.grad_w) == pytest.approx(family.demand * (360 - 60 * 1_500 / 900))
    assert float(top.sync_w) == pytest.approx(0.5 * top.grad_w)
    # P ~ f V^2, and the voltage is 1.3 times as high at the top.
    assert float(at_break.grad_w) == pytest.approx(top.grad_w * 0.6 / 1.3**2)
    just_below, half = powers(believed, family.batch, 899.999), powers(believed, family.batch, 450.0)
    assert np.allclose(np.array(just_below), np.array(at_break), rtol=1e-5)
    assert tuple(map(float, half)) == pytest.approx((at_break.grad_w / 2, at_break.sync_w / 2, 60))


@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_a_usual_steps_draw_does_not_depend_on_its_batch(name: str) -> None:
    family = family_of(name)
    shrunk = 0.5 + 0.5 * np.log(2) / np.log(family.batch + 2)

    for clock_mhz in (600.0, 1_500.0):
        usual, empty = (powers(believed_draw(BOARD, family), batch, clock_mhz).grad_w for batch in (family.batch, 0))
        assert float(empty / usual) == pytest.approx(shrunk)


@pytest.mark.parametrize("name", FAMILIES)
def test_under_a_power_limit_the_same_is_believed_at_the_top(name: str) -> None:
    family = family_of(name)
    vector = believed_capped(BOARD, family)
    own = dict(zip(CappedParameters._fields[1:], vector[15:].tolist(), strict=True))
    dynamic_w = family.demand * (360 - 60)

    assert vector[:15].tolist() == list(believed_speed(BOARD, family, top=1.0))
    assert own["alpha_w"] * np.log(family.batch + own["theta"]) + own["beta_w"] == pytest.approx(dynamic_w)
    assert (own["beta_w"], own["sync_w"]) == pytest.approx((0.5 * dynamic_w, 0.5 * dynamic_w))
    assert (own["static_w"], own["theta"], own["exponent"]) == (60, 2, 1.2)


def test_a_job_that_does_not_say_what_it_trains_is_between_all_families() -> None:
    for field in ("sample_s", "batch", "floor", "clocked", "sync_local", "sync_node", "demand"):
        each = [getattr(FAMILIES[name], field) for name in NAMED]
        assert getattr(FAMILIES[ANY_FAMILY], field) == pytest.approx(float(np.prod(each)) ** (1 / len(each)))


def test_an_unknown_board_is_a_middling_one_and_a_known_one_is_the_catalogues() -> None:
    assert board_of("MI300X") == ANY_BOARD == Board(50.0, 350.0, 1_600.0, 1.5)
    assert board_of("NVIDIA A100-SXM4-40GB").speed == RELATIVE_SPEED["A100"]
