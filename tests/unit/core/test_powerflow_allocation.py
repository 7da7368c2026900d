"""PowerFlow's Algorithm 1: GPUs by eq. 20, settings by eq. 21, and the limit."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.cycle.capacity import powers_of_two
from services.core.domain.errors import DomainError
from services.core.policies.powerflow.allocate import Choices, Room, allocate_gpus
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.controls import allocate_controls
from tests.support.powerflow import gaps

INF = float("inf")


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def one_control(gpus: list[list[int]], speed: list[list[float]], power_w: list[list[float]]) -> Choices:
    return Choices(np.array(gpus), np.array(speed)[:, :, None], np.array(power_w)[:, :, None])


def sizes_of(choices: Choices, gpus: int, limit_w: float = INF, **how: object) -> list[int]:
    """Return the gang sizes given on one model with nodes of two and no idle draw."""
    keeps = np.array(how.get("keeps", [False] * len(choices)))
    work_s = np.array(how.get("work_s", [1.0] * len(choices)))
    room = Room(ints(gpus), np.array([float(how.get("idle_w", 0.0))]), 2, limit_w, 0.0, ints(gpus))  # type: ignore[arg-type]
    nowhere = np.zeros(len(choices), dtype=np.int64)
    config: PowerflowConfig = how.get("config", PowerflowConfig())  # type: ignore[assignment]
    at = allocate_gpus(choices, room, gpu_model=nowhere, keeps=keeps, work_s=work_s, config=config)
    return [int(choices.gpus[job, size]) if size >= 0 else 0 for job, size in enumerate(at.tolist())]


@pytest.mark.parametrize(("stays_on", "depends"), [([0, 0], False), ([16, 4], False), ([16, 3], True), ([1, 0], True)])
def test_a_place_matters_where_some_nodes_stay_on_and_others_do_not(stays_on: list[int], depends: bool) -> None:
    room = Room(ints(16, 4), np.array([10.0, 1.0]), 4, INF, 0.0, ints(*stays_on))

    assert room.depends_on_placement == depends
    everywhere = room.wherever_placed()
    assert not everywhere.depends_on_placement
    assert everywhere.other_w == 10.0 * stays_on[0] + stays_on[1]


def test_free_devices_of_nodes_that_stay_on_draw_and_so_does_the_rest_of_the_last_node() -> None:
    some = Room(ints(16, 4), np.array([10.0, 1.0]), 4, INF, 0.0, ints(6, 4))

    assert [some.idle_draw_w(0, held) for held in (0, 5, 6, 7, 9, 10, 14)] == [60.0, 10.0, 0.0, 30.0, 10.0, 0.0, 0.0]
    assert some.idle_draw_w(0, 16) == 0.0
    assert some.idle_draw_w(1, 1) == 3.0


def test_a_first_gang_that_fits_at_its_lowest_setting_alone_is_not_passed_over() -> None:
    choices = Choices(ints(1, 1)[:, None], np.array([[[0.5, 1.0]]] * 2), np.array([[[200.0, 300.0]]] * 2))

    assert sizes_of(choices, 2, limit_w=199.0) == [0, 0]
    assert sizes_of(choices, 2, limit_w=250.0) == [1, 0]


def test_gangs_are_powers_of_two_on_the_jobs_own_grid() -> None:
    sizes = powers_of_two(ints(1, 2, 3, 3, 6), ints(8, 8, 3, 16, 12), ints(1, 2, 1, 1, 6))

    assert sizes.tolist() == [[1, 2, 4, 8], [2, 4, 8, 0], [3, 0, 0, 0], [4, 8, 16, 0], [6, 0, 0, 0]]


def test_choices_without_power_or_beyond_the_last_size_are_refused() -> None:
    with pytest.raises(DomainError, match="draws power"):
        one_control([[1]], [[1.0]], [[0.0]])
    with pytest.raises(DomainError, match="last size"):
        one_control([[1, 0]], [[1.0, 2.0]], [[10.0, 10.0]])


def test_every_job_gets_a_gpu_before_one_gets_two() -> None:
    scales = one_control([[1, 2, 4]] * 3, [[1.0, 2.0, 4.0]] * 3, [[100.0, 200.0, 400.0]] * 3)

    assert sizes_of(scales, 2) == [1, 1, 0]
    assert sizes_of(scales, 4) == [2, 1, 1]


def test_the_next_gpus_go_where_an_hour_less_costs_the_least_energy() -> None:
    """Eq. 20 by hand: doubling saves job 0 0.4 s for 25 J (1.6 %), job 1 0.25 s for 33 J (0.75 %) per unit of work."""
    choices = one_control([[1, 2]] * 2, [[1.0, 1 / 0.6], [1.0, 1 / 0.75]], [[100.0, 125 / 0.6], [100.0, 133 / 0.75]])

    assert sizes_of(choices, 3) == [2, 1]
    assert sizes_of(choices, 4) == [2, 2]


def test_a_gang_that_would_be_no_faster_stays_as_it_is() -> None:
    choices = one_control([[1, 2, 4]], [[1.0, 0.9, 3.0]], [[100.0, 150.0, 300.0]])

    assert sizes_of(choices, 8) == [1]


def test_per_gpu_a_doubling_of_a_wide_gang_is_worth_less() -> None:
    wide = one_control([[4, 8], [1, 2]], [[4.0, 8.0], [0.5, 0.9]], [[800.0, 1601.0], [200.0, 380.0]])

    assert sizes_of(wide, 9) == [8, 1]
    assert sizes_of(wide, 6, config=PowerflowConfig(marginal="energy_and_gpu")) == [4, 2]


def test_per_watt_of_the_limit_the_job_with_more_work_left_is_worth_more() -> None:
    same = one_control([[1, 2]] * 2, [[1.0, 2.0]] * 2, [[100.0, 210.0]] * 2)

    assert sizes_of(same, 3, work_s=[10.0, 50.0]) == [2, 1]
    assert sizes_of(same, 3, work_s=[10.0, 50.0], config=PowerflowConfig(marginal="power")) == [1, 2]
    assert sizes_of(same, 3, work_s=[10.0, float("nan")], config=PowerflowConfig(marginal="power")) == [2, 1]


def test_the_shortest_job_is_first_where_that_is_asked_for() -> None:
    same = one_control([[1]] * 3, [[1.0]] * 3, [[100.0]] * 3)

    assert sizes_of(same, 1, work_s=[50.0, 10.0, float("nan")]) == [1, 0, 0]
    assert sizes_of(same, 1, work_s=[50.0, 10.0, float("nan")], config=PowerflowConfig(queue="shortest")) == [0, 1, 0]


def test_the_limit_ends_the_allocation_as_printed_or_skips_what_does_not_fit() -> None:
    choices = one_control([[4], [4], [1]], [[4.0], [4.0], [1.0]], [[400.0], [400.0], [100.0]])

    assert sizes_of(choices, 16, 500.0) == [4, 0, 0]
    assert sizes_of(choices, 16, 500.0, config=PowerflowConfig(at_limit="skip")) == [4, 0, 1]


def test_what_the_last_node_took_beyond_the_limit_is_given_back() -> None:
    choices = one_control([[1]] * 4, [[1.0]] * 4, [[100.0]] * 4)

    assert sizes_of(choices, 8, 250.0) == [1, 1, 0, 0]
    assert sizes_of(choices, 8, 300.0) == [1, 1, 1, 0]


def test_idle_devices_count_until_they_are_held() -> None:
    choices = one_control([[1]] * 4, [[1.0]] * 4, [[100.0]] * 4)

    assert sizes_of(choices, 4, 290.0, idle_w=30.0) == [1, 1, 0, 0]


def test_a_job_that_no_limit_lets_run_holds_nobody_up() -> None:
    choices = one_control([[8], [1]], [[8.0], [1.0]], [[800.0], [100.0]])

    assert sizes_of(choices, 8, 500.0) == [0, 1]


def test_what_is_kept_stays_beyond_every_limit() -> None:
    choices = one_control([[4], [1]], [[4.0], [1.0]], [[400.0], [100.0]])

    assert sizes_of(choices, 8, 300.0, keeps=[True, False]) == [4, 0]


def test_settings_begin_at_the_most_efficient_and_rise_by_equation_21() -> None:
    """Per unit of work, the second setting costs gang 0 8.3 J for 0.17 s and gang 1 30 J for 0.2 s."""
    speed = np.array([[1.0, 1.2, 1.25], [1.0, 1.25, 1.3]])
    power_w = np.array([[100.0, 130.0, 150.0], [100.0, 162.5, 200.0]])

    assert allocate_controls(speed, power_w, 200.0).tolist() == [0, 0]
    assert allocate_controls(speed, power_w, 231.0).tolist() == [1, 0]
    assert allocate_controls(speed, power_w, 1000.0).tolist() == [2, 2]


def test_a_step_that_does_not_fit_leaves_room_for_others() -> None:
    speed, power_w = np.array([[1.0, 2.0], [1.0, 1.1]]), np.array([[100.0, 300.0], [100.0, 120.0]])

    assert allocate_controls(speed, power_w, 250.0).tolist() == [0, 1]


def test_a_setting_as_fast_as_a_cheaper_one_is_never_chosen() -> None:
    speed, power_w = np.array([[1.0, 1.5, 1.5, 1.4, 0.0]]), np.array([[100.0, 160.0, 200.0, 220.0, 1.0]])

    assert allocate_controls(speed, power_w, INF).tolist() == [1]


def test_below_the_most_efficient_settings_fall_where_a_watt_costs_least_speed() -> None:
    speed = np.array([[0.2, 1.0], [0.8, 1.0]])
    power_w = np.array([[90.0, 100.0], [90.0, 100.0]])

    assert allocate_controls(speed, power_w, 195.0).tolist() == [1, 0]
    assert allocate_controls(speed, power_w, 1.0).tolist() == [0, 0]
    assert allocate_controls(np.empty((0, 3)), np.empty((0, 3)), 1.0).tolist() == []


@pytest.mark.parametrize(("config", "median"), [(PowerflowConfig(), 0.15), (PowerflowConfig(marginal="power"), 0.02)])
def test_the_greedy_is_within_the_stated_distance_of_the_best_allocation(
    config: PowerflowConfig, median: float
) -> None:
    """The distribution is measured by ``./test --bench powerflow``; these are its first 60 cases."""
    found = gaps(60, config)

    assert found.size >= 40
    assert found.min() >= -1e-9
    assert np.median(found) <= median
