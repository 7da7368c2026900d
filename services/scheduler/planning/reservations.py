"""Reservations as a round sees them."""

import math

from services.core.domain.ids import NodeId
from services.core.domain.windows import Ending, Window
from services.scheduler.repository.reservations import EndingRow, ReservationRow


def window_of(row: ReservationRow) -> Window:
    """Return a reservation."""
    gpus = {NodeId(node_id): count for node_id, count in row.gpus.items()}
    return Window(row.id, row.start_at.timestamp(), row.end_at.timestamp(), gpus, row.tenant_id)


def ending_of(row: EndingRow, now_s: float) -> Ending:
    """Return how a job's gang ends; one that does not run yet has its whole time limit ahead."""
    since_s = now_s if row.running_s is None else row.running_s
    left_s = math.inf if row.limit_s is None else since_s + row.limit_s + row.grace_s - now_s
    return Ending(left_s, row.grace_s)
