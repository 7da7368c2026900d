"""The models of what gangs draw, corrected by what meters read while an order is in force."""

from collections.abc import Mapping
from dataclasses import replace

from services.core.cycle.snapshot import Snapshot
from services.core.policies.orders.tables import OrderTables, in_zone
from services.core.policies.powerflow.watts import correction

MOST_FALL = 0.02  #: In one look: meters that are silent for a moment, as an agent is started again, free no watts
LEAST_RISE, LEAST_FALL = 0.002, 0.01
"""Smaller changes of the ratio are ignored: limits would be set again and again for nothing but noise."""


def with_ratios(snapshot: Snapshot, known: Mapping[str, float]) -> tuple[Snapshot, Mapping[str, float]]:
    """Return the snapshot with each order's ratio of measured to modelled draw, and these ratios by order.

    ``known``: the ratios of the last round; an order that has none there keeps its own.
    """
    if not any(order.bears for order in snapshot.orders):
        return snapshot, {}
    tables = OrderTables.of_round(snapshot)
    ratios: dict[str, float] = {}
    for order in snapshot.orders:
        ratio = before = known.get(order.id, order.ratio)
        if order.bears:
            scope = in_zone(snapshot, order.zone).again(measured_w=order.measured_w)
            ratio = correction(scope, tables, before, measuring=bool(snapshot.measuring))
            ratio = max(ratio, before * (1 - MOST_FALL))
        noise = before * (1 - LEAST_FALL) <= ratio <= before * (1 + LEAST_RISE)
        ratios[order.id] = before if noise else ratio
    return snapshot.again(orders=tuple(replace(each, ratio=ratios[each.id]) for each in snapshot.orders)), ratios
