"""What the layer over every policy promises of reservations and maintenance, whatever the cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import PREEMPTING, RUNNING, STARTING, Snapshot
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.domain.windows import GRACE_S, Ending, Window, most_taken
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy
from services.core.policies.windows import LENT_AFTER_S, MARGIN_S, SHORTEST_S
from tests.support.builders import NOON_S
from tests.support.shared import shared
from tests.support.strategies import snapshots

EVERYONE = (*POLICIES, f"{FAIR}joint")
LENGTHS_S = (30.0, 300.0, 1_000.0, 4_000.0, 90_000.0)
AHEAD_S = (-5_000.0, -30.0, 0.0, GRACE_S + MARGIN_S, 200.0, 900.0, 5_000.0)


@st.composite
def with_windows(draw: st.DrawFn) -> Snapshot:
    """Draw a cluster with up to three windows that do not overlap on any node, and limits of some jobs."""
    snapshot = draw(snapshots())
    found: list[Window] = []
    for at in range(draw(st.integers(1, 3))):
        holder = draw(st.sampled_from([None, "red", "blue", "green"]))
        start_s = NOON_S + draw(st.sampled_from(AHEAD_S))
        end_s = max(start_s, NOON_S) + draw(st.sampled_from((1_000.0, 6_000.0)))
        gpus = {
            node_id: count if holder is None else draw(st.integers(1, count))
            for node_id, count in zip(snapshot.nodes.ids, snapshot.nodes.gpus.tolist(), strict=True)
            if draw(st.booleans()) and not most_taken(found, node_id, start_s, end_s)
        }
        found.append(Window(f"w{at}", start_s, end_s, gpus, holder))
    endings = {
        job_id: Ending(draw(st.sampled_from(LENGTHS_S)) + GRACE_S)
        for job_id in snapshot.jobs.ids
        if draw(st.booleans())
    }
    return replace(snapshot, windows=tuple(found), endings=endings)


on_clusters_with_windows = shared(settings(max_examples=15), snapshot=with_windows())


def on(snapshot: Snapshot, plan: Plan, node_id: str) -> dict[JobId, int]:
    """Return how many GPUs of a node each gang has that starts or goes on, and is not stopped."""
    stops = {each.job_id for each in plan.actions if isinstance(each, Preempt)}
    jobs = snapshot.jobs
    found = [
        (job_id, placement)
        for job_id, phase, placement in zip(jobs.ids, jobs.phase, jobs.placements, strict=True)
        if phase in (RUNNING, STARTING) and job_id not in stops and placement is not None
    ] + [(each.job_id, each.placement) for each in plan.actions if isinstance(each, Start)]
    return {
        job_id: len(share.devices)
        for job_id, placement in found
        for share in placement.shares
        if share.node_id == node_id
    }


def left_s(snapshot: Snapshot, job_id: JobId) -> float:
    return snapshot.endings.get(job_id, Ending(float("inf"))).left_s


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_what_windows_take_is_free_or_their_holders(name: str, snapshot: Snapshot) -> None:
    policy = build_policy(name, {})
    plan = run_under_orders(policy, snapshot, policy.initial()).plan

    jobs, nodes = snapshot.jobs, snapshot.nodes
    starts = {each.job_id for each in plan.actions if isinstance(each, Start)}
    for window in snapshot.windows:
        ahead_s = window.start_s - NOON_S
        for node_id, gpus in window.gpus.items():
            fixed = others = 0
            for job_id, held in on(snapshot, plan, node_id).items():
                at = jobs.index[job_id]
                if jobs.tenants[at] == window.holder:
                    others += 0
                    continue
                if job_id in starts:
                    assert window.holder is not None or ahead_s > 0, "a job starts on a node in maintenance"
                    ends = left_s(snapshot, job_id) <= ahead_s
                    soon = ahead_s < GRACE_S + MARGIN_S + SHORTEST_S
                    assert ends or (jobs.preemptible[at] and (ahead_s <= 0 or not soon))
                if ahead_s > 0 and left_s(snapshot, job_id) <= ahead_s:
                    continue
                fixed += 0 if jobs.preemptible[at] else held
                others += held
            lent = window.holder is not None and ahead_s <= -LENT_AFTER_S
            if ahead_s <= GRACE_S + MARGIN_S and not lent:
                room = int(nodes.gpus[nodes.index[node_id]]) - gpus
                assert others <= max(room, fixed), "what is reserved will not be free"


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_no_gang_is_stopped_for_a_window_without_need(name: str, snapshot: Snapshot) -> None:
    policy = build_policy(name, {})
    plan = run_under_orders(policy, snapshot, policy.initial()).plan

    jobs = snapshot.jobs
    for each in plan.actions:
        if isinstance(each, Preempt) and each.reason is Reason.RESERVED:
            at = jobs.index[each.job_id]
            placement = jobs.placements[at]
            assert placement is not None
            assert jobs.preemptible[at]
            assert jobs.phase[at] != PREEMPTING
            here = {share.node_id for share in placement.shares}
            taking = [window for window in snapshot.windows if here & set(window.gpus)]
            assert any(
                window.holder != jobs.tenants[at]
                and window.start_s - NOON_S <= GRACE_S + MARGIN_S
                and (window.start_s <= NOON_S or left_s(snapshot, each.job_id) > window.start_s - NOON_S)
                for window in taking
            )


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_a_window_that_is_far_off_takes_nothing_from_what_may_be_stopped(name: str, snapshot: Snapshot) -> None:
    policy = build_policy(name, {})
    far = tuple(replace(each, start_s=NOON_S + 5_000.0, end_s=NOON_S + 9_000.0) for each in snapshot.windows)
    stoppable = replace(snapshot.jobs, preemptible=np.ones(len(snapshot.jobs), dtype=np.bool_))
    snapshot = replace(snapshot, windows=far, jobs=stoppable)
    plan = run_under_orders(policy, snapshot, policy.initial()).plan
    assert plan.actions == run_cycle(policy, replace(snapshot, windows=()), policy.initial()).plan.actions


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_in_a_reservation_a_job_of_its_holder_waits_only_where_it_does_not_fit(name: str, snapshot: Snapshot) -> None:
    policy = build_policy(name, {})
    snapshot = replace(snapshot, tenant_gpu_quota={}, windows=snapshot.windows[:1], orders=())
    plan = run_under_orders(policy, snapshot, policy.initial()).plan

    jobs, nodes = snapshot.jobs, snapshot.nodes
    [window] = snapshot.windows
    starts = {each.job_id for each in plan.actions if isinstance(each, Start)}
    if window.holder is None or window.start_s > NOON_S:
        return
    taken: dict[str, int] = {}
    for each in plan.actions:
        if isinstance(each, Start):
            for share in each.placement.shares:
                taken[share.node_id] = taken.get(share.node_id, 0) + len(share.devices)
    for at, job_id in enumerate(jobs.ids):
        if jobs.tenants[at] != window.holder or jobs.phase[at] != 0 or job_id in starts:
            continue
        for model in range(len(snapshot.gpu_models)):
            own = {
                node_id: sum(
                    held
                    for other, held in on(snapshot, plan, node_id).items()
                    if jobs.tenants[jobs.index[other]] == window.holder
                )
                for node_id in window.gpus
            }
            room = sum(
                max(min(gpus - own[node_id], int(nodes.free_gpus[index]) - taken.get(node_id, 0)), 0)
                for node_id, gpus in window.gpus.items()
                if nodes.gpu_model[index := nodes.index[node_id]] == model and nodes.schedulable[index]
            )
            assert not jobs.eligible[at, model] or room < jobs.min_gpus[at]
