"""The grid's orders as a round sees them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.orders import STOPS_AHEAD_S, PowerOrder, order_at, standing
from services.scheduler.grid.orders import curve
from services.scheduler.planning.cluster import Cluster, drawn_w, kind_of
from services.scheduler.planning.job_table import held_w
from services.scheduler.repository.orders import OrderRow


def power_orders(
    rows: Sequence[OrderRow],
    cluster: Cluster,
    zones: Sequence[str],
    held: Mapping[str, set[int]],
    now_s: float,
    asleep_w: float,
    limit_w: float | None,
    *,
    at_rest: bool,
) -> tuple[PowerOrder, ...]:
    """Return the orders that bear on a round; those for a zone without nodes do not.

    Args:
        zones: As ``Snapshot.outlooks``.
        held: The devices that no policy sees, by node; what they draw cannot be changed.
        asleep_w: What nodes that are off or booting draw.
        limit_w: What the cluster may draw at any time; None: anything.
        at_rest: Whether the last changes are in force, so that the measured power can be used.
    """
    found: list[PowerOrder] = []

    def seen(scope: Cluster, beside_w: float) -> dict[str, float]:
        other_w = held_w(scope, held) + beside_w
        return {"other_w": other_w, "measured_w": drawn_w(scope) - other_w + beside_w if at_rest else math.nan}

    if limit_w is not None:
        found.append(standing(limit_w, **seen(cluster, asleep_w)))
    for row in rows:
        if row.zone is not None and row.zone not in zones:
            continue
        limits = curve(row)
        if limits is None:
            prepares_s = row.start_at.timestamp() - max(row.notice_s, STOPS_AHEAD_S)
            again_s = prepares_s if prepares_s > now_s else math.inf
            found.append(PowerOrder(row.id, -1, math.inf, math.inf, again_s, row.end_at.timestamp()))
            continue
        scope, beside_w = cluster, asleep_w
        if row.zone is not None:
            nodes = [node for node in cluster.nodes if node.zone == row.zone]
            ids = {node.id for node in nodes}
            hosts_w = {node: watts for node, watts in cluster.hosts_w.items() if node in ids}
            scope, beside_w = replace(cluster, nodes=nodes, hosts_w=hosts_w), 0.0
        zone = -1 if row.zone is None else zones.index(row.zone)
        found.append(order_at(row.id, zone, limits, now_s, **seen(scope, beside_w)))
    return tuple(found)


def limit_range_w(cluster: Cluster) -> Floats:
    """Return the lowest and the default power limit of each kind of node, NaN if a device does not say: (n, 2)."""
    found = np.full((len(cluster.kinds), 2), np.nan)
    for at, kind in enumerate(cluster.kinds):
        devices = [device for node in cluster.nodes if kind_of(node) == kind for device in node.devices]
        lowest = [device.get("lowest_limit_w") for device in devices]
        highest = [device.get("power_limit_w") for device in devices]
        if None not in lowest and None not in highest and devices:
            found[at] = max(filter(None, lowest), default=np.nan), min(filter(None, highest), default=np.nan)
    return found
