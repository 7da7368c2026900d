"""One round: decide, then check. The live scheduler and the simulator both call this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.services import place_services
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.validate import check_plan


@dataclass(frozen=True)
class CycleResult(Generic[Memory]):
    """A checked plan, and what the policy remembers of having made it. The two are saved together or not at all."""

    plan: Plan
    memory: Memory


def run_cycle(policy: Policy[Memory], snapshot: Snapshot, memory: Memory) -> CycleResult[Memory]:
    """Return the policy's plan for the snapshot, after the starts and stops that service instances need.

    Raises:
        PlanError: the plan breaks an invariant of the cluster; nothing may be applied, and ``memory`` stays the old
        one.
    """
    if not snapshot.services:
        plan, following = policy.decide(snapshot, memory)
    else:
        first, shown = place_services(snapshot)
        plan, following = policy.decide(shown, memory)
        check_plan(shown, plan)
        plan = replace(plan, actions=(*first, *plan.actions))
    check_plan(snapshot, plan)
    return CycleResult(plan, following)
