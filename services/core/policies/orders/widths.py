"""Narrower gangs: the sizes that an order may give them, and which of them may grow while it limits."""

import numpy as np

from services.core.cycle.capacity import powers_of_two
from services.core.cycle.plan import Plan, Start
from services.core.cycle.snapshot import RUNNING, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.orders import STOPS_AHEAD_S
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.batches import with_batches
from services.core.policies.orders.ahead import pays
from services.core.policies.orders.tables import OrderTables, in_zone
from services.core.policies.powerflow.watts import Idle, draw_of

FLEX = 0.25  #: The class of a job where neither its user nor its tenant names one


def flex_of(snapshot: Snapshot) -> Floats:
    """Return how much slower each job may become, as a share of its speed: (n_jobs,)."""
    return np.where(np.isnan(snapshot.jobs.flex), FLEX, snapshot.jobs.flex)


def narrower(snapshot: Snapshot, job: int, gpus: int) -> list[int]:
    """Return the sizes below ``gpus`` that a job may have, largest first: powers of two, and its smallest.

    None for gangs that need certain nodes, or whose layout is known: it belongs to one size.
    """
    jobs = snapshot.jobs
    least = jobs.min_gpus.item(job)
    if gpus <= least or jobs.ids[job] in snapshot.bound or jobs.ids[job] in snapshot.graphs:
        return []
    grid = powers_of_two(*(np.array([each]) for each in (least, gpus - 1, jobs.step_gpus.item(job))))[0]
    return sorted({least, *grid[grid > 0].tolist()}, reverse=True)


def narrowed(snapshot: Snapshot, start: Start, gpus: int) -> Start:
    """Return a start with the first of its devices alone, and the batch that belongs to them."""
    shares, left = list[NodeShare](), gpus
    for share in start.placement.shares:
        if left > 0:
            shares.append(NodeShare(share.node_id, share.devices[:left]))
            left -= len(share.devices)
    made = Start(start.job_id, Placement(tuple(shares)), Reason.GRID_ORDER)
    if start.batch_size is None:
        return made
    (found,) = with_batches(snapshot, Plan(snapshot.version, (made,))).actions
    assert isinstance(found, Start)
    return found


def without_growth(snapshot: Snapshot, tables: OrderTables) -> Snapshot:
    """Return the snapshot with flexible gangs held to their size where an order leaves no room for twice, or soon will.

    A policy would otherwise stop them to grow, only to see them start as narrow again.
    """
    jobs, flex = snapshot.jobs, flex_of(snapshot)
    most: Ints = jobs.max_gpus.copy()
    for order in snapshot.orders:
        if not order.bears:
            continue
        kept = pays(snapshot, np.arange(len(jobs)), order.falls_s - STOPS_AHEAD_S)
        scope = in_zone(snapshot, order.zone)
        draw = draw_of(scope, (), tables)
        places = tables.places(draw.jobs, draw.models)
        power_w = tables.stacked.at(places, draw.gpus[:, None], default=True)[1][:, 0, 0]
        drawn_w = float(power_w.sum()) + draw.stopping_w + Idle(scope, ()).draw_w()
        room_w, later_w = (each / order.ratio - drawn_w for each in (order.soon_w, order.falls_w))
        for row, job in enumerate(draw.jobs.tolist()):
            if jobs.phase.item(job) != RUNNING or not flex.item(job) or most.item(job) <= draw.gpus.item(row):
                continue
            if power_w.item(row) > (room_w if kept[job] else min(room_w, later_w)):
                most[job] = draw.gpus.item(row)
            else:
                room_w, later_w = room_w - power_w.item(row), later_w - power_w.item(row)
    if (most == jobs.max_gpus).all():
        return snapshot
    columns = {**vars(jobs), "max_gpus": most, "asked_gpus": np.minimum(jobs.asked_gpus, most)}
    return snapshot.again(jobs=type(jobs).of_columns(columns))
