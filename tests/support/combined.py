"""Clusters on which features meet: each feature changes a snapshot by a random sequence of its own.

Drawn by number, since Hypothesis takes ten times as long; ``smallest`` shrinks what fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from services.core.cycle.services import without_devices
from services.core.cycle.snapshot import (
    QUEUED,
    RUNNING,
    JobTable,
    Saves,
    ServiceInstance,
    SliceJob,
    SliceUnit,
    Snapshot,
    Trigger,
)
from services.core.domain.arrays import Bools
from services.core.domain.carbon import CarbonCurve
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.domain.ids import JobId, NodeId
from services.core.domain.orders import curve_of, order_at, standing
from services.core.domain.prices import PriceCurve
from services.core.domain.windows import GRACE_S, Ending, Window
from services.core.parallel.graph import JobGraph, Stage
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, hourly_curve

HOUR_S = 3_600.0
TENANTS = ("blue", "green", "red")
Feature = Callable[[random.Random, Snapshot], Snapshot]


def combined(seed: int) -> Snapshot:
    """Return a cluster by its number."""
    snapshot = _plain(random.Random(seed))
    for feature in FEATURES:
        draw = random.Random(f"{seed} {feature.__name__}")
        if draw.random() < 0.55:
            snapshot = feature(draw, snapshot)
    return snapshot


def _curve(draw: random.Random) -> CarbonCurve:
    low, high = draw.choice(((20, 600), (0, 0), (300, 300), (-50, 200), (0, 400)))
    hours = [draw.randint(low, high) for _ in range(draw.choice((1, 6, 48)))]
    return hourly_curve(hours, start_s=NOON_S - HOUR_S * draw.choice((1, 1, 30, -2)))


def _plain(draw: random.Random) -> Snapshot:
    zones = draw.choice((1, 1, 2, 3))
    kinds = [(model, draw.randrange(zones)) for model in draw.choice((("A100",), ("A100", "V100"), ("V100",)))]
    kinds += [(kinds[0][0], draw.randrange(zones))] * draw.randint(0, 1)
    nodes = []
    for at in range(draw.randint(1, 5)):
        model, zone = draw.choice(kinds)
        nodes.append(
            a_node(f"n{at}", gpus=draw.choice((1, 2, 4, 4, 6)), model=f"{model}@{zone}",
                   schedulable=draw.random() < 0.9, zone=zone)
        )  # fmt: skip
    free = {node.name: list(range(node.gpus)) for node in nodes}
    models = sorted({node.model for node in nodes})
    jobs: list[JobRow] = []
    for at in range(draw.randint(0, 10)):
        low, step = draw.choice((1, 1, 1, 2, 3, 4, 6)), draw.choice((1, 1, 2))
        high = low + step * draw.choice((0, 0, 0, 1, 3))
        submitted_s = NOON_S - draw.choice((0, 60, 5_000, 5_000, 90_000))
        job = a_job(
            f"j{at}",
            min_gpus=low,
            max_gpus=high,
            step_gpus=step,
            asked_gpus=draw.choice((low, high)),
            models=draw.choice((None, None, None, tuple(models[:1]), tuple(models[1:]), ())),
            tenant=draw.choice(TENANTS),
            preemptible=draw.random() < 0.75,
            priority=draw.choice((0, 0, 0, 1, -1)),
            submitted_s=submitted_s,
            waiting_since_s=min(submitted_s + draw.choice((0, 30, 700, 4_000)), NOON_S),
            attained_gpu_s=draw.choice((0.0, 0.0, 900.0, 90_000.0)),
            energy_j=draw.choice((0.0, 5e6)),
            carbon_gco2=draw.choice((0.0, 40.0, 400.0, -3.0)),
            gpu_power_w=draw.choice((math.nan, 0.0, 100.0, 350.0)),
            efficiency_base=draw.choice((math.nan, 0.5, 1.0)),
            efficiency_now=draw.choice((math.nan, 0.4, 1.1)),
            progress=draw.choice((math.nan, 0.0, 0.5, 1.0)),
            remaining_s=draw.choice((math.nan, 0.0, 600.0, 7_200.0, 90_000.0)),
            deadline_s=draw.choice((math.inf, math.inf, NOON_S - 60, NOON_S + HOUR_S, NOON_S + 20 * HOUR_S)),
            shareable=draw.random() < 0.3,
            memory_gib=draw.choice((math.nan, 10.0, 30.0)),
        )
        phase, model = draw.choices(range(4), (5, 1, 5, 1))[0], draw.choice(models)
        gpus = draw.choice(range(low, high + 1, step))
        devices = [(node.name, device) for node in nodes if node.model == model for device in free[node.name]][:gpus]
        if phase != QUEUED and len(devices) == gpus and (job.models is None or model in job.models):
            on: dict[str, tuple[int, ...]] = {}
            for name, device in devices:
                free[name].remove(device)
                on[name] = (*on.get(name, ()), device)
            job = replace(job, phase=phase, gpus=gpus, on=on)
        jobs.append(job)
    made = a_snapshot(
        jobs,
        nodes,
        trigger=draw.choice(list(Trigger)),
        curve=_curve(draw),
        more_curves=[_curve(draw) for _ in range(zones - 1)],
    )
    jobs_of = made.jobs
    at = [-1 if not made.held_by(job) else int(made.nodes.zone[made.held_by(job)[0][0]]) for job in range(len(jobs_of))]
    spent = (jobs_of.phase == QUEUED) & (jobs_of.attained_gpu_s > 0)
    data = np.where(spent, np.arange(len(jobs_of)) % zones, at) if zones > 1 else np.full(len(jobs_of), -1)
    return replace(
        made,
        gpu_models=tuple(each.split("@")[0] for each in made.gpu_models),
        jobs=replace(jobs_of, data_zone=data.astype(np.int64)),
        next_active_s=NOON_S + 300.0,
        placement=draw.choice(("consolidated", "consolidated", "buddy", "first-fit", "heavy-edge")),
    )


def _some(draw: random.Random, snapshot: Snapshot, share: float = 0.5) -> list[JobId]:
    return [each for each in snapshot.jobs.ids if draw.random() < share]


def _mask(draw: random.Random, count: int, share: float) -> Bools:
    return np.array([draw.random() < share for _ in range(count)], dtype=np.bool_)


def quotas(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Ceilings, also below what is held, and of 0."""
    return replace(
        snapshot, tenant_gpu_quota={each: draw.choice((0, 2, 4, 99)) for each in TENANTS[draw.randrange(3) :]}
    )


def guarantees(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Guarantees, also of more GPUs than there are."""
    found = {each: draw.choice((0, 1, 2, 4, 20)) for each in (*TENANTS[draw.randrange(3) :], "gone")}
    return replace(snapshot, tenant_guarantees=found)


def weights(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Weights, and GPUs in other installations."""
    cells = {each: draw.randint(0, 4) for each in TENANTS}
    return replace(snapshot, tenant_weights={"red": draw.choice((0.5, 3.0))}, tenant_gpus_in_cells=cells)


def engines(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """GPUs that an engine's own queue divides."""
    return replace(snapshot, undivided=frozenset({draw.randrange(len(snapshot.gpu_models))}))


def sleep(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Nodes that may sleep, some of which do."""
    nodes = snapshot.nodes
    may = _mask(draw, len(nodes), 0.8)
    asleep = may & (nodes.free_gpus == nodes.gpus) & _mask(draw, len(nodes), 0.6)
    return replace(snapshot, nodes=replace(nodes, asleep=asleep, may_sleep=may))


def controls(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Power limits and clocks, set and not, and what is known of them."""
    n_models, jobs = len(snapshot.gpu_models), snapshot.jobs
    kinds = frozenset(draw.choice(([ControlKind.POWER_LIMIT], list(ControlKind), [])))
    kind = draw.choice((*kinds, None))
    values = np.array([100.0, 200.0, 400.0] if kind is ControlKind.POWER_LIMIT else [600.0, 900.0, 1_400.0])
    if kind is None:
        values = values[-1:]
    curves: dict[str, Any] = {}
    rows = np.full(len(jobs), -1, dtype=np.int64)
    if draw.random() < 0.6:
        models = [each for each in range(n_models) if draw.random() < 0.8]
        sizes, speed = np.array([1, 2, 4]), np.array([1.0, 1.7, draw.choice((1.6, 3.0))])
        slow = np.linspace(0.6, 1.0, values.size)
        table = GangTable(
            sizes, speed[:, None] * slow, 300.0 * sizes[:, None] * np.linspace(0.4, 1.0, values.size), kind, values
        )
        curve = ControlCurve(values, slow, 300.0 * np.linspace(0.4, 1.0, values.size))
        curves["control_curves"] = ({(each, kind): curve for each in models} if kind else {},)
        curves["gangs"] = (dict.fromkeys(models, table),)
        curves["speed_curves"] = np.array([np.interp(np.arange(1, 17), sizes, speed)])
        rows = np.array([draw.choice((0, 0, -1)) for _ in jobs.ids], dtype=np.int64)
    runs = (jobs.phase == RUNNING) & (kind is ControlKind.POWER_LIMIT)
    limits = np.where(runs & _mask(draw, len(jobs), 0.4), 200.0, np.nan)
    ordered = np.where(~np.isnan(limits) & _mask(draw, len(jobs), 0.5), draw.choice((0.0, 300.0)), np.nan)
    flex = np.array([draw.choice((math.nan, 0.0, 0.1, 0.5)) for _ in jobs.ids])
    own = {"power_limit_w": limits, "unordered_w": ordered, "flex": flex, "control_curve": rows, "speed_curve": rows}
    return replace(
        snapshot,
        jobs=replace(jobs, **own),
        settable=(kinds,) * n_models,
        limit_range_w=np.tile(draw.choice(([100.0, 400.0], [math.nan, math.nan])), (n_models, 1)),
        idle_w=np.full(n_models, 50.0),
        host_w=np.full(n_models, draw.choice((0.0, 40.0))),
        measures=bool(kinds) and draw.random() < 0.5,
        measuring=frozenset(_some(draw, snapshot, 0.1)),
        **curves,
    )


def batches(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Batch sizes that policies may choose."""
    rows = np.array([draw.choice((0, -1)) for _ in snapshot.jobs.ids], dtype=np.int64)
    low = np.where(rows < 0, -1, 32)
    curves = np.linspace(1.0, 5.0, 16) * np.ones((1, 2, 1))
    jobs = replace(snapshot.jobs, goodput_curve=rows, batch_min=low, batch_max=np.where(rows < 0, -1, 512))
    batch = np.tile(np.minimum(32 * np.arange(1, 17), 512), (1, 2, 1))
    return replace(snapshot, jobs=jobs, goodput_curves=curves, goodput_batches=batch, goodput_gains=curves / 1.1)


def graphs(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Layouts of jobs of one size."""
    jobs = snapshot.jobs
    sizes = zip(jobs.ids, jobs.min_gpus.tolist(), jobs.max_gpus.tolist(), strict=True)
    one_size = {each: low for each, low, high in sizes if low == high and draw.random() < 0.6}
    stage = {each: Stage(replicas=gpus, forward_s=0.01, backward_s=0.02, parameter_bytes=4e7, output_bytes=1e6)
             for each, gpus in one_size.items()}  # fmt: skip
    return replace(snapshot, graphs={each: JobGraph((found,)) for each, found in stage.items()})


def lengths(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """How sure predicted lengths are, and when work was saved."""
    every_s = {each: draw.choice((math.nan, 60.0, 9_000.0)) for each in _some(draw, snapshot)}
    saves = {each: Saves(NOON_S - draw.choice((0.0, 50.0, 9_500.0)), value) for each, value in every_s.items()}
    return replace(
        snapshot,
        length_spreads={each: draw.choice((0.2, 3.0)) for each in _some(draw, snapshot)},
        saves=saves,
        save_wait_s=draw.choice((0.0, 300.0)),
    )


def least_runs(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """A guaranteed run."""
    return replace(snapshot, min_run_s=draw.choice((100.0, 5_000.0)))


def network(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Racks and blocks, on which jobs require a level or prefer one; some require one that there is not."""
    rack_of = np.array([draw.randint(0, 2) for _ in snapshot.nodes.ids])
    domains = np.stack((np.arange(rack_of.size), rack_of, np.array([draw.randint(0, 1) for _ in range(3)])[rack_of]), 1)
    within = {each: draw.choice((0, 1, 2, -1)) for each in _some(draw, snapshot)}
    near = {each: draw.choice((0, 1, 2)) for each in _some(draw, snapshot) if each not in within}
    named: dict[str, Any] = {"within": within, "near": near, "levels": ("node", "rack", "block")}
    return replace(snapshot, nodes=replace(snapshot.nodes, domains=domains), **named)


def bound(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Jobs that have to start where their checkpoint is, also on a node that is gone."""
    found = dict[JobId, tuple[NodeId, ...]]()
    for job_id, placement in zip(snapshot.jobs.ids, snapshot.jobs.placements, strict=True):
        if draw.random() < 0.25:
            names = [*snapshot.nodes.ids, NodeId("gone")]
            anywhere = tuple(draw.sample(names, draw.randint(1, min(2, len(names)))))
            found[job_id] = tuple(share.node_id for share in placement.shares) if placement else anywhere
    return replace(snapshot, bound=found)


def pairs(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Two gangs on one GPU."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    alone = np.flatnonzero((jobs.gpus == 1) & (jobs.phase == RUNNING) & jobs.preemptible).tolist()
    if len(alone) < 2:
        return snapshot
    host, guest = draw.sample(alone, 2)
    on, where = jobs.placements[host], jobs.placements[guest]
    assert on is not None
    assert where is not None
    (left,) = where.shares
    if nodes.gpu_model[nodes.index[left.node_id]] != nodes.gpu_model[nodes.index[on.shares[0].node_id]]:
        return snapshot
    placements = tuple(on if at == guest else each for at, each in enumerate(jobs.placements))
    free = tuple(
        tuple(sorted({*each, *left.devices})) if node_id == left.node_id else each
        for node_id, each in zip(nodes.ids, nodes.free_devices, strict=True)
    )
    pair = [host, guest]
    jobs = replace(jobs, placements=placements, shareable=jobs.shareable | np.isin(np.arange(len(jobs)), pair))
    counted = np.array([len(each) for each in free], dtype=np.int64)
    shared = ((jobs.ids[host], jobs.ids[guest]),)
    return replace(snapshot, jobs=jobs, nodes=replace(nodes, free_devices=free, free_gpus=counted), shared=shared)


def cut(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """GPUs that are cut, and jobs that wait for slices."""
    nodes, jobs, units = snapshot.nodes, snapshot.jobs, list[SliceUnit]()
    hidden = dict[int, set[int]]()
    for node, free in enumerate(nodes.free_devices):
        for gpu in free:
            if draw.random() < 0.4:
                hidden.setdefault(node, set()).add(gpu)
                units += [SliceUnit(node, 1_024 + 8 * gpu + 4 * at, gpu, size, draw.random() < 0.7, f"{node}{gpu}{at}")
                          for at, size in enumerate((3, 3) if draw.random() < 0.7 else (4, 3))]  # fmt: skip
    takes = np.array([nodes.schedulable[unit.node] and not nodes.asleep[unit.node] for unit in units], dtype=np.bool_)
    size_of = np.array([unit.sevenths for unit in units], dtype=np.int64)
    model_of = nodes.gpu_model[[unit.node for unit in units]].astype(np.int64) if units else size_of
    waiting: list[SliceJob] = []
    single = np.flatnonzero((jobs.phase == QUEUED) & (jobs.max_gpus == 1)).tolist()
    for at in sorted(single, key=lambda at: (-jobs.priority[at], jobs.submitted_s[at], jobs.ids[at])):
        if draw.random() < 0.6:
            size = draw.choice((1, 3, 3, 4))
            waiting.append(SliceJob(jobs.ids[at], size, takes & (size_of == size) & jobs.eligible[at, model_of]))
    used = {"services_gpus": sum(map(len, hidden.values())), "services_w": 80.0 * sum(map(len, hidden.values()))}
    left = without_devices(nodes, hidden)
    return replace(snapshot, nodes=left, slice_units=tuple(units), slice_jobs=tuple(waiting), **used)


def services(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Model servers and instances that wait, and the devices of those that run."""
    nodes, jobs = snapshot.nodes, snapshot.jobs
    taken = {each.job_id for each in snapshot.slice_jobs}
    waits = np.flatnonzero((jobs.phase == QUEUED) & (jobs.min_gpus == jobs.max_gpus)).tolist()
    found: list[ServiceInstance] = []
    for at in sorted(waits, key=lambda at: (jobs.submitted_s[at], jobs.ids[at])):
        gpus = int(jobs.min_gpus[at])
        suits = nodes.schedulable & (nodes.gpus >= gpus) & jobs.eligible[at, nodes.gpu_model]
        suits &= _mask(draw, len(nodes), 0.8)
        if jobs.ids[at] not in taken and draw.random() < 0.6:
            found.append(ServiceInstance(jobs.ids[at], gpus, suits))
    held = {node: {free[-1]} for node, free in enumerate(nodes.free_devices) if free and draw.random() < 0.3}
    more: dict[str, Any] = {"services_gpus": snapshot.services_gpus + len(held), "services_w": 300.0 * len(held)}
    snapshot = replace(snapshot, nodes=without_devices(nodes, held), services=tuple(found), **more)
    placed = {each.job_id for each in found}  # what pools start names no level, and leaves no checkpoint on a node
    free = {name: {key: value for key, value in getattr(snapshot, name).items() if key not in placed}
            for name in ("bound", "within", "near", "graphs", "saves")}  # fmt: skip
    return replace(snapshot, **snapshot.less({draw.choice(TENANTS): len(held)}), **free)


def windows(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Reservations and maintenance, which may overlap, of nodes that may have gone or lost GPUs since."""
    found: list[Window] = []
    for at in range(draw.randint(1, 4)):
        start_s = NOON_S + draw.choice((-5_000.0, -30.0, 0.0, 130.0, 200.0, 900.0, 5_000.0))
        end_s = max(start_s, NOON_S) + draw.choice((1.0, 1_000.0, 6_000.0))
        holder = draw.choice((None, "nobody", *TENANTS))
        gpus = {node_id: draw.choice((1, 2, count + 1, count + 1)) if holder else max(count, 1)
                for node_id, count in zip(snapshot.nodes.ids, snapshot.nodes.gpus.tolist(), strict=True)
                if draw.random() < 0.6}  # fmt: skip
        found.append(
            Window(f"w{at}", start_s, end_s, {**gpus, NodeId("gone"): 4} if draw.random() < 0.2 else gpus, holder)
        )
    times = (30.0, 300.0, 1_000.0, 4_000.0, math.inf)
    endings = {each: Ending(draw.choice(times), draw.choice((GRACE_S, 5.0, 600.0))) for each in _some(draw, snapshot)}
    return replace(snapshot, windows=tuple(found), endings=endings)


def orders(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Orders of the grid in force or announced, of zones and of the whole, and a limit of the cluster."""
    at_rest = draw.random() < 0.5
    everything_w = 400.0 * max(int(snapshot.nodes.gpus.sum()), 1)
    found = []
    if draw.random() < 0.3:
        measured_w = everything_w / 2 if at_rest else math.nan
        found.append(standing(everything_w * draw.choice((0.0, 0.4, 2.0)), other_w=0.0, measured_w=measured_w))
    for at in range(draw.randint(1, 2)):
        start_s = NOON_S + draw.choice((-1_000.0, -5_000.0, 3.0, 100.0, 800.0, 4_000.0))
        share = draw.choice((0.0, 0.1, 0.3, 0.6, 2.0))
        steps = ((0.0, share * everything_w), (600.0, 0.7 * share * everything_w))
        curve = curve_of(start_s, start_s + draw.choice((900.0, 5_000.0)), steps, everything_w / 2)
        zone = draw.choice((-1, draw.randrange(len(snapshot.outlooks))))
        measured_w = everything_w * draw.choice((0.2, 0.9)) if at_rest else math.nan
        other_w = snapshot.services_w
        found.append(order_at(f"o{at}", zone, curve, NOON_S, other_w=other_w, measured_w=measured_w))
    return replace(snapshot, orders=tuple(found))


def prices(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """Electricity prices of some zones, also negative ones, and forecasts with deciles."""
    start_s = NOON_S // HOUR_S * HOUR_S - 5 * HOUR_S
    found = []
    for each in snapshot.outlooks:
        price = PriceCurve(start_s, np.array([draw.choice((-0.1, 0.0, 0.2, 0.4)) for _ in range(draw.choice((1, 30)))]))
        known = each.curve.intensity_gco2_per_kwh
        deciles = {"low": known - 10, "high": known + 10} if draw.random() < 0.5 else {}
        stale = draw.random() < 0.2
        found.append(replace(each, prices=price if draw.random() < 0.8 else None, stale=stale, **deciles))
    return replace(snapshot, outlooks=tuple(found))


def measured(draw: random.Random, snapshot: Snapshot) -> Snapshot:
    """What meters say of the whole, and how much memory GPUs have."""
    memory = np.full(len(snapshot.gpu_models), 40.0)
    return replace(snapshot, measured_w=draw.choice((0.0, 900.0, 20_000.0)), gpu_memory_gib=memory)


FEATURES: tuple[Feature, ...] = (
    quotas, guarantees, weights, engines, sleep, controls, batches, graphs, lengths, least_runs, network, bound, pairs,
    cut, services, windows, orders, prices, measured,
)  # fmt: skip


def smaller(snapshot: Snapshot) -> Iterator[Snapshot]:
    """Yield the snapshot with something less: without what a feature added, a job, or an entry of a list or table."""
    plain = a_snapshot()
    for each in fields(Snapshot):
        value, usual = getattr(snapshot, each.name), getattr(plain, each.name)
        if each.name in _ESSENTIAL or repr(value) == repr(usual):
            continue
        yield replace(snapshot, **{each.name: usual})
        if isinstance(value, tuple) and each.name not in _COLUMNS:
            yield from (replace(snapshot, **{each.name: value[:at] + value[at + 1 :]}) for at in range(len(value)))
        elif isinstance(value, dict):
            yield from (replace(snapshot, **{each.name: {k: v for k, v in value.items() if k != key}}) for key in value)
    yield from (_without_job(snapshot, at) for at in range(len(snapshot.jobs)))
    bare = a_snapshot([a_job(each) for each in snapshot.jobs.ids]).jobs
    for each in fields(JobTable):
        if each.name not in ("ids", "phase", "placements", "eligible", "tenants") and "gpus" not in each.name:
            column, usual = getattr(snapshot.jobs, each.name), getattr(bare, each.name)
            for at in np.flatnonzero(column != usual).tolist():
                if not (np.isnan(column[at]) and np.isnan(usual[at])):
                    changed = column.copy()
                    changed[at] = usual[at]
                    yield replace(snapshot, jobs=replace(snapshot.jobs, **{each.name: changed}))


_ESSENTIAL = ("version", "now_s", "trigger", "gpu_models", "jobs", "nodes", "outlooks")
_COLUMNS = ("settable", "levels", "control_curves", "gangs", "slice_units")


def _without_job(snapshot: Snapshot, job: int) -> Snapshot:
    keep, gone = np.arange(len(snapshot.jobs)) != job, snapshot.jobs.ids[job]
    free = [set(each) for each in snapshot.nodes.free_devices]
    if not any(gone in pair for pair in snapshot.shared):
        for node, devices in snapshot.held_by(job):
            free[node].update(devices)
    counts = np.array([len(each) for each in free], dtype=np.int64)
    less: dict[str, Any] = {
        name: {key: value for key, value in getattr(snapshot, name).items() if key != gone}
        for name in ("graphs", "length_spreads", "bound", "within", "near", "endings", "saves")
    }
    less |= {name: tuple(each for each in getattr(snapshot, name) if each.job_id != gone)
             for name in ("services", "slice_jobs")}  # fmt: skip
    shared = tuple(each for each in snapshot.shared if gone not in each)
    nodes = replace(snapshot.nodes, free_devices=tuple(tuple(sorted(each)) for each in free), free_gpus=counts)
    return replace(snapshot, jobs=snapshot.jobs.rows(keep), nodes=nodes, shared=shared, **less)


def smallest(snapshot: Snapshot, fails: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the smallest snapshot found that fails as this one does."""
    found = True
    while found:
        found = False
        for each in smaller(snapshot):
            try:
                found = fails(each)
            except Exception:  # not one that could be
                continue
            if found:
                snapshot = each
                break
    return snapshot


def told(snapshot: Snapshot) -> str:
    """Return what a snapshot has that is unusual, for a failure's message."""
    plain = a_snapshot()
    lines = [f"{each.name}={value}" for each in fields(Snapshot) if each.name not in ("jobs", "nodes")
             and repr(value := getattr(snapshot, each.name)) != repr(getattr(plain, each.name))]  # fmt: skip
    tables = [f"{table}.{each.name}={getattr(getattr(snapshot, table), each.name)}" for table in ("jobs", "nodes")
              for each in fields(getattr(snapshot, table))
              if repr(getattr(getattr(snapshot, table), each.name)) not in ("", "None")]  # fmt: skip
    return "\n".join((*lines, *tables))
