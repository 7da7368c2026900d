"""What a policy may ask for: a tuple of actions, each with a reason an operator can read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.core.domain.ids import JobId
from services.core.domain.placement import Placement


class Reason(StrEnum):
    """Why a job starts, stops or waits. The codes are part of the public API: they are added to, never renamed."""

    # starts
    IN_ORDER = "in_order"
    """First in the policy's order, and its gang fits."""
    # stops
    OUTRANKED = "outranked"
    """Jobs ahead of it in the policy's order need its GPUs."""
    SCALE_OUT = "scale_out"
    """It restarts on more GPUs: it uses their energy well."""
    SCALE_IN = "scale_in"
    """It restarts on fewer GPUs."""
    # waits
    NOT_ENOUGH_FREE_GPUS = "not_enough_free_gpus"
    """Jobs ahead of it hold or take every GPU it could use."""
    WAITING_FOR_RELEASE = "waiting_for_release"
    """Its GPUs are being released by jobs that are stopping."""
    WAITING_FOR_ROUND = "waiting_for_round"
    """It is placed at the next active round."""
    NO_ELIGIBLE_NODE = "no_eligible_node"
    """No node of the cluster has the GPUs it asks for."""
    TENANT_QUOTA = "tenant_quota"
    """Its tenant holds as many GPUs as it may."""
    GREENER_HOURS = "greener_hours"
    """The policy keeps it for hours of lower carbon intensity."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a gang, whole, on exactly these devices."""

    job_id: JobId
    placement: Placement
    reason: Reason

    @property
    def gpus(self) -> int:
        """Size of the gang."""
        return self.placement.gpus


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a gang with its grace; the job waits again. ``next_gpus`` is its size when it comes back."""

    job_id: JobId
    reason: Reason
    next_gpus: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Leave a job waiting, and say why."""

    job_id: JobId
    reason: Reason
    expected_start_s: float | None = None


Action = Start | Preempt | Hold


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one snapshot. Jobs without an action go on as they are."""

    snapshot_version: int
    actions: tuple[Action, ...]
