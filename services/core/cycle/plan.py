"""What a policy may ask for: a tuple of actions, each with a reason that an operator can read.

A round's plan also tells the order in which jobs wait (``queue_order``): ``reconcile`` fills free devices in rank
order, so the gangs it starts come first, and those it leaves waiting follow in rank order, ahead of the jobs that the
policy did not rank at all. When GPUs become free, the first in this order that fits starts next, as long as the
ranking stays the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason


@dataclass(frozen=True, slots=True)
class Start:
    """Start a gang, whole, on exactly these devices.

    ``batch_size``: the total batch that the policy chose for it, samples; None: the user's own.
    ``shares``: whether it shares its one device with the gang running there instead of taking a free one; both must
    permit it.
    """

    job_id: JobId
    placement: Placement
    reason: Reason
    batch_size: int | None = None
    shares: bool = False

    @property
    def gpus(self) -> int:
        return self.placement.gpus


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a gang with its grace period; the job waits again. ``next_gpus`` is its size when it restarts.

    ``wait_s``: it goes on until it next says that it has saved its work, for so long at most. ``to``: the tenant that
    has its GPUs back, to which they are guaranteed.
    """

    job_id: JobId
    reason: Reason
    next_gpus: int
    wait_s: float = 0.0
    to: str = ""


class Hold(NamedTuple):
    """Leave a job waiting, and say why. A named tuple, which takes half as long to make as a dataclass.

    A round may make a hundred thousand. ``expected_start_s``: when the policy will let it start if its GPUs are free by
    then; UTC seconds, None if unknown.
    """

    job_id: JobId
    reason: Reason
    expected_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class SetControl:
    """Set a control of each GPU of a gang; None restores the default, at which a gang begins."""

    job_id: JobId
    kind: ControlKind
    value: float | None  #: Watts, or whole MHz
    reason: Reason


@dataclass(frozen=True, slots=True)
class ProfileControls:
    """Run a gang for ``window_s`` at each value its devices take, from the highest down; then return to the default.

    Nothing else is stopped for this: the gang continues to work, but slower. Later snapshots show the curve.
    """

    job_id: JobId
    kind: ControlKind
    window_s: float
    reason: Reason = Reason.PROFILING


Control = SetControl | ProfileControls
Action = Start | Preempt | Hold | Control
ACTION_NAMES: dict[type, str] = {Start: "start", Preempt: "preempt", Hold: "hold", ProfileControls: "profile_settings"}


def name_of(action: Action) -> str:
    """Return what records and the public API call an action."""
    return f"set_{action.kind.value}" if isinstance(action, SetControl) else ACTION_NAMES[type(action)]


def set_to(job_id: JobId, kind: ControlKind, value: float | None, reason: Reason) -> SetControl:
    """Return the action that sets a control; clocks are rounded."""
    return SetControl(job_id, kind, value if value is None or kind is not ControlKind.CLOCK else round(value), reason)


@dataclass(frozen=True, slots=True)
class PowerNode:
    """Power down an unused node, or wake it. A gang that starts on a sleeping node wakes it."""

    node_id: NodeId
    on: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one snapshot. Jobs and nodes without an action stay as they are.

    ``look_again_s``: when the policy wants to be asked again even if nothing changes by then; UTC seconds.
    ``hurries``: whether gangs that were stopped and are waited for (``Preempt.wait_s``) are to stop now.
    """

    snapshot_version: int
    actions: tuple[Action, ...]
    nodes: tuple[PowerNode, ...] = ()
    look_again_s: float | None = None
    hurries: bool = False


UNRANKED = frozenset({Reason.GREENER_HOURS, Reason.SHORTER_FIRST})
"""Why jobs wait that a policy leaves out of its ranking for now."""


@dataclass(frozen=True)
class QueueOrder:
    """The jobs that wait."""

    ranked: tuple[JobId, ...]  #: Best first; includes the jobs that the round would start
    unranked: tuple[JobId, ...]  #: Those that the policy does not want to start yet, whatever is free

    def ahead_of(self, job_id: JobId) -> tuple[JobId, ...] | None:
        """Return the jobs that come before the given one; None if it is not ranked."""
        try:
            return self.ranked[: self.ranked.index(job_id)]
        except ValueError:
            return None


def queue_order(plan: Plan) -> QueueOrder:
    """Return the order of the waiting jobs in a plan that was made with reasons."""
    ranked: list[JobId] = [action.job_id for action in plan.actions if isinstance(action, Start)]
    unranked: list[JobId] = []
    for action in plan.actions:
        if isinstance(action, Hold):
            (unranked if action.reason in UNRANKED else ranked).append(action.job_id)
    return QueueOrder(tuple(ranked), tuple(unranked))
