"""Features together: whatever a cluster uses at once, rounds of every policy succeed, and keep the rules of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Hold, Plan, Preempt, Start
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, JobTable, Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.domain.orders import standing
from services.core.domain.reasons import Reason
from services.core.domain.windows import Window
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy
from tests.properties.test_policies import rows
from tests.support.builders import NOON_S, a_job, a_snapshot
from tests.support.combined import combined, smallest, told

EVERYONE = (*POLICIES, f"{FAIR}joint", f"{FAIR}las")
SEEDS = (*range(24), 53, 107, 158, 164, 223, 534)
"""The last found false reasons of windows, idle nodes, a guaranteed run and model servers, and GPUs kept for nobody."""


def rounds(name: str, snapshot: Snapshot) -> list[tuple[Snapshot, Plan]]:
    """Return an active round and a passive one after it, each with its plan; the memory between is stored."""
    policy, found = build_policy(name, {}), list[tuple[Snapshot, Plan]]()
    memory = policy.initial()
    for trigger in (Trigger.ACTIVE, Trigger.PASSIVE):
        seen = replace(snapshot, trigger=trigger)
        result = run_under_orders(policy, seen, memory)
        memory = policy.load(json.loads(json.dumps(policy.dump(result.memory), allow_nan=False)))
        found.append((seen, result.plan))
    return found


def holds_of(plan: Plan) -> dict[JobId, Hold]:
    return {each.job_id: each for each in plan.actions if isinstance(each, Hold)}


def is_valid(snapshot: Snapshot, plan: Plan) -> None:
    """Check a plan by the rules of each feature, read from the snapshot alone."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    where = {node_id: at for at, node_id in enumerate(nodes.ids)}
    units = {(nodes.ids[each.node], each.device): each for each in snapshot.slice_units}
    on_slices = {each.job_id: each for each in snapshot.slice_jobs}
    services = {each.job_id: each for each in snapshot.services}
    taken, held = Counter[tuple[str, int]](), Counter[str]()
    named = Counter(each.job_id for each in plan.actions if isinstance(each, (Start, Hold, Preempt)))
    queued = {job_id for job_id, phase in zip(jobs.ids, jobs.phase.tolist(), strict=True) if phase == QUEUED}
    starts = {each.job_id: each for each in plan.actions if isinstance(each, Start)}
    stops = {each.job_id: each for each in plan.actions if isinstance(each, Preempt)}
    assert set(named.values()) <= {1}, "a job has two actions"
    assert queued == {*starts, *holds_of(plan)}, "a waiting job without an answer"
    for job_id, start in starts.items():
        job, shares = jobs.index[job_id], start.placement.shares
        rows = [where[share.node_id] for share in shares]
        devices = [(share.node_id, device) for share in shares for device in share.devices]
        taken.update(devices)
        held[jobs.tenants[job]] += len(devices)
        low, high, step = (int(each[job]) for each in (jobs.min_gpus, jobs.max_gpus, jobs.step_gpus))
        assert len(devices) in range(low, high + 1, step)
        assert nodes.schedulable[rows].all() or job_id in on_slices
        if job_id in on_slices:
            unit = units[devices[0]]
            assert unit.free
            assert unit.sevenths == on_slices[job_id].sevenths
        else:
            assert all(device in nodes.free_devices[where[node_id]] for node_id, device in devices)
            assert len({*nodes.gpu_model[rows].tolist()}) == 1
            assert jobs.eligible[job, nodes.gpu_model[rows[0]]]
        if job_id in services:
            assert len(rows) == 1
            assert services[job_id].nodes[rows[0]]
        if job_id in snapshot.bound:
            assert tuple(share.node_id for share in shares) == snapshot.bound[job_id]
        elif job_id in snapshot.within:
            level = snapshot.within[job_id]
            assert level >= 0
            assert len({*nodes.domains[rows, level].tolist()}) == 1
        for window in snapshot.windows:
            if any(share.node_id in window.gpus for share in shares) and jobs.tenants[job] != window.holder:
                ahead_s = window.start_s - snapshot.now_s
                assert window.holder or ahead_s > 0, "a start on a node in maintenance"
                ends_s = snapshot.endings[job_id].left_s if job_id in snapshot.endings else np.inf
                assert job_id not in services
                assert job_id not in on_slices
                assert ends_s <= ahead_s or jobs.preemptible[job], "a start that a window cannot stop"
    assert set(taken.values()) <= {1}, "a device is given twice"
    held += Counter(jobs.gpus_by_tenant())
    for tenant, most in snapshot.tenant_gpu_quota.items():
        mine = any(jobs.tenants[jobs.index[each]] == tenant for each in starts)
        assert held[tenant] <= most or not mine, "more than a tenant may hold"
    for job_id, stop in stops.items():
        job = jobs.index[job_id]
        assert jobs.preemptible[job]
        assert jobs.phase[job] in (STARTING, RUNNING)
        by_policy = stop.reason in (
            Reason.OUTRANKED,
            Reason.SCALE_OUT,
            Reason.SCALE_IN,
            Reason.FAIR_SHARE,
            Reason.GUARANTEED,
        )
        ran_s = snapshot.now_s - jobs.waiting_since_s[job] if jobs.phase[job] == RUNNING else 0.0
        late = (jobs.phase == QUEUED) & np.isfinite(jobs.deadline_s)
        if by_policy and not late.any() and not snapshot.orders:
            assert ran_s >= snapshot.min_run_s, "stopped before its guaranteed run was over"


def is_true(name: str, snapshot: Snapshot, plan: Plan) -> None:
    """Check what jobs are told against the snapshot."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    takes, here = nodes.schedulable, nodes.gpu_model[:, None] == np.arange(len(snapshot.gpu_models))
    whole = (nodes.gpus * takes)[:, None] * here
    for job_id, hold in holds_of(plan).items():
        job, why = jobs.index[job_id], hold.reason
        low, eligible = int(jobs.min_gpus[job]), jobs.eligible[job]
        may = (whole.sum(axis=0) >= low) & eligible
        special = job_id in snapshot.bound or any(
            job_id == each.job_id for each in (*snapshot.services, *snapshot.slice_jobs)
        )
        if why is Reason.NO_ELIGIBLE_NODE and not special:
            assert not may.any(), "there are such nodes"
        if why is Reason.TENANT_QUOTA:
            assert jobs.tenants[job] in snapshot.tenant_gpu_quota
        if why is Reason.RESERVED:
            assert any(each.holder != jobs.tenants[job] for each in snapshot.windows)
        if why is Reason.GRID_ORDER:
            assert any(each.bears for each in snapshot.orders)
        if why is Reason.GUARANTEED:
            assert snapshot.tenant_guarantees
        if why is Reason.FAIR_SHARE:
            assert name.startswith(FAIR)
        if why in (Reason.NO_ROOM_WITHIN, Reason.NO_SUCH_DOMAIN):
            assert job_id in snapshot.within
        if why in (Reason.CHECKPOINT_NODE_AWAY, Reason.CHECKPOINT_NODE_BUSY, Reason.CHECKPOINT_NODE_CLOSED):
            assert job_id in snapshot.bound
        if why in (Reason.NO_SUCH_SLICE, Reason.NOT_ENOUGH_FREE_SLICES):
            assert any(job_id == each.job_id for each in snapshot.slice_jobs)
        if why is Reason.WAITING_FOR_ROUND:
            assert snapshot.trigger is Trigger.PASSIVE or snapshot.min_run_s or snapshot.saves
        if why is Reason.WAITING_FOR_RELEASE:
            stops = any(isinstance(each, Preempt) for each in plan.actions)
            assert stops or (jobs.phase == PREEMPTING).any()


def keeps_the_rules(name: str, snapshot: Snapshot) -> None:
    found = rounds(name, snapshot)
    for seen, plan in found:
        is_valid(seen, plan)
        is_true(name, seen, plan)
    assert rounds(name, snapshot) == found


def said(plans: list[tuple[Snapshot, Plan]], but: str = "") -> list[list[str]]:
    """Return what plans do, without the order in which independent actions stand."""
    return [
        [*sorted(str(each) for each in plan.actions if each.job_id != but), *map(str, plan.nodes)] for _, plan in plans
    ]


def renamed(snapshot: Snapshot, name: Callable[[Any], Any]) -> Snapshot:
    """Return the snapshot with other names for all jobs, in the same order."""

    def key(value: Any) -> Any:
        return {name(job): each for job, each in value.items()}

    by_job = ("graphs", "length_spreads", "bound", "within", "near", "endings", "saves")
    return replace(
        snapshot,
        jobs=replace(snapshot.jobs, ids=tuple(map(name, snapshot.jobs.ids))),
        services=tuple(replace(each, job_id=name(each.job_id)) for each in snapshot.services),
        slice_jobs=tuple(replace(each, job_id=name(each.job_id)) for each in snapshot.slice_jobs),
        shared=tuple((name(one), name(other)) for one, other in snapshot.shared),
        measuring=None if snapshot.measuring is None else frozenset(map(name, snapshot.measuring)),
        **{each: key(getattr(snapshot, each)) for each in by_job},
    )


def other_names_change_nothing(name: str, snapshot: Snapshot) -> None:
    """Ids break ties by their order alone."""
    jobs = [
        [str(each).replace("'zj", "'j") for each in plan]
        for plan in said(rounds(name, renamed(snapshot, "z{}".format)))
    ]
    assert [sorted(each) for each in jobs] == [sorted(each) for each in said(rounds(name, snapshot))]


def the_order_of_rows_changes_nothing(name: str, snapshot: Snapshot) -> None:
    order = [*range(len(snapshot.jobs))][::-1]
    assert said(rounds(name, replace(snapshot, jobs=rows(snapshot.jobs, order)))) == said(rounds(name, snapshot))


def a_job_that_cannot_run_changes_nothing(name: str, snapshot: Snapshot) -> None:
    """One that asks for a model that there is not, behind all others."""
    tenant = next(iter(snapshot.jobs.tenants), "red")
    more = a_snapshot([a_job("zz", submitted_s=NOON_S, waiting_since_s=NOON_S, tenant=tenant)])
    columns = {}
    for each in fields(JobTable):
        own, new = getattr(snapshot.jobs, each.name), getattr(more.jobs, each.name)
        if each.name == "eligible":
            new = np.zeros((1, len(snapshot.gpu_models)), dtype=np.bool_)
        columns[each.name] = np.concatenate((own, new)) if isinstance(own, np.ndarray) else (*own, *new)
    assert said(rounds(name, replace(snapshot, jobs=JobTable(**columns))), "zz") == said(rounds(name, snapshot))


def what_is_not_used_changes_nothing(name: str, snapshot: Snapshot) -> None:
    unused: dict[str, Any] = {}
    if not snapshot.tenant_gpu_quota:
        unused["tenant_gpu_quota"] = {"nobody": 3, "red": 10_000}
    if not snapshot.windows:
        unused["windows"] = (Window("far", NOON_S + 1e8, NOON_S + 2e8, {}, None),)
    if not snapshot.orders:
        unused["orders"] = (standing(1e12, other_w=0.0, measured_w=np.nan),)
    if not snapshot.levels:
        unused["levels"] = ("node",)
        unused["nodes"] = replace(snapshot.nodes, domains=np.arange(len(snapshot.nodes))[:, None])
    if not snapshot.bound:
        unused["bound"] = {"nobody": ("n0",)}
    if not snapshot.tenant_weights:
        unused["tenant_weights"] = {"nobody": 4.0}
    if not snapshot.endings:
        unused["endings"] = {}
    before = said(rounds(name, snapshot))
    for key, value in unused.items():
        more = {"nodes": unused["nodes"]} if key == "levels" else {}
        if key != "nodes":
            assert said(rounds(name, replace(snapshot, **{key: value}, **more))) == before, key


PROMISES = (
    other_names_change_nothing,
    the_order_of_rows_changes_nothing,
    a_job_that_cannot_run_changes_nothing,
    what_is_not_used_changes_nothing,
)


def check(name: str, seed: int) -> None:
    """Check the rules of one cluster, and one of the promises."""
    for promise in (keeps_the_rules, PROMISES[seed % len(PROMISES)]):
        snapshot = combined(seed)
        try:
            promise(name, snapshot)
        except Exception as error:

            def fails(smaller: Snapshot, promise: Any = promise, error: Exception = error) -> bool:
                try:
                    promise(name, smaller)
                except Exception as other:
                    return type(other) is type(error) and str(other)[:20] == str(error)[:20]
                return False

            error.add_note(f"seed {seed}, at its smallest:\n{told(smallest(snapshot, fails))}")
            raise


@pytest.mark.parametrize("name", EVERYONE)
def test_features_keep_their_rules_together(name: str) -> None:
    for seed in SEEDS:
        check(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYONE)
def test_features_keep_their_rules_together_on_hundreds_of_clusters(name: str) -> None:
    for seed in range(24, 400):
        check(name, seed)
