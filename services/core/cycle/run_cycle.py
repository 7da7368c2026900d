"""One round: decide, then check. The live scheduler and the simulator both call this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.services import place_services
from services.core.cycle.slices import place_slices
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.validate import check_plan


@dataclass(frozen=True)
class CycleResult(Generic[Memory]):
    """A checked plan, and what the policy remembers of having made it. The two are saved together or not at all."""

    plan: Plan
    memory: Memory


def run_cycle(policy: Policy[Memory], snapshot: Snapshot, memory: Memory) -> CycleResult[Memory]:
    """Return the policy's plan for the snapshot, after the starts and stops of service instances and jobs on slices.

    Raises:
        PlanError: the plan breaks an invariant of the cluster; nothing may be applied, and ``memory`` stays the old
        one.
    """
    if not snapshot.services and not snapshot.slice_jobs:
        plan, following = policy.decide(snapshot, memory)
    else:
        on_slices, shown = place_slices(snapshot) if snapshot.slice_jobs else ((), snapshot)
        first, shown = place_services(shown) if shown.services else ((), shown)
        plan, following = policy.decide(shown, memory)
        check_plan(shown, plan)
        plan = replace(plan, actions=(*on_slices, *first, *plan.actions))
    check_plan(snapshot, plan)
    return CycleResult(plan, following)
