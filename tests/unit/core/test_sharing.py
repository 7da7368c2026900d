"""Two jobs on one GPU: what a plan may do, what policies see, and when Gandiva makes and undoes a pair."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Plan, Preempt, Reason, Start
from services.core.cycle.recording import snapshot_from_json, snapshot_to_json
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.sharing import without_guests
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.validate import check_plan
from services.core.domain.errors import DomainError, PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.policies.registry import build_policy
from services.core.profiles.sharing import SHARING_COST, shared_gpu
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story

ON_FIRST = Placement((NodeShare(NodeId("n0"), (0,)),))


def a_host(name: str = "host", **columns: Any) -> JobRow:
    return a_job(name, on={"n0": (0,)}, **{"shareable": True, **columns})


def share(snapshot: Snapshot, placement: Placement = ON_FIRST, *more: Preempt) -> None:
    plan = Plan(snapshot.version, (Start(JobId("guest"), placement, Reason.PACKED, shares=True), *more))
    check_plan(snapshot, plan)


def test_a_gang_may_share_the_device_of_one_that_runs_where_both_permit_it() -> None:
    share(a_snapshot([a_host(), a_job("guest", shareable=True)], [a_node(gpus=1)]))


@pytest.mark.parametrize(
    ("host", "guest", "why"),
    [
        ({"shareable": False}, {}, "may not share"),
        ({}, {"shareable": False}, "may not share"),
        ({"preemptible": False}, {}, "may not share"),
        ({"phase": Phase.STARTING}, {}, "may not share"),
        ({"memory_gib": 30.0}, {"memory_gib": 11.0}, "may not share"),
        ({}, {"models": ("V100",)}, "may not share"),
        ({}, {"min_gpus": 2}, "cannot have 1 GPUs"),
    ],
)
def test_a_start_that_may_not_share_is_refused(host: dict[str, Any], guest: dict[str, Any], why: str) -> None:
    jobs = [a_host(**host), a_job("guest", **{"shareable": True, **guest})]
    snapshot = replace(a_snapshot(jobs, [a_node(gpus=1)]), gpu_memory_gib=np.array([40.0]))

    with pytest.raises(PlanError, match=why):
        share(snapshot)


def test_no_device_has_three_gangs_none_that_stops_a_guest_and_no_free_one_is_shared() -> None:
    jobs = [a_host(), a_job("second", on={"n0": (0,)}, shareable=True), a_job("guest", shareable=True)]
    with pytest.raises(PlanError, match="third"):
        share(a_snapshot(jobs, [a_node(gpus=2)], shared=[("host", "second")]))
    two = a_snapshot([a_host(), a_job("guest", shareable=True)], [a_node(gpus=2)])
    with pytest.raises(PlanError, match="which stops"):
        share(two, ON_FIRST, Preempt(JobId("host"), Reason.OUTRANKED, 1))
    with pytest.raises(PlanError, match="no gang runs"):
        share(two, Placement((NodeShare(NodeId("n0"), (1,)),)))
    unasked = Plan(two.version, (Start(JobId("guest"), ON_FIRST, Reason.IN_ORDER),))
    with pytest.raises(PlanError, match="not free"):
        check_plan(two, unasked)


def a_pair(**columns: Any) -> Snapshot:
    """Return two jobs on one GPU, the guest for a minute, and one that waits."""
    jobs = [
        a_host(waiting_since_s=NOON_S - 600.0),
        a_job("guest", on={"n0": (0,)}, shareable=True, waiting_since_s=NOON_S - 60.0),
        a_job("waits"),
    ]
    return a_snapshot(jobs, [a_node(gpus=1)], shared=[("guest", "host")], **columns)


def test_policies_see_one_of_a_pair_and_quotas_less_by_the_other() -> None:
    seen = without_guests(a_pair(quota={"t": 3}))

    assert list(seen.jobs.ids) == ["host", "waits"]
    assert seen.guests is not None
    assert list(seen.guests.ids) == ["guest"]
    assert seen.tenant_gpu_quota == {"t": 2}


def test_a_policy_that_does_not_pack_stops_guests_when_it_may_stop_jobs() -> None:
    policy = build_policy("fifo", {})

    assert story(run_cycle(policy, a_pair(), None).plan)["guest"] == "preempt unpacked -> 1"
    assert "guest" not in story(run_cycle(policy, a_pair(trigger=Trigger.PASSIVE), None).plan)


def test_a_guest_is_stopped_with_its_host() -> None:
    plan = run_cycle(build_policy("gandiva", {"quantum_s": 30.0}), a_pair(), build_policy("gandiva", {}).initial()).plan

    assert story(plan) == {
        "host": "preempt outranked -> 1",
        "guest": "preempt outranked -> 1",
        "waits": "hold waiting_for_release",
    }


def test_a_recorded_snapshot_has_its_pairs() -> None:
    snapshot = a_pair()

    assert snapshot_from_json(snapshot_to_json(snapshot)).shared == snapshot.shared


def test_what_two_jobs_do_on_one_gpu() -> None:
    """Together they draw what the GPU does; work takes the same energy above idle as alone."""
    light = shared_gpu(140.0, 100.0, idle_w=40.0, limit_w=300.0)
    assert light.pace == 1 - SHARING_COST
    assert light.gpu_w == pytest.approx(20 + 100 * light.pace)
    one, other = (shared_gpu(*each, idle_w=40.0, limit_w=300.0) for each in ((300.0, 170.0), (170.0, 300.0)))
    assert one.pace == other.pace == pytest.approx((1 - SHARING_COST) / 1.5)
    assert one.gpu_w + other.gpu_w == pytest.approx(40 + 260 * (1 - SHARING_COST))
    assert shared_gpu(10.0, 10.0, idle_w=40.0, limit_w=300.0).gpu_w == 20.0
    with pytest.raises(DomainError):
        shared_gpu(100.0, 100.0, idle_w=40.0, limit_w=40.0)


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
