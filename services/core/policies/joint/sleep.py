"""Powering down nodes that nobody has used for a while."""

from collections.abc import Mapping

import numpy as np

from services.core.cycle.plan import Plan, PowerNode, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.ids import NodeId
from services.core.domain.reasons import Reason


def sleeping(
    snapshot: Snapshot, plan: Plan, empty_since_s: Mapping[NodeId, float], after_s: float
) -> tuple[tuple[PowerNode, ...], dict[NodeId, float]]:
    """Return which nodes to power down, and since when the other unused ones have been empty.

    Args:
        empty_since_s: What this function last returned, UTC seconds.
        after_s: How long a node stays empty before it is powered down.
    """
    nodes = snapshot.nodes
    used = {share.node_id for action in plan.actions if isinstance(action, Start) for share in action.placement.shares}
    empty = np.flatnonzero(nodes.may_sleep & ~nodes.asleep & (nodes.free_gpus == nodes.gpus)).tolist()
    unused = [node for node in map(nodes.ids.__getitem__, empty) if node not in used]
    since_s = {node: empty_since_s.get(node, snapshot.now_s) for node in unused}
    due = [node for node, at_s in since_s.items() if snapshot.now_s - at_s >= after_s]
    for node in due:
        del since_s[node]
    return tuple(PowerNode(node, False, Reason.UNUSED) for node in due), since_s
