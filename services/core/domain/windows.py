"""Capacity over time: GPUs that are reserved for a tenant, and nodes that are taken out for maintenance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.core.domain.ids import NodeId

GRACE_S = 120.0  #: How long a gang has to write its checkpoint, where its user does not say


@dataclass(frozen=True)
class Window:
    """A time for which GPUs are taken."""

    id: str
    start_s: float  #: UTC seconds
    end_s: float  #: UTC seconds
    gpus: Mapping[NodeId, int]  #: How many GPUs of each node
    holder: str | None  #: The tenant whose jobs get them; None for maintenance, in which nothing runs there


class Ending(NamedTuple):
    """What is known of how a gang ends."""

    left_s: float  #: How much longer its run, or its next one, may take, with its grace period; inf: without limit
    grace_s: float = GRACE_S


def most_taken(windows: Iterable[Window], node_id: NodeId, start_s: float, end_s: float) -> int:
    """Return how many GPUs of a node windows take at once within ``[start_s, end_s)``, at most."""
    here = [each for each in windows if node_id in each.gpus and each.start_s < end_s and each.end_s > start_s]
    times_s = {max(each.start_s, start_s) for each in here}
    return max(
        (sum(each.gpus[node_id] for each in here if each.start_s <= at < each.end_s) for at in times_s), default=0
    )
