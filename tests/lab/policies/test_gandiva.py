"""Gandiva: turns, and gangs that are moved together."""

from __future__ import annotations

import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ClusterSpec
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story
from tests.support.workloads import a_trace, a_workload


def test_six_jobs_on_four_gpus_all_get_two_thirds() -> None:
    """What time-slicing is for: six one-GPU jobs share a server of four, and none waits for another to end."""
    options = EngineOptions(round_interval_s=60.0)
    jobs = a_workload([(0.0, 3_600.0, 1)] * 6)

    result = simulate("gandiva", jobs, ClusterSpec.parse("1x4:P100"), a_trace(), options=options)

    assert result.columns.jct_s.tolist() == pytest.approx([1.5 * 3_600.0] * 6, abs=3 * 60.0)
    queued = simulate("fifo", jobs, ClusterSpec.parse("1x4:P100"), a_trace(), options=options)
    assert queued.columns.jct_s.tolist() == [3_600.0] * 4 + [7_200.0] * 2


def a_running(name: str, device: int, ran_s: float) -> JobRow:
    return a_job(name, on={"n0": (device,)}, waiting_since_s=NOON_S - ran_s)


def test_who_had_its_slice_gives_way_and_who_has_not_stays() -> None:
    policy = build_policy("gandiva", {"quantum_s": 60.0})
    jobs = [a_running("old", 0, 90.0), a_running("young", 1, 30.0), a_job("next", waiting_since_s=NOON_S - 10.0)]

    result = run_cycle(policy, a_snapshot(jobs, [a_node("n0", gpus=2)]), policy.initial())

    assert story(result.plan) == {"old": "preempt outranked -> 1", "next": "hold waiting_for_release"}


def test_nobody_gives_way_where_nobody_waits() -> None:
    policy = build_policy("gandiva", {})

    plan = run_cycle(policy, a_snapshot([a_running("old", 0, 9e3)], [a_node("n0", gpus=1)]), policy.initial()).plan

    assert story(plan) == {}


def test_a_gang_that_spans_nodes_is_moved_to_one_and_keeps_its_turn() -> None:
    policy = build_policy("gandiva", {})
    nodes = [a_node("n0", gpus=2), a_node("n1", gpus=2), a_node("n2", gpus=2)]
    spread = a_job("s", min_gpus=2, on={"n0": (0,), "n1": (0,)}, waiting_since_s=NOON_S - 10.0)
    others = [a_job("x", on={"n0": (1,)}), a_job("y", on={"n1": (1,)})]

    first = run_cycle(policy, a_snapshot([spread, *others], nodes), policy.initial())

    assert story(first.plan) == {"s": "preempt defragmentation -> 2"}
    later = [a_job("s", min_gpus=2, waiting_since_s=NOON_S), a_job("w", min_gpus=2, waiting_since_s=NOON_S - 99.0)]
    memory = policy.load(policy.dump(first.memory))
    second = run_cycle(policy, a_snapshot([*later, *others], nodes, trigger=Trigger.PASSIVE), memory)
    assert story(second.plan)["s"] == "start n2:0,1"
    assert policy.dump(second.memory)["moving"] == []


def test_a_gang_that_no_node_has_room_for_stays() -> None:
    policy = build_policy("gandiva", {})
    nodes = [a_node("n0", gpus=2), a_node("n1", gpus=2)]
    spread = a_job("s", min_gpus=2, on={"n0": (0,), "n1": (0,)})

    assert story(run_cycle(policy, a_snapshot([spread], nodes), policy.initial()).plan) == {}
