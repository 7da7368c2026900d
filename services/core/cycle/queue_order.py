"""The order in which jobs wait, read off a round's plan.

``reconcile`` fills free devices in rank order: the gangs it starts come first, and those it leaves waiting follow in
rank order, ahead of the jobs that the policy did not rank at all. So when GPUs become free, the first job in this order
that fits is the next to start, as long as the policy's ranking stays the same.
"""

from dataclasses import dataclass

from services.core.cycle.plan import Hold, Plan, Start
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason

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
