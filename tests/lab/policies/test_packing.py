"""When Gandiva puts two jobs on one GPU, and when it undoes a pair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story
from tests.unit.core.test_bound import TWO_NODES, bind, decided
from tests.unit.core.test_sharing import a_pair

MEMORY = {"packing": {"rates": {"a": [0.001, "A100"], "b": [0.001, "A100"], "c": [0.001, "V100"]}}}


def a_job_with_a_turn(name: str, on: int | None = None, **columns: Any) -> JobRow:
    place = {} if on is None else {"on": {"n0": (on,)}}
    return a_job(name, **place, **{"shareable": True, "waiting_since_s": NOON_S - 90.0, **columns})


@pytest.mark.parametrize(
    ("jobs", "gpus", "expected"),
    [
        ([a_job_with_a_turn("a", 0), a_job_with_a_turn("b")], 1, {"b": "share n0:0"}),
        ([a_job_with_a_turn("a", 0), a_job_with_a_turn("b")], 2, {"b": "start n0:1"}),
        (
            [a_job_with_a_turn("a", 0, shareable=False), a_job_with_a_turn("b")],
            1,
            {"a": "preempt outranked -> 1", "b": "hold waiting_for_release"},
        ),
        (
            [a_job_with_a_turn("a", 0), a_job_with_a_turn("c")],
            1,
            {"a": "preempt outranked -> 1", "c": "hold waiting_for_release"},
        ),
        (
            [a_job_with_a_turn("a", 0), a_job_with_a_turn("b"), a_job_with_a_turn("new", priority=1)],
            1,
            {"a": "preempt outranked -> 1", "b": "hold waiting_for_round", "new": "hold waiting_for_release"},
        ),
    ],
    ids=["none free", "one free", "not permitted", "another model", "an urgent one comes"],
)
def test_jobs_that_had_a_turn_share_a_gpu_where_none_is_free(
    jobs: list[JobRow], gpus: int, expected: dict[str, str]
) -> None:
    policy = build_policy("gandiva", {})

    result = run_cycle(policy, a_snapshot(jobs, [a_node(gpus=gpus)]), policy.load(MEMORY))

    assert story(result.plan) == expected
    assert policy.load(policy.dump(result.memory)) == result.memory


def test_the_least_busy_job_gets_the_guest() -> None:
    policy = build_policy("gandiva", {})
    rates = {"packing": {"rates": {name: [0.001, "A100"] for name in ("a", "b", "c")}}}
    jobs = [a_job_with_a_turn("a", 0, gpu_power_w=300.0), a_job_with_a_turn("b", 1, gpu_power_w=100.0)]

    plan = run_cycle(policy, a_snapshot([*jobs, a_job_with_a_turn("c")], [a_node(gpus=2)]), policy.load(rates)).plan

    assert story(plan) == {"c": "share n0:1"}


@pytest.mark.parametrize(("together", "story_of_guest"), [(0.55, None), (0.45, "preempt unpacked -> 1")])
def test_a_pair_that_does_less_than_turns_is_undone_and_not_tried_again(
    together: float, story_of_guest: str | None
) -> None:
    policy = build_policy("gandiva", {})
    done = 100.0 * 0.001 * together
    pair = [[["a", "b"], NOON_S - 100.0, [0.1, 0.2]]]
    memory = policy.load({"packing": {**MEMORY["packing"], "pairs": pair}})
    jobs = [a_job_with_a_turn("a", 0, progress=0.1 + done), a_job_with_a_turn("b", 0, progress=0.2 + done)]
    jobs.append(a_job("w", priority=-1))

    result = run_cycle(policy, a_snapshot(jobs, [a_node(gpus=1)], shared=[("a", "b")]), memory)

    assert story(result.plan).get("b") == story_of_guest
    again = [a_job_with_a_turn("a", 0), a_job_with_a_turn("b")]
    shares = story(run_cycle(policy, a_snapshot(again, [a_node(gpus=1)]), result.memory).plan)["b"] == "share n0:0"
    assert shares is (story_of_guest is None)


def test_a_pair_is_undone_where_a_gpu_is_free_and_nobody_waits() -> None:
    policy = build_policy("gandiva", {})
    memory = policy.load({"packing": {**MEMORY["packing"], "pairs": [[["a", "b"], NOON_S - 10.0, [0.0, 0.0]]]}})
    jobs = [a_job_with_a_turn("a", 0), a_job_with_a_turn("b", 0)]

    result = run_cycle(policy, a_snapshot(jobs, [a_node(gpus=2)], shared=[("a", "b")]), memory)

    assert story(result.plan) == {"b": "preempt unpacked -> 1"}


def test_a_job_that_reports_nothing_is_put_beside_none_and_memory_goes_through_json() -> None:
    policy = build_policy("gandiva", {})
    silent = a_job_with_a_turn("b", progress=float("nan"), attained_gpu_s=90.0)
    snapshot = a_snapshot([a_job_with_a_turn("a", 0), silent], [a_node(gpus=1)])

    result = run_cycle(policy, snapshot, policy.load(MEMORY))

    assert story(result.plan)["b"] == "hold waiting_for_release"
    json.dumps(policy.dump(result.memory), allow_nan=False)


def test_a_new_job_has_done_nothing_though_it_reports_nothing_yet() -> None:
    policy = build_policy("gandiva", {})
    new = a_snapshot([a_job("a", shareable=True, progress=float("nan"))], [a_node(gpus=1)])

    assert policy.dump(run_cycle(policy, new, policy.initial()).memory)["packing"]["began"] == {"a": 0.0}


def test_a_rate_is_what_a_job_did_in_its_turn_alone() -> None:
    policy = build_policy("gandiva", {})
    waits = a_snapshot([a_job("a", shareable=True, progress=0.25)], [a_node(gpus=1)], trigger=Trigger.PASSIVE)
    memory = run_cycle(policy, waits, policy.initial()).memory
    ran = a_job_with_a_turn("a", 0, progress=0.35, waiting_since_s=NOON_S - 100.0)

    after = policy.dump(run_cycle(policy, a_snapshot([ran], [a_node(gpus=1)]), memory).memory)["packing"]

    assert after["rates"] == {"a": [pytest.approx(0.001), "A100"]}


def test_a_guest_is_stopped_with_its_host() -> None:
    plan = run_cycle(build_policy("gandiva", {"quantum_s": 30.0}), a_pair(), build_policy("gandiva", {}).initial()).plan

    assert story(plan) == {
        "host": "preempt outranked -> 1",
        "guest": "preempt outranked -> 1",
        "waits": "hold waiting_for_release",
    }


def test_gandiva_moves_no_bound_gang() -> None:
    spans = a_job("a", gpus=2, on={"n0": (0,), "n1": (0,)})
    snapshot = a_snapshot([spans], TWO_NODES, trigger=Trigger.ACTIVE)

    assert decided(snapshot, "gandiva", migrate=True)["a"].startswith("preempt")
    assert decided(bind(snapshot, a="n0 n1"), "gandiva", migrate=True) == {}
