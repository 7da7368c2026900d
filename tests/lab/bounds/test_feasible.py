"""Schedules that can be run: what each promises of its job, and what the simulator makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bounds.feasible import AGAIN, MORE, Hours, Stretch, Ways, planned
from lab.reproductions.joint_certificate import both_sides
from services.core.domain.carbon import CarbonCurve
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec

HOUR_S = 3_600.0


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Ways, float, Hours]:
    """A job of one or two stages on one to four GPUs, at two limits, with a day at least to spare."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    stages, sizes = int(random.integers(1, 3)), np.array([1, 2, 4])
    scale = np.stack([sizes ** random.uniform(0.3, 1.0) * random.uniform(0.5, 2.0) for _ in range(stages)])
    speed = scale[..., None] * np.array([1.0, random.uniform(0.6, 1.0)])
    watts = np.broadcast_to(sizes[:, None] * 300.0 * np.array([1.0, random.uniform(0.4, 1.0)]), speed.shape)
    ways = Ways(sizes, (None, 200.0), speed, watts, random.uniform(0.0, 120.0), 10.0)
    work_s = float(np.exp(random.uniform(np.log(60.0), np.log(20 * HOUR_S)))) * float(speed[:, 0, 0].min())
    begin_s = random.uniform(0.0, 5 * HOUR_S)
    times_s = HOUR_S * np.arange(96, dtype=np.float64)
    curve = CarbonCurve(times_s, random.uniform(20.0, 600.0, 96), 96 * HOUR_S)
    end_s = min(begin_s + work_s / float(speed[:, 0, 0].min()) + random.uniform(24.0, 40.0) * HOUR_S, 96 * HOUR_S)
    return ways, work_s, Hours(curve, np.zeros(96), begin_s, end_s)


@given(jobs())
def test_a_plan_keeps_its_window_does_all_the_work_and_costs_no_more_than_at_once(
    drawn: tuple[Ways, float, Hours],
) -> None:
    ways, work_s, hours = drawn

    plan = planned(ways, work_s, hours)

    begins, ends = (np.array([getattr(each, name) for each in plan.stretches]) for name in ("begin_s", "end_s"))
    assert begins[0] >= hours.begins[0] - 1e-3
    assert ends[-1] <= hours.ends[-1] + 1e-3
    assert (begins <= ends).all()
    assert (ends[:-1] <= begins[1:] + 1e-6).all()
    assert done(ways, work_s, plan.stretches) == pytest.approx(1.0, abs=5e-3)
    at_once_s = (1 + MORE) ** AGAIN * work_s / ways.mean_speed[0, 0] + ways.restart_s
    carbon, _ = hours.upto(np.array([hours.begins[0] + at_once_s]))
    assert plan.cost_g <= carbon[0] * ways.mean_watts[0, 0] * 1.05


def done(ways: Ways, work_s: float, stretches: Sequence[Stretch]) -> float:
    """Return the share of the work that stretches do, a few seconds at a time."""
    so_far, part, before = 0.0, work_s / len(ways.speed), None
    for each in stretches:
        left_s = each.end_s - each.begin_s
        if before is None or before.gpus != each.gpus or each.begin_s > before.end_s:
            left_s -= ways.restart_s
        at = ways.sizes.tolist().index(each.gpus), ways.limits_w.index(each.limit_w)
        while left_s > 0 and so_far < work_s:
            step_s = min(left_s, 10.0)
            so_far += step_s * float(ways.speed[min(int(so_far / part), len(ways.speed) - 1), *at])
            left_s -= step_s
        before = each
    return min(so_far / work_s, 1.0)


def test_a_schedule_that_is_carried_out_keeps_all_windows_close_above_the_bound() -> None:
    """Half a day of the cloud week; the goal for the week is 8 %."""
    jobs = read_jobs("green-year", start="2023-07-01", days=0.25)

    sides = both_sides(jobs, ClusterSpec.parse("64x2:RTX3090"), read_carbon("GB", start="2023-07-01", days=12.0))

    assert not sides.late(sides.feasible)
    assert sides.feasible.completed == len(jobs)
    assert 1.0 <= sides.feasible.carbon_kg / sides.least_kg < 1.08
