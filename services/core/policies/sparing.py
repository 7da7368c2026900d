"""The layer over every policy that gives each gang a guaranteed run: a stop soon after a start wastes both.

A policy decides as ever; what it stops for its own order before ``Snapshot.min_run_s`` of a gang's run are over goes
on, and is looked at again in the next active round. So no gang is stopped that would not be without the layer, and a
policy that remembers what it has tried, as GREEN does, tries the same. Stops for orders of the grid and for windows are
not the policy's, and happen in time.

A waiting job that would miss its deadline by waiting so long lifts the guarantee for the round.
"""

import math
from dataclasses import replace

import numpy as np

from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.policy import Layer, Memory
from services.core.cycle.snapshot import QUEUED, RUNNING, Snapshot


class Sparing(Layer[Memory]):
    """A policy that stops no gang before its guaranteed run is over."""

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return the policy's plan without the stops that come too soon, and its memory."""
        plan, following = self.inner.decide(snapshot, memory)
        if any(isinstance(each, Preempt) for each in plan.actions) and not _urgent(snapshot):
            kept = tuple(each for each in plan.actions if not (isinstance(each, Preempt) and _new(snapshot, each)))
            plan = replace(plan, actions=kept)
        return plan, following


def _new(snapshot: Snapshot, stop: Preempt) -> bool:
    """Whether a gang still starts, or has run for less than it is guaranteed."""
    jobs = snapshot.jobs if snapshot.guests is None or stop.job_id in snapshot.jobs.index else snapshot.guests
    at = jobs.index[stop.job_id]
    return jobs.phase[at] != RUNNING or snapshot.now_s - jobs.waiting_since_s.item(at) < snapshot.min_run_s


def _urgent(snapshot: Snapshot) -> bool:
    """Whether a waiting job would be late if a stop came a guaranteed run and a round later."""
    jobs, now_s = snapshot.jobs, snapshot.now_s
    round_s = 0.0 if math.isnan(snapshot.next_active_s) else max(snapshot.next_active_s - now_s, 0.0)
    slack_s = jobs.deadline_s - now_s - np.nan_to_num(jobs.remaining_s)
    late = (jobs.phase == QUEUED) & (jobs.deadline_s > now_s) & (slack_s < snapshot.min_run_s + round_s)
    return bool(late.any())
