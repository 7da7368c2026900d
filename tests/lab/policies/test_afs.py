"""AFS: the rule of two jobs against every schedule of two jobs, and shares built from it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.policies.baselines.afs import Afs, AfsConfig, prefers_longer, share_out
from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.policies.registry import build_policy
from tests.support.builders import JobRow, a_job, a_node, a_snapshot, started

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
    choices = [list(range(low, speed.shape[1], step)) for _ in lengths]
    return share_out(speed, np.array(lengths), choices, total).tolist()


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


def test_a_step_that_gains_nothing_is_nobodys() -> None:
    assert share([[1.0, 1.8, 1.8, 1.7]], [300.0], 4) == [2]
    assert share([[1.0, 1.8, 1.8, 1.7], [1.0, 1.5, 1.9, 2.2]], [300.0, 100.0], 8) == [2, 4]


def resized(plan: Plan) -> dict[str, int]:
    """Return the jobs that are stopped, and the sizes they are to come back at."""
    return {action.job_id: action.next_gpus for action in plan.actions if isinstance(action, Preempt)}


LOSSY = np.array([[1.0, 1.9, 2.7, 3.4], [1.0, 1.1, 1.15, 1.2]])


def with_lengths(snapshot: Snapshot, *left_s: float) -> Snapshot:
    """Return a snapshot whose jobs need so long at one GPU; the first of them scales well, others badly."""
    rows = np.array([0] + [1] * (len(left_s) - 1))
    jobs = replace(snapshot.jobs, remaining_s=np.array(left_s), speed_curve=rows)
    return replace(snapshot, jobs=jobs, speed_curves=LOSSY)


def test_a_round_gives_the_shares_out_and_a_lossy_job_does_not_grow() -> None:
    snapshot = a_snapshot([a_job("long", max_gpus=4), a_job("short", max_gpus=4)], [a_node("n0", gpus=4)])
    snapshot = with_lengths(snapshot, 9_000.0, 900.0)

    def round_of(policy: Afs) -> dict[str, int]:
        return started(run_cycle(policy, snapshot, policy.initial()).plan)

    assert round_of(Afs(AfsConfig(sizes="any"))) == {"short": 1, "long": 3}
    assert round_of(Afs(AfsConfig())) == {"short": 2, "long": 2}, "powers of two"


def test_without_lengths_the_service_so_far_tells_short_from_long() -> None:
    jobs = [a_job("long", max_gpus=1), a_job("short", max_gpus=1, attained_gpu_s=50.0)]
    snapshot = with_lengths(a_snapshot(jobs, [a_node("n0", gpus=1)]), 9_000.0, 900.0)

    def first(**parameters: str) -> set[str]:
        policy = build_policy("afs", parameters)
        return set(started(run_cycle(policy, snapshot, policy.initial()).plan))

    assert first() == first(lengths="predicted") == {"short"}
    assert first(lengths="attained") == {"long"}, "it has had no service yet"


def test_a_running_job_grows_only_where_that_pays_for_its_restart() -> None:
    def stops(left_s: float, **parameters: float) -> Set[str]:
        snapshot = with_lengths(a_snapshot([a_job("a", gpus=1, max_gpus=4)], [a_node("n0", gpus=4)]), left_s)
        policy = build_policy("afs", parameters)
        return resized(run_cycle(policy, snapshot, policy.initial()).plan).keys()

    saved = 1 - 1 / LOSSY[0, 3]  # of what is left, by growing from one GPU to four

    assert stops(121.0 / saved) == {"a"}
    assert stops(119.0 / saved) == set()
    assert stops(119.0 / saved, restart_s=30.0) == {"a"}
    assert stops(1.0, resize_gain=0.0) == {"a"}


def test_a_job_gives_gpus_up_only_where_somebody_needs_them() -> None:
    def stops(*others: JobRow) -> dict[str, int]:
        rows = [a_job("wide", gpus=4, min_gpus=1, max_gpus=4, on={"n0": (0, 1, 2, 3)}), *others]
        snapshot = a_snapshot(rows, [a_node("n0", gpus=4)])
        jobs = replace(snapshot.jobs, remaining_s=np.full(len(rows), 5_000.0), speed_curve=np.ones(len(rows), np.int64))
        flat = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 1.5, 1.5]])  # four GPUs do no more than two
        policy = Afs(AfsConfig())
        plan = run_cycle(policy, replace(snapshot, jobs=jobs, speed_curves=flat), policy.initial()).plan
        return resized(plan)

    assert stops() == {}
    assert stops(a_job("new", max_gpus=2)) == {"wide": 2}


def test_a_job_stopped_to_grow_comes_back_at_its_new_size() -> None:
    """It comes back in a passive round, when its devices are released."""
    policy, nodes = Afs(AfsConfig()), [a_node("n0", gpus=4)]
    running = with_lengths(a_snapshot([a_job("a", gpus=1, max_gpus=4)], nodes), 9_000.0)
    first = run_cycle(policy, running, policy.initial())
    assert resized(first.plan) == {"a": 4}

    waiting = with_lengths(a_snapshot([a_job("a", max_gpus=4)], nodes, trigger=Trigger.PASSIVE), 9_000.0)
    memory = policy.load(policy.dump(first.memory))

    assert started(run_cycle(policy, waiting, memory).plan) == {"a": 4}
    assert started(run_cycle(policy, waiting, policy.initial()).plan) == {"a": 1}, "nobody gave it more"
