"""The part of the cluster that an order is for."""

from collections.abc import Iterable
from itertools import compress

from services.core.cycle.plan import Action, Start
from services.core.cycle.snapshot import NodeTable, Snapshot


def in_zone(snapshot: Snapshot, zone: int) -> Snapshot:
    """Return the snapshot with the nodes of one grid alone, -1 for all; gangs count where their first rank is."""
    if zone < 0:
        return snapshot
    nodes = snapshot.nodes
    keep = nodes.zone == zone
    inside = NodeTable(
        ids=tuple(compress(nodes.ids, keep)),
        gpu_model=nodes.gpu_model[keep],
        gpus=nodes.gpus[keep],
        schedulable=nodes.schedulable[keep],
        free_devices=tuple(compress(nodes.free_devices, keep)),
        asleep=nodes.asleep[keep],
        may_sleep=nodes.may_sleep[keep],
        zone=nodes.zone[keep],
    )
    return snapshot.again(nodes=inside)


def within(scope: Snapshot, actions: Iterable[Action]) -> list[Action]:
    """Return the actions without the starts outside a scope."""
    nodes = scope.nodes.index
    return [each for each in actions if not isinstance(each, Start) or each.placement.shares[0].node_id in nodes]
