"""One round: decide, then check. The live scheduler and the simulator both call this and nothing else."""

from dataclasses import dataclass, replace
from typing import Generic

from services.core.cycle.bound import show_bound, with_bound_reasons
from services.core.cycle.levels import show_within, with_within_reasons
from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.services import place_services
from services.core.cycle.sharing import with_guests_stops, without_guests, without_stops_of_guests
from services.core.cycle.slices import place_slices
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.validate import check_plan


@dataclass(frozen=True)
class CycleResult(Generic[Memory]):
    """A checked plan, and what the policy remembers of having made it. The two are saved together or not at all."""

    plan: Plan
    memory: Memory


def run_cycle(policy: Policy[Memory], snapshot: Snapshot, memory: Memory) -> CycleResult[Memory]:
    """Return the policy's plan for the snapshot, preceded by the actions for service instances and jobs on slices.

    Guests on shared devices are stopped with their hosts, and whenever the policy does not pack jobs.

    Raises:
        PlanError: the plan breaks an invariant of the cluster; nothing may be applied, and the old ``memory`` stays.
    """
    shown = without_guests(snapshot) if snapshot.shared else snapshot
    if snapshot.bound:
        shown = show_bound(shown)
    if snapshot.within:
        shown = show_within(shown)
    on_slices, shown = place_slices(shown) if shown.slice_jobs else ((), shown)
    first, shown = place_services(shown) if shown.services else ((), shown)
    plan, following = policy.decide(shown, memory)
    if snapshot.services or snapshot.slice_jobs:
        check_plan(shown, without_stops_of_guests(plan, shown.guests))
        plan = replace(plan, actions=(*on_slices, *first, *plan.actions))
    if snapshot.shared:
        plan = with_guests_stops(snapshot, plan, policy)
    if snapshot.bound:
        plan = with_bound_reasons(snapshot, plan)
    if snapshot.within and snapshot.reasons:
        plan = with_within_reasons(snapshot, plan)
    check_plan(snapshot, plan)
    return CycleResult(plan, following)
