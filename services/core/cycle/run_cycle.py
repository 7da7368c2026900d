"""One round: decide, then check. The live scheduler and the simulator both call this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.validate import check_plan


@dataclass(frozen=True)
class CycleResult(Generic[Memory]):
    """A checked plan, and what the policy remembers of having made it. The two are saved together or not at all."""

    plan: Plan
    memory: Memory


def run_cycle(policy: Policy[Memory], snapshot: Snapshot, memory: Memory) -> CycleResult[Memory]:
    """Return the policy's plan for the snapshot.

    Raises:
        PlanError: the plan breaks an invariant of the cluster; nothing may be applied, and ``memory`` stays the old
        one.
    """
    plan, following = policy.decide(snapshot, memory)
    check_plan(snapshot, plan)
    return CycleResult(plan, following)
