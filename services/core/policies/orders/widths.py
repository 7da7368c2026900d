"""What gangs can give up for an order: narrower sizes, growth, and the work that a stop known in advance would lose."""

import numpy as np

from services.core.cycle.capacity import powers_of_two
from services.core.cycle.plan import Plan, Start
from services.core.cycle.runs import LATE
from services.core.cycle.snapshot import RUNNING, Saves, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.orders import STOPS_AHEAD_S
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.batches import with_batches
from services.core.policies.orders.tables import OrderTables, in_zone
from services.core.policies.powerflow.watts import Idle, draw_of
from services.core.policies.windows import SHORTEST_S

FLEX = 0.25  #: The class of a job where neither its user nor its tenant names one

NEVER = Saves(np.nan, np.nan)


def saves_of(snapshot: Snapshot, which: Ints) -> tuple[Floats, Floats]:
    """Return when jobs last saved or else began, UTC seconds, and their interval, NaN where they do not tell: (n,)."""
    jobs: list[int] = which.tolist()
    found = [snapshot.saves.get(snapshot.jobs.ids[job], NEVER) for job in jobs]
    last_s, every_s = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return np.maximum(last_s, snapshot.jobs.waiting_since_s[which]), every_s


def unsaved_s(snapshot: Snapshot, which: Ints, at_s: float) -> Floats:
    """Return how long before a time gangs save last: (n,) seconds, 0 for those that do not tell."""
    last_s, every_s = saves_of(snapshot, which)
    since_s = at_s - last_s
    return np.nan_to_num(np.where((every_s > 0) & (at_s > snapshot.now_s), since_s % every_s, since_s))


def pays(snapshot: Snapshot, which: Ints, until_s: float) -> Bools:
    """Return which jobs it pays to start now if they are stopped then: they have saved their work once: (n,)."""
    every_s = np.nan_to_num(saves_of(snapshot, which)[1])
    return until_s - snapshot.now_s >= np.maximum(every_s * (1 + LATE), SHORTEST_S)


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
