"""When a fleet is planned. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from services.contracts.apps import FleetPlanState, FleetPlanTrigger
from services.serving.fleets.assignment import Gpu

INTENSITY_PCT = 5.0  #: Change of the carbon intensity after which a fleet is planned anew (Clover, section 4.2)
LEAST_ANSWERS = 20  #: Fewer answers say nothing about latency or accuracy
SHORT_S = 600.0  #: How long an application is served as a plan could do it that found no way to keep its limits


@dataclass(frozen=True)
class Basis:
    """What a plan was made from."""

    revisions: Mapping[str, int]  #: Revisions of its applications by name, and of the fleet under the empty name
    gpus: Sequence[Gpu]  #: The GPUs that were up
    ordered: bool = False
    """Whether an order of the grid was in force in the fleet's zone; releases up to 0.1 did not say it."""

    def is_same(self, other: Basis) -> bool:
        """Return whether nothing has changed; the order of GPUs does not matter."""
        return self.revisions == other.revisions and set(self.gpus) == set(other.gpus)

    def lacks_only_applications(self, other: Basis) -> bool:
        """Return whether applications were added since, and nothing else has changed."""
        known = {name: revision for name, revision in other.revisions.items() if name in self.revisions}
        return (
            len(other.revisions) > len(known) == len(self.revisions)
            and self.revisions == known
            and set(self.gpus) == set(other.gpus)
        )


@dataclass(frozen=True)
class LastPlan:
    """A fleet's newest plan."""

    trigger: FleetPlanTrigger
    state: FleetPlanState
    basis: Basis
    gco2_per_kwh: float
    made_at: datetime

    @property
    def short(self) -> Sequence[str]:
        """The applications whose limits it could not keep."""
        return ()


@dataclass(frozen=True)
class Service:
    """How an application was served since its instances last changed."""

    answered: int  #: How many answers were counted
    p95_ms: float | None  #: The 95th percentile of their latency; None without any
    accuracy_pct: float | None  #: Their mean accuracy
    sla_p95_ms: float  #: The SLA
    floor_pct: float | None  #: The accuracy floor; None if there is none

    @property
    def is_late(self) -> bool:
        """Whether the SLA is broken."""
        return self.answered >= LEAST_ANSWERS and self.p95_ms is not None and self.p95_ms > self.sla_p95_ms

    @property
    def is_inaccurate(self) -> bool:
        """Whether the accuracy floor is broken."""
        if self.answered < LEAST_ANSWERS or self.accuracy_pct is None or self.floor_pct is None:
            return False
        return self.accuracy_pct < self.floor_pct - 1e-9


@dataclass(frozen=True)
class Present:
    """What a plan made now would be based on."""

    now_s: float  #: UTC seconds
    basis: Basis  #: Revisions and GPUs
    gco2_per_kwh: float | None  #: Intensity; None while it is unknown
    served: Mapping[str, Service]  #: How each application was served
    min_interval_s: float  #: Least time between two plans
    retry_s: float = 0.0  #: When a plan may be tried again after one that failed, UTC seconds


def trigger_of(last: LastPlan | None, present: Present) -> FleetPlanTrigger | None:
    """Return why a fleet should be planned now; None if it should not, or not yet."""
    if last is None:
        return FleetPlanTrigger.FIRST
    begins = present.basis.ordered and not last.basis.ordered  # it is to be met within seconds
    wait_s = 0.0 if begins else present.min_interval_s
    is_changed = last.basis.revisions != present.basis.revisions  # and does not wait for what others' changes met
    if present.now_s < max(last.made_at.timestamp() + wait_s, 0.0 if is_changed else present.retry_s):
        return None
    if set(last.basis.gpus) != set(present.basis.gpus):
        return FleetPlanTrigger.GPUS
    if is_changed:
        return FleetPlanTrigger.PARAMETER
    if last.basis.ordered != present.basis.ordered:
        return FleetPlanTrigger.GRID_ORDER
    if last.state in (FleetPlanState.FAILED, FleetPlanState.SUPERSEDED):
        return last.trigger
    known = last.short if present.now_s < last.made_at.timestamp() + SHORT_S else ()
    served = [each for name, each in present.served.items() if name not in known]
    if any(each.is_late for each in served):
        return FleetPlanTrigger.SLA
    if any(each.is_inaccurate for each in served):
        return FleetPlanTrigger.ACCURACY
    if present.gco2_per_kwh is not None and abs(present.gco2_per_kwh - last.gco2_per_kwh) > INTENSITY_PCT / 100 * abs(
        last.gco2_per_kwh
    ):
        return FleetPlanTrigger.INTENSITY
    return None
