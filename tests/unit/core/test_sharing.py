"""Two jobs on one GPU: what a plan may do, and what policies see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.sharing import without_guests
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.validate import check_plan
from services.core.domain.errors import DomainError, PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
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
