"""What the layer over every policy promises of the grid's orders, whatever the cluster."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import compress
from typing import TypeGuard

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.core.cycle.plan import Action, Hold, Plan, Preempt, SetControl, Start
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import PREEMPTING, QUEUED, JobTable, Saves, Snapshot
from services.core.domain.arrays import Bools
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.orders import STOPS_AHEAD_S, PowerOrder, curve_of, order_at
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import reach_of, run_under_orders
from services.core.policies.orders.tables import OrderTables
from services.core.policies.orders.widths import without_growth
from services.core.policies.powerflow.watts import Idle, draw_of
from services.core.policies.registry import FAIR, POLICIES, build_policy, policy_entry
from tests.properties.test_sparing import saved
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot
from tests.support.shared import shared
from tests.support.strategies import snapshots

EVERYONE = (*POLICIES, f"{FAIR}joint")
CLASSES = (0.0, 0.1, 0.25, 0.5, math.nan)


def ordered(snapshot: Snapshot, limit_w: float, flex: list[float], *, stands: bool = False) -> Snapshot:
    """Return the snapshot of a cluster whose GPUs take limits, with an order and a class for each job.

    Under an order that stands, gangs may be measured.
    """
    n_models = len(snapshot.gpu_models)
    return replace(
        snapshot,
        settable=(frozenset({ControlKind.POWER_LIMIT}),) * n_models,
        limit_range_w=np.tile([100.0, 400.0], (n_models, 1)),
        idle_w=np.full(n_models, 50.0),
        jobs=replace(snapshot.jobs, flex=np.array(flex[: len(snapshot.jobs)])),
        orders=(PowerOrder("o", -1, limit_w, limit_w, NOON_S + 60, math.inf if stands else NOON_S + 3600),),
        measures=stands,
    )


def is_limit(action: Action) -> TypeGuard[SetControl]:
    return isinstance(action, SetControl) and action.kind is ControlKind.POWER_LIMIT


def limits_of(plan: Plan) -> dict[JobId, float | None]:
    return {each.job_id: each.value for each in plan.actions if is_limit(each)}


def drawn_w(snapshot: Snapshot, plan: Plan, *, stopping: bool = False) -> float:
    """Return what gangs and free devices draw by the layer's models once a plan is carried out, watts."""
    tables = OrderTables.of_round(snapshot)
    draw = draw_of(snapshot, plan.actions, tables)
    limits = limits_of(plan)
    watts = draw.stopping_w if stopping else 0.0
    for job, model, gpus, starts in zip(draw.jobs, draw.models, draw.gpus, draw.starts, strict=True):
        table, job_id = tables.of(int(job), int(model)), snapshot.jobs.ids[int(job)]
        now = math.nan if starts else float(snapshot.jobs.power_limit_w[job])
        limit_w = limits.get(job_id, None if math.isnan(now) else now)
        power_w = table.at(np.array([gpus]))[1][0]
        watts += float(power_w[-1] if limit_w is None else np.interp(limit_w, table.values, power_w))
    return watts + Idle(snapshot, [each for each in plan.actions if isinstance(each, Start)]).draw_w()


def stopped_idle_w(snapshot: Snapshot, plan: Plan) -> float:
    """Return what the devices of gangs that the plan stops, or that stop already, draw once they are free, watts."""
    jobs = snapshot.jobs
    stops = {each.job_id for each in plan.actions if isinstance(each, Preempt)}
    stopping = [job_id in stops or phase == PREEMPTING for job_id, phase in zip(jobs.ids, jobs.phase, strict=True)]
    return 50.0 * sum(int(gpus) for gpus, stops in zip(jobs.gpus, stopping, strict=True) if stops)


def least_w(snapshot: Snapshot) -> float:
    """Return the least that the cluster can draw: only gangs that may not be stopped, at their lowest limit."""
    jobs, tables = snapshot.jobs, OrderTables.of_round(snapshot)
    draw = draw_of(snapshot, (), tables)
    watts = Idle(snapshot, ()).draw_w() + stopped_idle_w(snapshot, Plan(snapshot.version, ()))
    for job, model, gpus in zip(draw.jobs, draw.models, draw.gpus, strict=True):
        lowest_w = float(tables.of(int(job), int(model)).at(np.array([gpus]))[1].min())
        watts += 50.0 * int(gpus) if jobs.preemptible[job] else lowest_w
    return watts


@given(lasts_s=st.floats(1.0, 10_000.0), part=st.floats(-1.0, 0.999))
def test_what_waits_for_an_order_is_never_expected_in_the_past(lasts_s: float, part: float) -> None:
    curve = curve_of(NOON_S, NOON_S + lasts_s, ((0.0, 100.0),), 200.0)
    for now_s in (NOON_S + part * lasts_s, NOON_S + lasts_s + part * (curve[-1][0] - NOON_S - lasts_s)):
        order = order_at("o", -1, curve, now_s)
        assert now_s < order.ends_s == (NOON_S + lasts_s if now_s < NOON_S + lasts_s else curve[-1][0])


@pytest.mark.parametrize("name", EVERYONE)
@shared(
    settings(max_examples=30),
    first=snapshots(),
    share=st.floats(0.3, 1.1),
    flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10),
    stands=st.booleans(),
)
def test_an_order_is_met_in_the_stated_order_of_means(
    name: str, first: Snapshot, share: float, flex: list[float], stands: bool
) -> None:
    policy = build_policy(name, {})
    free = ordered(first, math.inf, flex, stands=stands)
    calm = run_cycle(policy, free, policy.initial()).plan
    limit_w = share * max(drawn_w(free, calm), 1.0)
    held = snapshot = ordered(first, limit_w, flex, stands=stands)
    entry = policy_entry(name)
    if entry.resizes:
        held = without_growth(held, OrderTables.of_round(held))
    before = run_cycle(policy, replace(held, orders=()), policy.initial()).plan

    plan = run_under_orders(policy, snapshot, policy.initial()).plan

    jobs, index = snapshot.jobs, snapshot.jobs.index
    calm_w = drawn_w(snapshot, plan) + stopped_idle_w(snapshot, plan)
    reach = reach_of(snapshot, replace(snapshot.orders[0], other_w=7.0))
    assert reach.least_w == pytest.approx(least_w(snapshot) + 7.0)
    assert calm_w >= least_w(snapshot) - 1e-6, "less can be reached than is said"
    if least_w(snapshot) <= limit_w:
        assert calm_w <= limit_w + 1e-6, "an order that could be met is exceeded"
    changed = [each for each in plan.actions if each not in before.actions]
    by_order = [each for each in changed if each.reason in (Reason.GRID_ORDER, Reason.SCALE_IN)]
    wide = {each.job_id: each.gpus for each in before.actions if isinstance(each, Start)}
    for each in changed:
        if isinstance(each, Start) or (isinstance(each, Preempt) and each.reason is Reason.SCALE_IN):
            at = index[each.job_id]
            gpus = each.gpus if isinstance(each, Start) else each.next_gpus
            assert entry.resizes, "a gang is narrowed under a policy that would leave it so"
            assert jobs.flex[at] != 0, "a gang of class 0 is narrowed"
            assert gpus < wide.get(each.job_id, int(jobs.gpus[at])), "an order makes a gang wider"
    hard = {job_id for job_id, at in index.items() if jobs.flex[at] == 0}
    if any(each.job_id in hard for each in by_order):
        tables = OrderTables.of_round(snapshot)
        limits = limits_of(plan)
        slowed = any(each.job_id in hard for each in by_order if isinstance(each, SetControl))
        for each in draw_of(snapshot, plan.actions, tables).jobs.tolist():
            if jobs.ids[each] in hard:
                continue
            assert not jobs.preemptible[each], "a flexible gang goes on while one of class 0 is touched"
            table = tables.of(
                each, int(snapshot.nodes.gpu_model[snapshot.nodes.index[jobs.placements[each].shares[0].node_id]])
            )
            assert not slowed or table.kind is None or limits.get(jobs.ids[each]) == table.values[0]
    stops = {each.job_id for each in by_order if isinstance(each, Preempt)}
    assert all(jobs.preemptible[index[job_id]] for job_id in stops)
    # What the order does not touch is as the policy wants it.
    touched = {each.job_id for each in by_order}
    assert {each for each in before.actions if each.job_id not in touched} == {
        each for each in plan.actions if each.job_id not in touched
    }


@pytest.mark.parametrize("name", EVERYONE)
@shared(
    settings(max_examples=30),
    first=snapshots(),
    share=st.floats(0.2, 1.1),
    flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10),
    ages_s=st.lists(st.floats(0, 5_000), min_size=8),
    every_s=st.floats(1, 9_000),
    ahead_s=st.floats(200, 9_000),
)
def test_ahead_of_a_fall_nothing_stops_or_waits_but_what_would_lose_more_by_it(
    name: str, first: Snapshot, share: float, flex: list[float], ages_s: list[float], every_s: float, ahead_s: float
) -> None:
    policy = build_policy(name, {})
    free = replace(ordered(first, math.inf, flex), saves=saved(first, ages_s, every_s))
    falls_s, falls_w = NOON_S + ahead_s, share * max(drawn_w(free, Plan(first.version, ())), 1.0)
    stop_s = falls_s - STOPS_AHEAD_S
    order = PowerOrder("o", -1, math.inf, math.inf, stop_s, falls_s + 60.0, falls_s=falls_s, falls_w=falls_w)
    announced = replace(free, orders=(order,))
    held = announced
    if policy_entry(name).resizes:
        held = without_growth(announced, OrderTables.of_round(announced))
    before = run_under_orders(policy, replace(held, orders=()), policy.initial()).plan

    plan = run_under_orders(policy, announced, policy.initial()).plan

    jobs, index = first.jobs, first.jobs.index
    for each in set(plan.actions) - set(before.actions):
        at = index[each.job_id]
        assert jobs.flex.size == 0 or free.jobs.flex[at] != 0, "class 0 is touched"
        if isinstance(each, Preempt):
            assert jobs.preemptible[at]
            last_s = max(free.saves[each.job_id].last_s, float(jobs.waiting_since_s[at]))
            assert last_s + every_s > stop_s, "it could save once more"
        else:
            assert isinstance(each, Start | Hold), "a limit is set too early"
            assert each.reason is Reason.GRID_ORDER
            assert stop_s - NOON_S < max(1.25 * every_s, 600.0), "a start that pays waits"
    none = replace(order, falls_s=math.inf, falls_w=math.inf)
    assert run_under_orders(policy, replace(free, orders=(none,)), policy.initial()).plan.actions == (
        run_under_orders(policy, replace(free, orders=()), policy.initial()).plan.actions
    )


def only(jobs: JobTable, which: Bools) -> JobTable:
    """Return some rows of a table."""
    columns = {each.name: getattr(jobs, each.name) for each in fields(jobs)}
    return JobTable.of_columns(
        {
            name: column[which] if isinstance(column, np.ndarray) else tuple(compress(column, which))
            for name, column in columns.items()
        }
    )


@settings(max_examples=60)
@given(first=snapshots(), share=st.floats(0.5, 1.0), flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10))
def test_what_an_order_has_set_is_not_set_again(first: Snapshot, share: float, flex: list[float]) -> None:
    """Whatever the last digit of what was stored, and whatever the gangs have drawn under their limits since."""
    goes_on = (first.jobs.phase != QUEUED) & (first.jobs.phase != PREEMPTING)
    first = replace(first, jobs=only(first.jobs, goes_on))
    policy, free = build_policy("fifo", {}), ordered(first, math.inf, flex)
    snapshot = ordered(first, share * max(drawn_w(free, Plan(first.version, ())), 1.0), flex)
    plan = run_under_orders(policy, snapshot, policy.initial()).plan
    assume(all(is_limit(each) for each in plan.actions))

    jobs = snapshot.jobs
    now, before = jobs.power_limit_w.copy(), jobs.unordered_w.copy()
    for each in plan.actions:
        assert is_limit(each)
        at = jobs.index[each.job_id]
        now[at] = math.nan if each.value is None else math.nextafter(each.value, 0)
        before[at] = np.nan_to_num(jobs.gpu_power_w[at])
    later = replace(snapshot, jobs=replace(jobs, power_limit_w=now, unordered_w=before))
    assert run_under_orders(policy, later, policy.initial()).plan.actions == ()


@pytest.mark.parametrize("name", EVERYONE)
@shared(settings(max_examples=30), first=snapshots(), flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10))
def test_an_order_that_ends_leaves_the_policys_values(name: str, first: Snapshot, flex: list[float]) -> None:
    policy = build_policy(name, {})
    free = replace(ordered(first, math.inf, flex), orders=())
    jobs = free.jobs
    holds = jobs.gpus > 0
    left = replace(jobs, power_limit_w=np.where(holds, 123.0, np.nan), unordered_w=np.where(holds, 300.0, np.nan))

    plan = run_under_orders(policy, replace(free, jobs=left), policy.initial()).plan
    wanted = run_cycle(policy, free, policy.initial()).plan

    own = limits_of(wanted)
    stops = {each.job_id for each in plan.actions if isinstance(each, Preempt)}
    for at in np.flatnonzero(holds).tolist():
        job_id = jobs.ids[at]
        if jobs.phase[at] == PREEMPTING or job_id in stops:
            continue
        found = [each for each in plan.actions if isinstance(each, SetControl) and each.job_id == job_id]
        assert [each.value for each in found] == [own.get(job_id)]


@pytest.mark.parametrize("name", EVERYONE)
@shared(first=snapshots(), flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10))
def test_a_limit_of_the_cluster_that_slows_none_leaves_the_plan_as_it_is(
    name: str, first: Snapshot, flex: list[float]
) -> None:
    """Gangs are still measured at each power limit."""
    policy = build_policy(name, {})
    loose = ordered(first, 1e6, flex, stands=True)

    plan = run_under_orders(policy, loose, policy.initial()).plan

    free = run_cycle(policy, replace(loose, orders=()), policy.initial()).plan
    assert set(plan.actions) == set(free.actions)


@settings(max_examples=30)
@given(first=snapshots(), flex=st.lists(st.sampled_from(CLASSES), min_size=10, max_size=10))
def test_what_an_order_stopped_waits_with_the_order_as_its_reason(first: Snapshot, flex: list[float]) -> None:
    policy = build_policy("fifo", {})
    snapshot = ordered(first, 1.0, flex)

    plan = run_under_orders(policy, snapshot, policy.initial()).plan

    assert not any(isinstance(each, Start) for each in plan.actions)
    waits = {each.job_id for each in plan.actions if isinstance(each, Hold)}
    assert waits == {jid for jid, phase in zip(first.jobs.ids, first.jobs.phase, strict=True) if phase == QUEUED}


class Packing(StatelessPolicy):
    """A policy that lets a waiting job share the GPU of a running one."""

    name, packs = "packing", True

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        (host,) = (each for each in snapshot.jobs.placements if each is not None)
        start = Start(JobId("guest"), host, Reason.PACKED, shares=True)
        return Plan(snapshot.version, (start,)), memory


def test_a_device_that_two_gangs_share_is_set_by_one_of_them() -> None:
    jobs = [a_job("host", on={"n0": (0,)}, shareable=True), a_job("guest", shareable=True)]
    snapshot = ordered(a_snapshot(jobs, [a_node("n0", gpus=1)]), 250.0, [0.5, 0.5])
    plan = run_under_orders(Packing(), snapshot, None).plan
    assert [each.job_id for each in plan.actions if isinstance(each, Start)] == ["guest"]
    assert [*limits_of(plan)] == ["host"]


def test_of_gangs_alike_that_which_has_just_saved_pauses() -> None:
    """Also where it will be: the one whose last save before the fall is the later one, after it has saved."""
    jobs = [a_job(name, on={"n0": (at,)}, preemptible=True) for at, name in enumerate("abc")]
    free = ordered(a_snapshot(jobs, [a_node("n0", gpus=3)]), math.inf, [0.1] * 3)
    saves = {
        JobId(name): Saves(NOON_S - ago_s, 1_000.0) for name, ago_s in zip("abc", (300.0, 20.0, 900.0), strict=True)
    }
    limit_w = 0.8 * drawn_w(free, Plan(free.version, ()))

    def stopped(at_s: float, **times: float) -> list[JobId]:
        order = PowerOrder(
            "o", -1, **{"limit_w": math.inf, "soon_w": math.inf} | times, changes_s=math.inf, ends_s=math.inf
        )
        later = {
            each: Saves(was + 1_000.0 * ((NOON_S + at_s - was) // 1_000.0), every)
            for each, (was, every) in saves.items()
        }
        snapshot = replace(free, now_s=NOON_S + at_s, saves=later, orders=(order,))
        plan = run_under_orders(build_policy("fifo", {}), snapshot, None).plan
        return [each.job_id for each in plan.actions if isinstance(each, Preempt)]

    assert stopped(0.0, limit_w=limit_w, soon_w=limit_w) == ["b"]
    announced = {"falls_s": NOON_S + 2_120.0 + STOPS_AHEAD_S, "falls_w": limit_w}
    assert stopped(0.0, **announced) == []
    assert stopped(1_990.0, **announced) == []
    assert stopped(2_101.0, **announced) == ["c"]
    assert stopped(2_101.0) == []
