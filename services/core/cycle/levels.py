"""Levels of the network: a gang gets the narrowest domain that holds it, and stays in one if its user requires that.

A *level* is a kind of part of the cluster, such as a node, a rack or a block, and a *domain* is one such part. Domains
are nested: each level's lie within those of the next (``core.domain.topology``).

Placers ask ``rooms`` for the free devices of ever wider domains, the tightest of each level that hold the gang, so that
wide domains stay whole for wide gangs. A job that names a level in ``Snapshot.near`` is placed before those that name
none; it waits no longer than they do. One in ``Snapshot.within`` waits until one domain of its level holds it:
``run_cycle`` shows policies the sizes that a domain can hold, ``reconcile`` counts what it gets domain by domain
(``bound.NodeRoom``) and places it before others.

Nothing here is used while no level is known.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from services.core.cycle.capacity import left_free
from services.core.cycle.plan import Action, Hold, Plan, Start
from services.core.cycle.snapshot import PREEMPTING, QUEUED, JobTable, Snapshot
from services.core.domain.arrays import Bools, Ints
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.domain.topology import CLUSTER, NODE, Topology


def numbered(topology: Topology, nodes: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[tuple[str, ...], Ints]:
    """Return the levels of nodes, given by id and labels, and their domains as in ``NodeTable``."""
    levels, names = topology.of(nodes)
    numbers = [{each: at for at, each in enumerate(dict.fromkeys(column))} for column in zip(*names, strict=True)]
    rows = [[number[each] for number, each in zip(numbers, row, strict=True)] for row in names]
    return levels, np.array(rows, dtype=np.int64).reshape(len(nodes), len(levels))


def sums(domains: Ints, count: Ints) -> Ints:
    """Return how many of these devices, (n_nodes,), are in each domain of a level: (n_domains,)."""
    return np.bincount(domains, count, int(domains.max(initial=0)) + 1).astype(np.int64)


def holding(domains: Ints, count: Ints, gpus: int, level: int) -> Iterator[Bools]:
    """Yield the nodes of each domain of a level that holds a gang, the tightest first: (n_nodes,).

    Among equal ones, that of the tightest wider domain comes first.

    Args:
        domains: As ``NodeTable.domains``.
        count: (n_nodes,) devices that may be taken.
    """
    of = domains[:, level]
    room = sums(of, count)
    fits, first = np.flatnonzero(room >= gpus), np.zeros(room.size, dtype=np.int64)
    first[of[::-1]] = np.arange(of.size - 1, -1, -1)  # the first node of each domain
    while fits.size:
        best = fits[room[fits] == room[fits].min()]
        for wider in range(level + 1, domains.shape[1]) if best.size > 1 else ():
            around = sums(domains[:, wider], count)[domains[first[best], wider]]
            best = best[around == around.min()]
        domain = best[first[best].argmin()]
        yield of == domain
        fits = fits[fits != domain]


def rooms(
    snapshot: Snapshot, job: int, gpus: int, gpu_model: int, count: Ints, *, narrows: bool = True
) -> Iterator[tuple[int, Ints]]:
    """Yield the free devices of one GPU model that a gang may be placed on, (n_nodes,), those to try first first.

    Before each is the level of the domain that they are in, the number of levels for the whole cluster.

    Args:
        count: (n_nodes,) free devices of any model.
        narrows: Whether it is to get the narrowest domain that holds it, whatever its user says.
    """
    if len(snapshot.gpu_models) > 1:
        count = np.where(snapshot.nodes.gpu_model == gpu_model, count, 0)
    within = near = None
    if snapshot.levels:
        job_id, domains = snapshot.jobs.ids[job], snapshot.nodes.domains
        within, near = snapshot.within.get(job_id), snapshot.near.get(job_id)
        if job_id in snapshot.bound:
            within = None
        widest = len(snapshot.levels) if within is None else within
        for level in range(widest) if narrows else [near] if near is not None and near < widest else []:
            if (nodes := next(holding(domains, count, gpus, level), None)) is not None:
                yield level, np.where(nodes, count, 0)
        if within is not None:
            yield from ((within, np.where(nodes, count, 0)) for nodes in holding(domains, count, gpus, within))
    if within is None:
        yield len(snapshot.levels), count


class LevelRoom(NamedTuple):
    """A level of the network, and the gangs that its domains hold; a gang has GPUs of one kind."""

    level: str  #: Its name, ``CLUSTER`` for all nodes together
    domains: int
    gpus: int  #: The largest gang that a domain could ever hold
    free: int  #: The largest one that could start now


def level_rooms(snapshot: Snapshot) -> list[LevelRoom]:
    """Return what each level has room for, single nodes first and the whole cluster last: how fragmented it is."""
    nodes, found = snapshot.nodes, list[LevelRoom]()
    levels = snapshot.levels or (NODE,)
    for at, level in enumerate((*levels, CLUSTER)):
        of = nodes.domains[:, at] if at < len(snapshot.levels) else np.arange(len(nodes)) * (level != CLUSTER)
        kinds = of * len(snapshot.gpu_models) + nodes.gpu_model
        gpus, free = (int(sums(kinds, np.where(nodes.schedulable, each, 0)).max(initial=0))
                      for each in (nodes.gpus, nodes.free_gpus))  # fmt: skip
        found.append(LevelRoom(level, len(set(of.tolist())), gpus, free))
    return found


def turn(snapshot: Snapshot, job: int) -> int:
    """Return when a gang is placed among those that start: the confined first, then those that prefer a level."""
    job_id = snapshot.jobs.ids[job]
    return 0 if job_id in snapshot.within else 1 if job_id in snapshot.near else 2


def show_within(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with gangs that must lie within a domain restricted to what one can hold.

    A gang that may have several sizes gets none that a domain could not hold now if all were stopped that may be.
    """
    jobs, nodes = snapshot.jobs, snapshot.nodes
    high, eligible = jobs.max_gpus.copy(), jobs.eligible.copy()
    open_to = np.where(nodes.schedulable, nodes.gpus, 0)
    stays = open_to.copy()
    for job in np.flatnonzero((jobs.gpus > 0) & ~jobs.preemptible & (jobs.phase != PREEMPTING)).tolist():
        for node, devices in snapshot.held_by(job):
            stays[node] -= len(devices)
    by_level = defaultdict[int, list[JobId]](list)
    for job_id, level in within_of(snapshot).items():
        if job_id not in snapshot.bound:
            by_level[level].append(job_id)
    for level, job_ids in by_level.items():
        rows = np.array([jobs.index[each] for each in job_ids], dtype=np.int64)
        largest, now = np.zeros((2, len(snapshot.gpu_models)), dtype=np.int64)
        for model in range(largest.size) if level >= 0 else ():
            of, its = nodes.domains[:, level], nodes.gpu_model == model
            largest[model] = sums(of, np.where(its, open_to, 0)).max(initial=0)
            now[model] = sums(of, np.where(its, np.maximum(stays, 0), 0)).max(initial=0)
        low, step, held = jobs.min_gpus[rows], jobs.step_gpus[rows], jobs.gpus[rows]
        holds = eligible[rows] & (largest >= low[:, None])
        waits = (jobs.phase[rows] == QUEUED) | (jobs.phase[rows] == PREEMPTING)
        eligible[rows] = np.where(waits[:, None], holds, eligible[rows])
        most = np.minimum(high[rows], np.where(holds, now, 0).max(axis=1, initial=0))
        high[rows] = np.minimum(high[rows], np.maximum(low + np.maximum(most - low, 0) // step * step, held))
    return snapshot.again(jobs=JobTable.of_columns({**jobs.__dict__, "max_gpus": high, "eligible": eligible}))


def within_of(snapshot: Snapshot) -> dict[JobId, int]:
    """Return ``Snapshot.within`` of the jobs in the table; a simulation's has those of all its jobs."""
    within, index = snapshot.within, snapshot.jobs.index
    if len(within) <= len(index):
        return {each: level for each, level in within.items() if each in index}
    return {each: within[each] for each in index if each in within}


def with_within_reasons(snapshot: Snapshot, plan: Plan) -> Plan:
    """Return the plan, giving gangs that wait for a domain, rather than for enough GPUs anywhere, that reason."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    room = left_free(snapshot, plan.actions)
    most = np.bincount(nodes.gpu_model, nodes.gpus, len(snapshot.gpu_models))

    def explained(action: Action) -> Action:
        if not isinstance(action, Hold) or action.job_id not in snapshot.within or action.job_id in snapshot.bound:
            return action
        job = jobs.index[action.job_id]
        if action.reason is Reason.NO_ELIGIBLE_NODE and (most[jobs.eligible[job]] >= jobs.min_gpus[job]).any():
            return Hold(action.job_id, Reason.NO_SUCH_DOMAIN)
        if action.reason is Reason.NOT_ENOUGH_FREE_GPUS and (room[jobs.eligible[job]] >= jobs.min_gpus[job]).any():
            return Hold(action.job_id, Reason.NO_ROOM_WITHIN, action.expected_start_s)
        return action

    return replace(plan, actions=tuple(map(explained, plan.actions)))


def is_within(snapshot: Snapshot, start: Start) -> bool:
    """Whether a gang that must lie within one domain would start in one."""
    level = snapshot.within.get(start.job_id)
    if level is None or start.job_id in snapshot.bound or len(start.placement.shares) == 1:
        return level is None or level >= 0 or start.job_id in snapshot.bound
    rows = [snapshot.nodes.index[share.node_id] for share in start.placement.shares]
    return level >= 0 and len(set(snapshot.nodes.domains[rows, level].tolist())) == 1


def check_within(snapshot: Snapshot, starts: Iterable[Start]) -> None:
    """Raise unless gangs that must lie within one domain start in one; ``PlanError`` names the job."""
    for start in starts:
        if not is_within(snapshot, start):
            level = snapshot.within[start.job_id]
            name = snapshot.levels[level] if level >= 0 else "domain of a level that there is not"
            raise PlanError(f"job {start.job_id} must lie within one {name}, and would not")
