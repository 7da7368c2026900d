"""AFS: the rule of two jobs against every schedule of two jobs, and shares built from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from services.core.cycle.run_cycle import run_cycle
from services.core.policies.baselines.afs import prefers_longer, share_out
from services.core.policies.registry import build_policy
from tests.support.builders import a_job, a_node, a_snapshot, started

rates = st.floats(0.5, 8.0)


def mean_jct(work_a: float, work_b: float, first: tuple[float, float], p_b_alone: float) -> float:
    """Return the mean completion time where ``a`` ends first at these rates, and ``b`` goes on with the extra GPU."""
    end_a = work_a / first[0]
    left_b = work_b - first[1] * end_a
    assume(left_b > 0)
    return (end_a + end_a + left_b / p_b_alone) / 2


@given(p_a=rates, gain_a=st.floats(0.05, 1.0), p_b=rates, gain_b=st.floats(0.05, 1.0), work=st.floats(1.0, 50.0))
def test_the_rule_of_two_jobs_is_the_better_of_the_two_schedules(
    p_a: float, gain_a: float, p_b: float, gain_b: float, work: float
) -> None:
    """The paper's analysis (section 4.1): the extra GPU goes to ``a`` until it ends and then to ``b``, or to ``b``."""
    more_a, more_b, work_b = p_a * (1 + gain_a), p_b * (1 + gain_b), 400.0
    to_a = mean_jct(work, work_b, (more_a, p_b), more_b)
    to_b = mean_jct(work, work_b, (p_a, more_b), more_b)
    assume(abs(to_a - to_b) > 1e-9)

    assert prefers_longer(p_a, more_a, p_b, more_b) == (to_b < to_a)


def share(speeds: list[list[float]], lengths: list[float], total: int, low: int = 1, step: int = 1) -> list[int]:
    speed = np.array([[0.0, *row] for row in speeds])
    ones = np.ones(len(lengths), dtype=np.int64)
    most = speed.shape[1] - 1
    return share_out(speed, np.array(lengths), low * ones, most * ones, step * ones, total).tolist()


def test_jobs_that_scale_without_loss_have_two_gpus_before_a_longer_one_has_any() -> None:
    linear = [1.0, 2.0, 3.0, 4.0]

    assert share([linear] * 3, [300.0, 100.0, 200.0], 2) == [0, 2, 0]
    assert share([linear] * 3, [300.0, 100.0, 200.0], 4) == [0, 2, 2]
    assert share([linear] * 3, [300.0, 100.0, 200.0], 6) == [1, 3, 2]


def test_the_worse_jobs_scale_the_more_evenly_they_share() -> None:
    poor = [1.0, 1.3, 1.4, 1.45]

    assert share([poor] * 4, [400.0, 100.0, 200.0, 300.0], 4) == [1, 1, 1, 1]
    assert share([poor, [1.0, 2.0, 3.0, 4.0]], [100.0, 200.0], 4) == [1, 3], "efficiency before length"


def test_shares_keep_to_the_sizes_a_job_may_have() -> None:
    linear = [float(size) for size in range(1, 7)]

    assert share([linear] * 2, [100.0, 200.0], 7, low=2, step=2) == [4, 2]
    assert share([linear] * 2, [100.0, 200.0], 1, low=2, step=2) == [0, 0]


def test_a_round_gives_the_shares_out_and_a_lossy_job_does_not_grow() -> None:
    policy = build_policy("afs", {})
    snapshot = a_snapshot([a_job("long", max_gpus=4), a_job("short", max_gpus=4)], [a_node("n0", gpus=4)])
    jobs = replace(snapshot.jobs, remaining_s=np.array([9_000.0, 900.0]), speed_curve=np.array([0, 1]))
    curves = np.array([[1.0, 1.9, 2.7, 3.4], [1.0, 1.1, 1.15, 1.2]])

    plan = run_cycle(policy, replace(snapshot, jobs=jobs, speed_curves=curves), policy.initial()).plan

    assert started(plan) == {"short": 1, "long": 3}
