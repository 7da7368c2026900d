"""What policies tell waiting jobs of their start: what they know, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Hold, Plan
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.domain.ids import JobId
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.mlfq import Green
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, held, hourly_curve
from tests.support.green import a_memory

HOUR_S = 3_600.0
CURVE = hourly_curve([300, 100, 300, 300], start_s=NOON_S)


def expected_h(plan: Plan) -> dict[str, float | None]:
    """Return when each waiting job is expected to start, hours after noon."""
    holds = [action for action in plan.actions if isinstance(action, Hold)]
    times_s = {hold.job_id: hold.expected_start_s for hold in holds}
    return {job_id: None if at_s is None else (at_s - NOON_S) / HOUR_S for job_id, at_s in times_s.items()}


@pytest.mark.parametrize(
    ("next_active_h", "starvation_h", "start_h"),
    [
        pytest.param(0.5, None, 6.0, id="the evening is green"),
        pytest.param(7.0, None, 7.0, id="only active rounds look"),
        pytest.param(np.nan, None, None, id="nobody knows when the next one is"),
        pytest.param(0.5, 4.0, 4.0, id="it starves before"),
    ],
)
@pytest.mark.parametrize("trigger", list(Trigger))
def test_green_tells_the_jobs_it_holds_when_it_lets_them_go(
    trigger: Trigger, next_active_h: float, starvation_h: float | None, start_h: float | None
) -> None:
    starvation_s = None if starvation_h is None else starvation_h * HOUR_S
    policy = Green(GreenConfig(slack_s=8 * HOUR_S, starvation_s=starvation_s))
    ran: dict[str, Any] = {"submitted_s": NOON_S - 2 * HOUR_S, "attained_gpu_s": 2 * HOUR_S, "progress": 0.5}
    job = a_job("a", waiting_since_s=NOON_S, **ran)
    memory = a_memory("a", lower="a", held="a")
    snapshot = a_snapshot([job], trigger=trigger, curve=hourly_curve([300] * 6 + [100] * 18, start_s=NOON_S))
    snapshot = replace(snapshot, next_active_s=NOON_S + next_active_h * HOUR_S)
    plan = run_cycle(policy, snapshot, memory).plan

    assert held(plan) == {"a": "greener_hours"}
    assert expected_h(plan) == {"a": start_h}


@pytest.mark.parametrize(("next_active_h", "start_h"), [(0.5, 0.5), (np.nan, None)])
def test_only_jobs_that_the_next_round_will_place_are_told_when_it_is(
    next_active_h: float, start_h: float | None
) -> None:
    jobs = [a_job("high"), a_job("low"), a_job("left out"), a_job("runs", gpus=1)]
    snapshot = a_snapshot(jobs, [a_node(gpus=1)], trigger=Trigger.PASSIVE)
    snapshot = replace(snapshot, next_active_s=NOON_S + next_active_h * HOUR_S)
    order = np.array([snapshot.jobs.index[JobId(name)] for name in ("high", "runs", "low")])
    plan = reconcile(snapshot, Ranking(order, np.ones(3, dtype=np.int64)), preemption=Preemption.LATER)

    assert held(plan) == {"high": "waiting_for_round", "low": "not_enough_free_gpus", "left out": "waiting_for_round"}
    assert expected_h(plan) == {"high": start_h, "low": None, "left out": None}
