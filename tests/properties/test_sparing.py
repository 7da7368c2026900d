"""What a guaranteed run promises under every policy, whatever the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.snapshot import RUNNING, Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy
from tests.properties.test_windows import with_windows
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot
from tests.support.strategies import snapshots

EVERYONE = (*POLICIES, f"{FAIR}joint")
RUNS_S = (1.0, 3_600.0, 86_400.0)


def planned(name: str, snapshot: Snapshot) -> Plan:
    policy = build_policy(name, {})
    return run_under_orders(policy, snapshot, policy.initial()).plan


def stopped(plan: Plan) -> dict[JobId, Preempt]:
    return {each.job_id: each for each in plan.actions if isinstance(each, Preempt)}


@pytest.mark.parametrize("name", EVERYONE)
@settings(max_examples=15)
@given(snapshot=snapshots(Trigger.ACTIVE), min_run_s=st.sampled_from(RUNS_S))
def test_the_stops_of_a_policy_are_as_ever_but_for_those_that_come_too_soon(
    name: str, snapshot: Snapshot, min_run_s: float
) -> None:
    free, kept = planned(name, snapshot), planned(name, replace(snapshot, min_run_s=min_run_s))

    def may_stop(job_id: JobId) -> bool:
        at = snapshot.jobs.index[job_id]
        return snapshot.jobs.phase[at] == RUNNING and NOON_S - snapshot.jobs.waiting_since_s[at] >= min_run_s

    assert stopped(kept) == {job_id: stop for job_id, stop in stopped(free).items() if may_stop(job_id)}
    assert [each for each in kept.actions if not isinstance(each, Preempt)] == [
        each for each in free.actions if not isinstance(each, Preempt)
    ]


@pytest.mark.parametrize("name", EVERYONE)
@settings(max_examples=15)
@given(snapshot=with_windows())
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
