"""Queues in the order of predictions, and those that wait behind them."""

from __future__ import annotations

import pytest

from lab.earlier_runs import EarlierRuns
from lab.foresight import learning
from services.core.cycle.run_cycle import run_cycle
from services.core.policies.registry import build_policy
from services.simulator.engine import simulate
from services.simulator.workload import ClusterSpec
from tests.simulator.test_foresight import MEDIAN, recurring
from tests.support.builders import a_job, a_node, story
from tests.support.workloads import START_S, a_trace
from tests.unit.core.test_asrpt import HEAVY, shown, waiting


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("spjf", set[str]()),
        ("spwf", {"wide"}),
        ("wcs-duration", {"c"}),
        ("wcs-workload", {"wide"}),
        ("wcs-subtime", {"b"}),
    ],
)
def test_the_baselines_differ_in_their_order_and_in_who_may_pass(name: str, starts: set[str]) -> None:
    """Six GPUs: ``short`` (10 s on 8, nowhere to sit until others end) is first by duration, ``wide`` by workload."""
    nodes = [a_node("n0", gpus=4), a_node("n1", gpus=4)]
    jobs = [
        a_job("r", on={"n0": (0, 1)}),
        waiting("b", 5, at_s=0.0),
        waiting("c", 4, at_s=1.0),
        waiting("short", 8, at_s=2.0),
        waiting("wide", 3, at_s=3.0),
    ]
    snapshot = shown(jobs, nodes, at_s=5.0, needs_s={"short": 10.0, "c": 19.0, "wide": 20.0, "b": 30.0})

    plan = run_cycle(build_policy(name, {}), snapshot, build_policy(name, {}).initial()).plan

    assert {job for job, phrase in story(plan).items() if phrase.startswith("start")} == starts


@pytest.mark.parametrize("name", ["spjf", "spwf", "wcs-duration", "wcs-workload", "wcs-subtime"])
def test_the_baselines_take_the_first_servers_unless_another_placement_is_asked_for(name: str) -> None:
    nodes = [a_node("n0", gpus=2), a_node("n1", gpus=2), a_node("n2", gpus=4)]
    snapshot = shown([waiting("a", 4)], nodes, needs_s={"a": 1.0}, graphs={"a": HEAVY})
    for parameters, placed in (({}, "start n0:0,1 n1:0,1"), ({"placement": "heavy-edge"}, "start n2:0,1,2,3")):
        policy = build_policy(name, parameters)
        assert story(run_cycle(policy, snapshot, policy.initial()).plan) == {"a": placed}


def test_a_policy_by_length_goes_by_the_prediction() -> None:
    """By the mean of all, all jobs look alike; by groups, 50 s are predicted for one of 500 s, 0 s for one of 100 s."""
    jobs = recurring([(0.0, 10.0, 1), (1.0, 100.0, 1), (2.0, 500.0, 1)], [1, 3, 1])
    cluster = ClusterSpec.parse("1x1:V100")

    predicted = simulate("sjf", jobs, cluster, a_trace(), predictor=learning(EarlierRuns("mean", of_all=True)))
    perfect = simulate("sjf", jobs, cluster, a_trace())

    assert (predicted.columns.started_s - START_S).tolist() == [0.0, 10.0, 110.0]
    assert perfect.columns.predicted_work_s.tolist() == [10.0, 100.0, 500.0]
    unseen = recurring([(0.0, 10.0, 1), (1.0, 100.0, 1), (2.0, 500.0, 1)], [1, 1, 3])
    swapped = simulate("sjf", unseen, cluster, a_trace(), predictor=learning(MEDIAN))
    assert (swapped.columns.started_s - START_S).tolist() == [0.0, 510.0, 10.0]
