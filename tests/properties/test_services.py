"""Service instances beside any policy: plans hold, devices have one owner, and nothing overtakes a service."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from services.core.cycle.plan import Hold, Plan, Preempt, ProfileControls, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.services import place_services
from services.core.cycle.snapshot import NodeTable, Phase, Snapshot
from services.core.domain.reasons import Reason
from services.core.policies.registry import POLICIES, build_policy
from tests.support.builders import with_services
from tests.support.shared import shared
from tests.support.strategies import snapshots

VARIANTS = [(name, {}) for name in POLICIES] + [("powerflow", {"spare_nodes": 0, "power_limit_w": 2_500})]
every_policy = pytest.mark.parametrize(("name", "parameters"), VARIANTS)


@st.composite
def served(draw: st.DrawFn) -> Snapshot:
    """Draw a cluster some of whose queued jobs are service instances, and some of whose empty nodes are asleep."""
    snapshot = draw(snapshots())
    jobs, nodes = snapshot.jobs, snapshot.nodes
    queued = [jobs.ids[job] for job in np.flatnonzero(jobs.phase == Phase.QUEUED).tolist()]
    names = draw(st.lists(st.sampled_from(queued), unique=True, max_size=3)) if queued else []
    is_service = np.isin(np.array(jobs.ids, dtype=object), names)
    jobs = replace(jobs, max_gpus=np.where(is_service, jobs.min_gpus, jobs.max_gpus))
    asleep = np.array([draw(st.booleans()) for _ in nodes.ids]) & (nodes.free_gpus == nodes.gpus)
    sleeps: NodeTable = replace(nodes, asleep=asleep, may_sleep=np.ones(len(nodes), dtype=np.bool_))
    only_on = draw(st.one_of(st.none(), st.sets(st.sampled_from(nodes.ids))))
    return with_services(replace(snapshot, jobs=jobs, nodes=sleeps), *names, only_on=only_on)


on_clusters_with_services = shared(snapshot=served())


def starts_of(plan: Plan) -> dict[str, Start]:
    return {action.job_id: action for action in plan.actions if isinstance(action, Start)}


@every_policy
@on_clusters_with_services
def test_a_merged_plan_holds_and_leaves_services_to_themselves(
    name: str, parameters: dict[str, object], snapshot: Snapshot
) -> None:
    policy = build_policy(name, parameters)
    plan = run_cycle(policy, snapshot, policy.initial()).plan  # checked against the whole snapshot
    assert run_cycle(policy, snapshot, policy.initial()).plan == plan

    taken = Counter(
        (share.node_id, device)
        for start in starts_of(plan).values()
        for share in start.placement.shares
        for device in share.devices
    )
    assert all(owners == 1 for owners in taken.values())
    for service in snapshot.services:
        (action,) = (each for each in plan.actions if each.job_id == service.job_id)
        assert isinstance(action, Start | Hold), "started or told why not, and never set"
        assert not isinstance(action, SetControl | ProfileControls)


@every_policy
@on_clusters_with_services
def test_no_start_takes_what_a_waiting_service_reserved(
    name: str, parameters: dict[str, object], snapshot: Snapshot
) -> None:
    policy = build_policy(name, parameters)
    placed, shown = place_services(snapshot)
    plan = run_cycle(policy, snapshot, policy.initial()).plan
    free = {
        (node_id, device)
        for node_id, devices in zip(shown.nodes.ids, shown.nodes.free_devices, strict=True)
        for device in devices
    }
    services = {service.job_id for service in snapshot.services}

    assert tuple(plan.actions[: len(placed)]) == placed
    for start in starts_of(plan).values():
        if start.job_id not in services:
            assert all((share.node_id, d) in free for share in start.placement.shares for d in share.devices)


@every_policy
@on_clusters_with_services
def test_a_service_starts_once_those_that_give_way_are_gone(
    name: str, parameters: dict[str, object], snapshot: Snapshot
) -> None:
    policy = build_policy(name, parameters)
    plan = run_cycle(policy, snapshot, policy.initial()).plan
    waits = [
        action.job_id
        for action in plan.actions
        if isinstance(action, Hold) and action.reason is Reason.WAITING_FOR_RELEASE
    ]
    first = next((service for service in snapshot.services if service.job_id in waits), None)
    if first is None:
        return
    started = starts_of(plan)
    stopped = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
    jobs, nodes = snapshot.jobs, snapshot.nodes
    free = {node_id: set(devices) for node_id, devices in zip(nodes.ids, nodes.free_devices, strict=True)}
    for start in started.values():
        for share in start.placement.shares:
            free[share.node_id] -= set(share.devices)
    for job in np.flatnonzero(jobs.gpus > 0).tolist():
        placement = jobs.placements[job]
        if placement and (jobs.ids[job] in stopped or jobs.phase[job] == Phase.PREEMPTING):
            for share in placement.shares:
                free[share.node_id] |= set(share.devices)

    assert any(first.nodes[at] and len(free[node_id]) >= first.gpus for at, node_id in enumerate(nodes.ids))
