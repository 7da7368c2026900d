"""PowerFlow's limit: the least of eta, the watts it is given and its curve, beside what service instances draw."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.snapshot import Snapshot
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.limit import gpu_max_w, least_of, limit_w
from tests.support.builders import NOON_S, a_node, a_snapshot

DAY_S = 86_400.0
MIDNIGHT_S = math.floor(NOON_S / DAY_S) * DAY_S


def a_cluster(**fields: object) -> Snapshot:
    """Return sixteen GPUs on two nodes."""
    return replace(a_snapshot(nodes=[a_node("n0", gpus=8), a_node("n1", gpus=8)]), **fields)  # type: ignore[arg-type]


def a_table(gpus: list[int], power_w: list[list[float]]) -> GangTable:
    watts = np.array([100.0, 200.0, 300.0][: len(power_w[0])])
    return GangTable(
        np.array(gpus), np.ones((len(gpus), watts.size)), np.array(power_w), ControlKind.POWER_LIMIT, watts
    )


def test_without_a_limit_there_is_none() -> None:
    assert limit_w(a_cluster(), PowerflowConfig(eta=1.0)) == math.inf


def test_eta_is_a_share_of_what_all_gpus_draw_at_most() -> None:
    """Eq. 19: eta x G x P_max; GPUs of service instances count."""
    config = PowerflowConfig(eta=0.5, gpu_max_w=400.0)

    assert limit_w(a_cluster(), config) == 0.5 * 16 * 400
    assert limit_w(a_cluster(services_gpus=4), config) == 0.5 * 20 * 400


def test_the_least_of_all_limits_counts_and_services_are_taken_off() -> None:
    config = PowerflowConfig(eta=0.5, gpu_max_w=400.0, power_limit_w=3_000.0, power_limit_curve=((0.0, 2_500.0),))

    assert limit_w(a_cluster(), config) == 2_500
    assert limit_w(a_cluster(), replace(config, power_limit_curve=())) == 3_000
    assert limit_w(a_cluster(services_w=700.0), config) == 1_800


def test_p_max_is_the_mean_gpu_of_the_smallest_gangs_at_the_default_setting() -> None:
    one = a_table([2, 4], [[300.0, 500.0, 700.0], [500.0, 900.0, 1_300.0]])
    other = a_table([1], [[150.0, 250.0]])
    snapshot = a_cluster(gangs=({0: one}, {0: other}))

    assert gpu_max_w(snapshot, PowerflowConfig()) == (700 / 2 + 250) / 2
    assert gpu_max_w(snapshot, PowerflowConfig(gpu_max_w=410.0)) == 410
    assert gpu_max_w(a_cluster(), PowerflowConfig(default_gpu_w=320.0)) == 320


def test_a_limit_that_falls_before_the_next_active_round_counts_already() -> None:
    """Passive rounds stop nobody; a gang that is stopped still draws for its grace."""
    config = PowerflowConfig(eta=1.0, power_limit_curve=((13.0, 4_000.0), (20.0, 2_000.0)), grace_s=120.0)
    eight_s = MIDNIGHT_S + 20 * 3600.0

    def at(now_s: float, next_active_s: float = math.inf) -> float:
        return limit_w(a_cluster(now_s=now_s, next_active_s=next_active_s), config)

    assert at(eight_s - 600, eight_s - 121) == 4_000
    assert at(eight_s - 600, eight_s - 120) == 2_000
    ahead_s = config.limit_ahead_s + config.grace_s  # where no active round is known
    assert at(eight_s - ahead_s - 1) == 4_000
    assert at(eight_s - ahead_s) == 2_000


@pytest.mark.parametrize(
    ("begin_h", "end_h", "least"),
    [
        (9, 10, 500.0),  # the evening's limit holds through the night, until 13:00
        (9, 13, 500.0),
        (13, 19.9, 900.0),
        (13, 20, 500.0),
        (12.99, 14, 500.0),
        (37, 43, 900.0),  # the next day from 13:00
        (37, 45, 500.0),
    ],
)
def test_a_daily_curve_repeats_and_both_ends_count(begin_h: float, end_h: float, least: float) -> None:
    curve = ((13.0, 900.0), (20.0, 500.0))

    assert least_of(curve, MIDNIGHT_S + begin_h * 3600, MIDNIGHT_S + end_h * 3600) == least


@pytest.mark.parametrize(
    ("begin_s", "end_s", "least"),
    [(0, 99, math.inf), (0, 100, 700), (100, 199, 700), (100, 200, 300), (199, 250, 300), (200, 1e9, 300)],
)
def test_a_curve_of_times_begins_with_its_first_and_lasts_after_its_last(
    begin_s: float, end_s: float, least: float
) -> None:
    assert least_of(((100.0, 700.0), (200.0, 300.0)), begin_s, end_s) == least


def test_no_curve_limits_nothing() -> None:
    assert least_of((), 0.0, 1e9) == math.inf
