"""What a guaranteed run promises under every policy, whatever the cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from services.core.cycle.plan import Hold, Plan, Preempt
from services.core.cycle.snapshot import PREEMPTING, RUNNING, Saves, Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.domain.orders import PowerOrder
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy
from tests.properties.test_windows import on_clusters_with_windows
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, held
from tests.support.shared import shared
from tests.support.strategies import snapshots

EVERYONE = (*POLICIES, f"{FAIR}joint")
RUNS_S = (1.0, 3_600.0, 86_400.0)


def planned(name: str, snapshot: Snapshot) -> Plan:
    policy = build_policy(name, {})
    return run_under_orders(policy, snapshot, policy.initial()).plan


def stopped(plan: Plan) -> dict[JobId, Preempt]:
    return {each.job_id: each for each in plan.actions if isinstance(each, Preempt)}


def saved(snapshot: Snapshot, ages_s: list[float], every_s: float) -> dict[JobId, Saves]:
    """Return saves so long ago, if since the gang began."""
    since_s = snapshot.jobs.waiting_since_s.tolist()
    last_s = [max(NOON_S - ages_s[at % 8], each) for at, each in enumerate(since_s)]
    return {job_id: Saves(each, every_s) for job_id, each in zip(snapshot.jobs.ids, last_s, strict=True)}


def next_round(action: Any) -> Any:
    waits = isinstance(action, Hold) and action.reason is Reason.WAITING_FOR_RELEASE
    return action._replace(reason=Reason.WAITING_FOR_ROUND) if waits else action


@pytest.mark.parametrize("name", EVERYONE)
@shared(settings(max_examples=15), snapshot=snapshots(Trigger.ACTIVE), min_run_s=st.sampled_from(RUNS_S))
def test_the_stops_of_a_policy_are_as_ever_but_for_those_that_come_too_soon(
    name: str, snapshot: Snapshot, min_run_s: float
) -> None:
    free, kept = planned(name, snapshot), planned(name, replace(snapshot, min_run_s=min_run_s))

    def may_stop(job_id: JobId) -> bool:
        at = snapshot.jobs.index[job_id]
        return snapshot.jobs.phase[at] == RUNNING and NOON_S - snapshot.jobs.waiting_since_s[at] >= min_run_s

    assert stopped(kept) == {job_id: stop for job_id, stop in stopped(free).items() if may_stop(job_id)}
    releases = bool(stopped(kept)) or bool((snapshot.jobs.phase == PREEMPTING).any())
    assert releases or Reason.WAITING_FOR_RELEASE not in held(kept).values(), "nothing is released"
    if stopped(free) and not releases:
        free = replace(free, actions=tuple(map(next_round, free.actions)))
    assert [each for each in kept.actions if not isinstance(each, Preempt)] == [
        each for each in free.actions if not isinstance(each, Preempt)
    ]


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_stops_for_windows_come_in_time(name: str, snapshot: Snapshot) -> None:
    free, kept = planned(name, snapshot), planned(name, replace(snapshot, min_run_s=86_400.0))

    def reserved(plan: Plan) -> set[JobId]:
        return {job_id for job_id, stop in stopped(plan).items() if stop.reason is Reason.RESERVED}

    assert reserved(kept) == reserved(free)


@pytest.mark.parametrize(
    ("deadline_s", "goes"), [(float("inf"), False), (5_000.0, False), (4_000.0, True), (-1.0, False)]
)
def test_a_deadline_that_would_be_missed_lifts_the_guarantee(deadline_s: float, goes: bool) -> None:
    runs = a_job("old", on={"n0": (0,)}, preemptible=True, waiting_since_s=NOON_S - 100, attained_gpu_s=90_000.0)
    waits = a_job("new", submitted_s=NOON_S - 10, deadline_s=NOON_S + deadline_s)
    snapshot = a_snapshot([runs, waits], [a_node("n0", gpus=1)], trigger=Trigger.ACTIVE)
    timed = replace(snapshot, min_run_s=3_000.0, next_active_s=NOON_S + 1_800.0)
    assert stopped(planned("las", snapshot)), "nothing is stopped anyhow"
    assert bool(stopped(planned("las", timed))) is goes


@pytest.mark.parametrize("name", EVERYONE)
@shared(
    settings(max_examples=15),
    snapshot=snapshots(Trigger.ACTIVE),
    ages_s=st.lists(st.floats(0, 5_000), min_size=8),
    every_s=st.floats(1, 9_000),
)
def test_stops_are_as_ever_and_wait_for_the_next_save_alone(
    name: str, snapshot: Snapshot, ages_s: list[float], every_s: float
) -> None:
    saves = saved(snapshot, ages_s, every_s)
    told = replace(snapshot, saves=saves, save_wait_s=1_800.0)
    free, waits = planned(name, snapshot), planned(name, told)
    plain = [replace(each, wait_s=0.0) if isinstance(each, Preempt) else each for each in waits.actions]
    assert plain == [*free.actions]
    for job_id, stop in stopped(waits).items():
        at = snapshot.jobs.index[job_id]
        since_s = max(saves[job_id].last_s, snapshot.jobs.waiting_since_s[at])
        assert stop.wait_s <= max(since_s + every_s - NOON_S, 0.0) + 0.25 * min(every_s, 1_800.0)
        assert 0 <= stop.wait_s <= 1.25 * 1_800.0
        is_due = NOON_S <= since_s + every_s <= NOON_S + 1_800.0 and snapshot.jobs.phase[at] == RUNNING
        assert stop.wait_s or not is_due or waits.hurries


@pytest.mark.parametrize("name", EVERYONE)
@on_clusters_with_windows
def test_nothing_is_waited_for_before_a_window(name: str, snapshot: Snapshot) -> None:
    saves = {each: Saves(NOON_S - 60.0, 100.0) for each in snapshot.jobs.ids}
    soon = replace(snapshot, windows=tuple(replace(each, start_s=NOON_S + 200.0) for each in snapshot.windows))
    plan = planned(name, replace(soon, saves=saves, save_wait_s=1_800.0))
    assert not any(each.wait_s for each in stopped(plan).values())
    assert plan.hurries is bool(saves and soon.windows)


def of_a_job_that_saves(**changes: object) -> Plan:
    runs = a_job("old", on={"n0": (0,)}, preemptible=True, waiting_since_s=NOON_S - 3_000, attained_gpu_s=90_000.0)
    waits = a_job("new", submitted_s=NOON_S - 10, deadline_s=NOON_S + float(str(changes.pop("deadline_s", "inf"))))
    snapshot = a_snapshot([runs, waits], [a_node("n0", gpus=1)], trigger=Trigger.ACTIVE)
    saves = {JobId("old"): Saves(NOON_S - 1_000.0, 1_500.0)}
    return planned("las", replace(snapshot, **{"saves": saves, "save_wait_s": 1_800.0, **changes}))


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({}, 500.0 + 375.0),
        ({"save_wait_s": 600.0}, 500.0 + 150.0),
        ({"save_wait_s": 400.0}, 0.0),
        ({"save_wait_s": 0.0}, 0.0),
        ({"saves": {JobId("old"): Saves(NOON_S - 5_000.0, 1_500.0)}}, 0.0),
        ({"saves": {JobId("old"): Saves(NOON_S - 1_000.0, float("nan"))}}, 0.0),
        ({"deadline_s": 2_000.0}, 0.0),
    ],
)
def test_a_stop_waits_if_the_next_save_is_near_and_nothing_presses(changes: dict[str, object], wait_s: float) -> None:
    plan = of_a_job_that_saves(**changes)
    assert stopped(plan)[JobId("old")].wait_s == pytest.approx(wait_s)
    assert plan.hurries is ("deadline_s" in changes)


@pytest.mark.parametrize(
    ("ago_s", "deadline_s", "goes"), [(1_000.0, "inf", False), (60.0, "inf", True), (1_000.0, "2000", True)]
)
def test_under_an_order_a_policy_stops_what_has_just_saved(ago_s: float, deadline_s: str, goes: bool) -> None:
    """Nothing is waited for; before the order, until shortly before its start, all is as ever."""
    saves = {JobId("old"): Saves(NOON_S - ago_s, 1_500.0)}
    order = PowerOrder("o", -1, 1e9, 1e9, math.inf, NOON_S + 600.0)
    plan = of_a_job_that_saves(orders=(order,), saves=saves, deadline_s=deadline_s)
    assert plan.hurries
    assert bool(stopped(plan)) is goes
    assert not any(each.wait_s for each in stopped(plan).values())
    ahead = replace(order, limit_w=math.inf, soon_w=math.inf, falls_s=NOON_S + 9_000.0, falls_w=1e9)
    assert stopped(of_a_job_that_saves(orders=(ahead,), saves=saves, deadline_s=deadline_s))


@pytest.mark.parametrize(
    ("every_s", "goes"), [(3_000.0, "with a wait"), (9_000.0, "not"), (2_000.0, "at once"), (float("nan"), "at once")]
)
def test_a_gang_that_has_not_saved_yet_is_stopped_when_that_is_due(every_s: float, goes: str) -> None:
    plan = of_a_job_that_saves(saves={JobId("old"): Saves(NOON_S - 20_000.0, every_s)})  # it has run for 3,000 s
    stop = stopped(plan).get(JobId("old"))
    assert ("not" if stop is None else "with a wait" if stop.wait_s else "at once") == goes
    urgent = of_a_job_that_saves(saves={JobId("old"): Saves(NOON_S - 20_000.0, every_s)}, deadline_s=500.0)
    assert stopped(urgent)[JobId("old")].wait_s == 0.0, "a deadline lifts it"
