"""The layer over every policy that lets its stops waste little: gangs have a guaranteed run, and stop when they save.

A policy decides as ever; what it stops for its own order before ``Snapshot.min_run_s`` of a gang's run are over goes
on, and is looked at again in the next active round. So no gang is stopped that would not be without the layer, and a
policy that remembers what it has tried, as GREEN does, tries the same. A gang whose job tells when it saves its work
(``Snapshot.saves``) is guaranteed a run until the first save is due: else one that saves less often than it is stopped
would never get on.

A gang that is stopped and will soon save its work, by when it last did and how often it does, goes on until then: at
most ``Snapshot.save_wait_s``, and a quarter more if it is late. It works meanwhile, so that the wait costs those that
get its GPUs time, and nobody work. Whoever carries out the plan ends the wait when the work is saved.

Stops for orders of the grid and for windows are not the policy's, and happen in time. While GPUs or watts are needed at
once (``urgent``), nothing waits, and what waits already is stopped (``Plan.hurries``). A waiting job that would miss
its deadline lifts the guarantee, too.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.policy import Layer, Memory, Policy, PowerLimited
from services.core.cycle.snapshot import QUEUED, RUNNING, Snapshot
from services.core.domain.ids import JobId
from services.core.domain.windows import GRACE_S

LATE = 0.25  #: By how much a gang may be late with its next save, as a share of the interval or of the longest wait


class Sparing(Layer[Memory]):
    """A policy that stops no gang before its guaranteed run is over, and gangs that tell when they save, then."""

    def __init__(self, policy: Policy[Memory], *, hurries: bool) -> None:
        super().__init__(policy)
        self._hurries = hurries

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return the policy's plan without the stops that come too soon, and its memory."""
        if self._hurries:
            snapshot = snapshot.again(save_wait_s=0.0)
        plan, following = self.inner.decide(snapshot, memory)
        kept = tuple(each for each in plan.actions if not (isinstance(each, Preempt) and _goes_on(snapshot, each)))
        plan = replace(plan, actions=kept)
        if snapshot.saves:
            actions = tuple(_waiting(snapshot, each) for each in plan.actions)
            plan = replace(plan, actions=actions, hurries=self._hurries)
        return plan, following


def urgent(snapshot: Snapshot, policy: Policy[Any]) -> bool:
    """Whether GPUs or watts are needed too soon for gangs to wait until they save.

    So it is under orders of the grid, before and in windows, for service instances, under a policy with a power limit,
    and if a waiting job would be late.
    """
    wait_s = snapshot.save_wait_s * (1 + LATE)
    grace_s = max([GRACE_S, *(each.grace_s for each in snapshot.endings.values())])
    return (
        bool(snapshot.orders or snapshot.services)
        or any(window.start_s - snapshot.now_s < wait_s + grace_s for window in snapshot.windows)
        or (isinstance(policy, PowerLimited) and math.isfinite(policy.power_limit_w(snapshot)))
        or _late(snapshot, wait_s)
    )


def _waiting(snapshot: Snapshot, action: Any) -> Any:
    """Return an action; the stop of a gang that will soon save, with how long it is waited for."""
    wait_s = _wait_s(snapshot, action.job_id) if isinstance(action, Preempt) else 0.0
    return replace(action, wait_s=wait_s) if wait_s else action


def _wait_s(snapshot: Snapshot, job_id: JobId) -> float:
    """Return for how long the stop of a gang should wait for its next save, seconds; 0: not at all."""
    jobs, saves = snapshot.jobs, snapshot.saves.get(job_id)
    if saves is None or (at := jobs.index.get(job_id)) is None or jobs.phase[at] != RUNNING:
        return 0.0
    left_s = max(saves.last_s, jobs.waiting_since_s.item(at)) + saves.every_s - snapshot.now_s
    late_s = LATE * min(saves.every_s, snapshot.save_wait_s)
    return left_s + late_s if -late_s < left_s <= snapshot.save_wait_s else 0.0


def _goes_on(snapshot: Snapshot, stop: Preempt) -> bool:
    """Whether a gang has run for less than it is guaranteed, and no job would be late if it and a round went on."""
    jobs = snapshot.jobs if snapshot.guests is None or stop.job_id in snapshot.jobs.index else snapshot.guests
    at, now_s, run_s = jobs.index[stop.job_id], snapshot.now_s, snapshot.min_run_s
    since_s, runs = jobs.waiting_since_s.item(at), jobs.phase[at] == RUNNING
    saves = snapshot.saves.get(stop.job_id)
    if runs and saves is not None and saves.last_s < since_s and not _wait_s(snapshot, stop.job_id):
        run_s = max(run_s, saves.every_s * (1 + LATE))
    left_s = since_s + run_s - now_s if runs else run_s
    round_s = 0.0 if math.isnan(snapshot.next_active_s) else max(snapshot.next_active_s - now_s, 0.0)
    return left_s > 0 and not _late(snapshot, left_s + round_s)


def _late(snapshot: Snapshot, wait_s: float) -> bool:
    """Whether a waiting job would be late if a stop came so much later."""
    jobs, now_s = snapshot.jobs, snapshot.now_s
    slack_s = jobs.deadline_s - now_s - np.nan_to_num(jobs.remaining_s)
    late = (jobs.phase == QUEUED) & (jobs.deadline_s > now_s) & (slack_s < wait_s)
    return bool(late.any())
