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
once (``urgent``), nothing waits, and what waits already is stopped (``Plan.hurries``). If it is for an order alone,
which needs watts and no GPUs, a gang that has not just saved goes on under the order's limits, so that the policy does
not undo its work. A waiting job that would miss its deadline lifts the guarantee, too.
"""

import math
from dataclasses import replace
from typing import Any

from services.core.cycle.plan import Hold, Plan, Preempt
from services.core.cycle.policy import Layer, Memory, Policy, PowerLimited
from services.core.cycle.rounds import stopping
from services.core.cycle.runs import LATE, goes_on, is_late, save_wait_s
from services.core.cycle.snapshot import RUNNING, Snapshot
from services.core.domain.reasons import Reason
from services.core.domain.windows import GRACE_S

JUST = 0.05  #: How long a gang has just saved, as a share of the interval


class Sparing(Layer[Memory]):
    """A policy that stops no gang before its guaranteed run is over, and gangs that tell when they save, then."""

    def __init__(self, policy: Policy[Memory], *, hurries: bool) -> None:
        super().__init__(policy)
        self._hurries = hurries

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return the policy's plan without the stops that come too soon, and its memory."""
        by_orders = self._hurries and not urgent(snapshot.again(orders=()), self.inner)
        if self._hurries:
            snapshot = snapshot.again(save_wait_s=0.0)
        plan, following = self.inner.decide(snapshot, memory)
        kept = tuple(
            each
            for each in plan.actions
            if not (
                isinstance(each, Preempt)
                and (goes_on(snapshot, each.job_id) or (by_orders and _unsaved(snapshot, each)))
            )
        )
        if len(kept) < len(plan.actions) and not any(isinstance(each, Preempt) for each in kept):
            kept = tuple(map(_next_round, kept)) if not stopping(snapshot).size else kept
        plan = replace(plan, actions=kept)
        if snapshot.saves:
            actions = tuple(_waiting(snapshot, each) for each in plan.actions)
            plan = replace(plan, actions=actions, hurries=self._hurries)
        return plan, following


def urgent(snapshot: Snapshot, policy: Policy[Any]) -> bool:
    """Whether GPUs or watts are needed too soon for gangs to wait until they save.

    So it is shortly before and under orders of the grid, before and in windows, for service instances, under a
    policy with a power limit, and if a waiting job would be late.
    """
    wait_s = snapshot.save_wait_s * (1 + LATE)
    grace_s = max([GRACE_S, *(each.grace_s for each in snapshot.endings.values())])
    return (
        bool(snapshot.services)
        or any(each.limits or each.falls_s - snapshot.now_s < wait_s + grace_s for each in snapshot.orders)
        or any(window.start_s - snapshot.now_s < wait_s + grace_s for window in snapshot.windows)
        or (isinstance(policy, PowerLimited) and math.isfinite(policy.power_limit_w(snapshot)))
        or is_late(snapshot, wait_s)
    )


def _next_round(action: Any) -> Any:
    """Return an action; the wait for gangs that go on after all lasts until the next active round."""
    released = isinstance(action, Hold) and action.reason is Reason.WAITING_FOR_RELEASE
    return action._replace(reason=Reason.WAITING_FOR_ROUND) if released else action


def _waiting(snapshot: Snapshot, action: Any) -> Any:
    """Return an action; the stop of a gang that will soon save, with how long it is waited for."""
    wait_s = save_wait_s(snapshot, action.job_id) if isinstance(action, Preempt) else 0.0
    return replace(action, wait_s=wait_s) if wait_s else action


def _unsaved(snapshot: Snapshot, stop: Preempt) -> bool:
    """Whether a running gang tells when it saves, and has not just done so."""
    jobs, saves = snapshot.jobs, snapshot.saves.get(stop.job_id)
    if saves is None or (at := jobs.index.get(stop.job_id)) is None or jobs.phase[at] != RUNNING:
        return False
    return snapshot.now_s - max(saves.last_s, jobs.waiting_since_s.item(at)) > JUST * saves.every_s
