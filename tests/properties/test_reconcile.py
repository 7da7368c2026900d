"""Reconciliation keeps what it promises, whatever it is asked for."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from services.core.cycle import reconcile as reconciling
from services.core.cycle.filling import Filler
from services.core.cycle.plan import Hold, Plan, Preempt, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.cycle.validate import check_plan
from services.core.domain.reasons import Reason
from tests.support.strategies import snapshots


@st.composite
def rankings(draw: st.DrawFn, snapshot: Snapshot) -> Ranking:
    """Draw any order of any of the jobs, at any sizes of their grids."""
    jobs = snapshot.jobs
    order = draw(st.permutations(range(len(jobs))))
    order = order[: draw(st.integers(0, len(jobs)))]
    sizes = [
        draw(st.sampled_from(range(int(jobs.min_gpus[job]), int(jobs.max_gpus[job]) + 1, int(jobs.step_gpus[job]))))
        for job in order
    ]
    return Ranking(np.array(order, dtype=np.int64), np.array(sizes, dtype=np.int64))


@given(data=st.data(), snapshot=snapshots(), preemption=st.sampled_from(list(Preemption)), backfill=st.booleans())
def test_any_ranking_gives_a_sound_plan(
    data: st.DataObject, snapshot: Snapshot, preemption: Preemption, backfill: bool
) -> None:
    plan = reconcile(snapshot, data.draw(rankings(snapshot)), preemption=preemption, backfill=backfill)

    check_plan(snapshot, plan)


@given(data=st.data(), snapshot=snapshots(), preemption=st.sampled_from(list(Preemption)))
def test_jobs_told_to_wait_for_a_release_are_covered_by_it(
    data: st.DataObject, snapshot: Snapshot, preemption: Preemption
) -> None:
    assume(len(snapshot.gpu_models) == 1)
    assume(bool(snapshot.nodes.schedulable.all()))
    ranking = data.draw(rankings(snapshot))
    plan = reconcile(snapshot, ranking, preemption=preemption)

    assert awaited(snapshot, ranking, plan) <= free_after(snapshot, plan)


@given(data=st.data(), snapshot=snapshots(), preemption=st.sampled_from(list(Preemption)))
def test_jobs_kept_at_once_are_those_kept_one_by_one(
    data: st.DataObject, snapshot: Snapshot, preemption: Preemption
) -> None:
    nobody_waits = data.draw(st.booleans())
    if nobody_waits:
        snapshot = replace(snapshot, jobs=snapshot.jobs.rows(snapshot.jobs.phase != Phase.QUEUED))
    ranking = data.draw(rankings(snapshot))
    if nobody_waits and ranking.order.size == len(snapshot.jobs):
        ranking = Ranking(ranking.order, snapshot.jobs.gpus[ranking.order])

    at_once = reconcile(snapshot, ranking, preemption=preemption)
    one_by_one = patch.object(Filler, "_keep_first", lambda _, positions: positions)
    with one_by_one, patch.object(reconciling, "has_nothing_to_do", lambda *_: False):
        assert reconcile(snapshot, ranking, preemption=preemption) == at_once


@given(data=st.data(), snapshot=snapshots())
def test_preempting_is_never_for_nothing(data: st.DataObject, snapshot: Snapshot) -> None:
    ranking = data.draw(rankings(snapshot))
    assume(ranking.order.size == len(snapshot.jobs))
    plan = reconcile(snapshot, ranking, preemption=Preemption.NOW)

    outranked = [a for a in plan.actions if isinstance(a, Preempt) and a.reason is Reason.OUTRANKED]
    gains = [a for a in plan.actions if isinstance(a, Preempt) and a.reason is Reason.SCALE_OUT]
    waits = [a for a in plan.actions if isinstance(a, Hold) and a.reason is Reason.WAITING_FOR_RELEASE]
    stopping = (snapshot.jobs.phase == Phase.PREEMPTING).any()
    quota = any(isinstance(a, Hold) and a.reason is Reason.TENANT_QUOTA for a in plan.actions)
    assert not outranked or gains or waits or stopping or quota


def awaited(snapshot: Snapshot, ranking: Ranking, plan: Plan) -> int:
    """Return the devices that jobs waiting for a release are to have."""
    index = {job_id: at for at, job_id in enumerate(snapshot.jobs.ids)}
    wanted = dict(zip(ranking.order.tolist(), ranking.gpus.tolist(), strict=True))
    holds = [action for action in plan.actions if isinstance(action, Hold)]
    return sum(wanted[index[hold.job_id]] for hold in holds if hold.reason is Reason.WAITING_FOR_RELEASE)


def free_after(snapshot: Snapshot, plan: Plan) -> int:
    """Return the devices free once the plan is carried out and every stopping job is gone."""
    index = {job_id: at for at, job_id in enumerate(snapshot.jobs.ids)}
    jobs = snapshot.jobs
    stopping = set(np.flatnonzero(jobs.phase == Phase.PREEMPTING).tolist())
    stopping |= {index[action.job_id] for action in plan.actions if isinstance(action, Preempt)}
    started = sum(action.gpus for action in plan.actions if isinstance(action, Start))
    return sum(map(len, snapshot.nodes.free_devices)) - started + sum(int(jobs.gpus[job]) for job in stopping)
