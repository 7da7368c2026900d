"""Load what a policy sees: rows of one consistent view of the database, the tables they make, and the snapshot."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import ValidationError

from services.contracts.parallel import ParallelLayout
from services.core.cycle.gates import Withheld, withheld
from services.core.cycle.services import without_devices
from services.core.cycle.snapshot import Gangs, Saves, Snapshot, Trigger
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.ids import JobId, NodeId
from services.core.domain.orders import STOPS_AHEAD_S, PowerOrder, order_at, standing
from services.core.domain.topology import read_topology
from services.core.domain.windows import Ending, Window
from services.core.parallel.graph import JobGraph
from services.db.database import Connection, Database
from services.scheduler.grid.orders import curve
from services.scheduler.learning import learned
from services.scheduler.learning.learned import KnownCurves, known_of, with_permitted
from services.scheduler.learning.predicting import Predicting
from services.scheduler.planning.apply import Said
from services.scheduler.planning.cluster import (
    Cluster,
    drawn_w,
    host_w,
    idle_w,
    kind_of,
    levels_of,
    node_table,
    settable,
    shared_pairs,
)
from services.scheduler.planning.job_table import (
    eligible_kinds,
    held_devices,
    held_w,
    hold_devices,
    job_table,
    length_spreads,
    waiting_instances,
)
from services.scheduler.planning.slices import cut_gpus, waiting_slice_jobs, without_held
from services.scheduler.repository import snapshots
from services.scheduler.repository.gates import gates
from services.scheduler.repository.kept_jobs import JobRows, KeptJobs
from services.scheduler.repository.orders import OrderRow
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.reservations import EndingRow, ReservationRow
from services.scheduler.repository.snapshots import ClusterRows
from services.scheduler.settings import SchedulerSettings
from services.solving.layouts import graph_of


@dataclass(frozen=True)
class Loaded:
    """A snapshot with the policy in force and its stored memory, and the lengths that were predicted for it.

    ``memory`` is None if the caller already has that of this version.
    """

    snapshot: Snapshot
    policy: str
    parameters: dict[str, Any]
    memory: dict[str, Any] | None
    predictions: Predictions | None = None
    withheld: Sequence[Withheld] = ()
    """Queued jobs that are not in the snapshot, as far as it is not written down yet why."""
    said: Said = field(default_factory=Said)  #: Why each job waits, as it is written down


async def load(
    database: Database,
    trigger: Trigger,
    outlooks: Sequence[CarbonOutlook],
    settings: SchedulerSettings,
    curves: KnownCurves | None = None,
    *,
    at_rest: bool = False,
    covers: Callable[[str], bool] = lambda _: False,
    predicting: Predicting | None = None,
    kept: KeptJobs | None = None,
    known_version: int | None = None,
    without: Collection[str] = (),
) -> Loaded:
    """Return the live state as one snapshot.

    Args:
        outlooks: The grid of each zone, now and ahead; a node in another zone counts as one in the first.
        settings: When a gang size counts as profiled (before, its efficiency is NaN), whether gangs are
            measured, how they are placed, when active rounds are held and what connects GPUs; the width of nodes is
            added.
        curves: The operator's curves of speed and power by control, in addition to those measured here.
        at_rest: Whether the last changes are in force, so that the measured power can be used.
        covers: Whether a node can be powered down and up; one that is off and cannot be woken is left out.
        predicting: Predicts the lengths of jobs that are seen for the first time; they are to be kept.
        kept: The jobs that the last round saw; None: all are read again.
        known_version: The version whose policy memory the caller already has.
        without: Jobs that are left out.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        rows, unexplained = await read_rows(
            connection,
            settings,
            kept,
            with_unpredicted=predicting is not None,
            known_version=known_version,
            without=without,
        )
    predictions = predicting.predict(rows.unpredicted) if predicting and rows.unpredicted else None
    snapshot = snapshot_of(
        rows, Cluster.of(rows, covers), trigger, outlooks, settings, curves or {}, predictions, at_rest=at_rest
    )
    return Loaded(
        snapshot, rows.state.policy, rows.state.parameters, rows.state.memory, predictions, unexplained, Said.of(rows)
    )


async def read_rows(
    connection: Connection,
    settings: SchedulerSettings,
    kept: KeptJobs | None = None,
    *,
    with_unpredicted: bool,
    known_version: int | None = None,
    with_endings: bool = False,
    without: Collection[str] = (),
) -> tuple[ClusterRows, Sequence[Withheld]]:
    """Return what a snapshot is made of, without the queued jobs that must not start yet.

    Args:
        connection: In a transaction that sees one state of the database throughout.
        settings, kept, known_version, without: As for ``load``.
        with_unpredicted: Whether the specs of jobs whose lengths are not predicted yet are wanted.
        with_endings: As for ``snapshots.cluster``.

    Returns:
        The rows, and those of the jobs left out whose stored reason is out of date.
    """
    found = await gates(connection)
    left_out = withheld(found.jobs, found.limits, found.needs)
    closed = {each.id for each in left_out}
    of_gated = [row.id for row in found.rows if row.id not in closed] if closed else None
    jobs = JobRows.of(await (kept.fetch(connection, of_gated) if kept else snapshots.jobs(connection, of_gated)))
    if without:
        jobs = jobs.where(~np.isin(jobs.columns["id"], [*without]))
    columns = jobs.columns
    unpredicted = np.isnan(columns["predicted_gpu_s"]) & ~jobs.have("service")
    unscaled = np.isfinite(columns["batch_min"]) & np.isnan(columns["noise_scale"])
    rows = await snapshots.cluster(
        connection,
        jobs,
        min_profile_s=settings.min_profile_s,
        node_min_on_s=settings.node_min_on_s,
        node_standby_w=settings.node_standby_w,
        node_boot_w=settings.node_boot_w,
        unpredicted=columns["id"][unpredicted].tolist() if with_unpredicted else [],
        unscaled=sorted({*columns["kind"][unscaled]}),
        known_version=known_version,
        with_endings=with_endings,
    )
    return rows, found.unexplained(left_out)


def snapshot_of(
    rows: ClusterRows,
    cluster: Cluster,
    trigger: Trigger,
    outlooks: Sequence[CarbonOutlook],
    settings: SchedulerSettings,
    curves: KnownCurves,
    predictions: Predictions | None = None,
    *,
    at_rest: bool = False,
) -> Snapshot:
    """Return the snapshot that rows make; see ``load`` for the other arguments."""
    all_jobs = JobRows.of(rows.jobs)
    with_devices = hold_devices(all_jobs)
    instances, jobs = [*all_jobs.where(with_devices)], all_jobs.where(~with_devices)
    cut = cut_gpus(cluster)
    held = held_devices(cluster.nodes, instances)
    for node_id, gpus in without_held(cut.hidden, jobs).items():
        held[node_id] = held.get(node_id, set()) | gpus
    instances_w = held_w(cluster, held)
    gpu_models = tuple(kind.gpu_model for kind in cluster.kinds)
    by_host_w, by_kind = host_w(cluster), settable(cluster)
    curve_of_kind, control_curves, gangs = known_of(
        jobs, gpu_models, curves, learned.tables_of(rows.tables), dict(zip(gpu_models, by_host_w.tolist(), strict=True))
    )
    speed_rows, speed_curves = _speed_curves(gangs)
    zones = [outlook.zone for outlook in outlooks]
    nodes, eligible = node_table(cluster, zones), eligible_kinds(jobs, cluster.kinds)
    topology = read_topology(rows.state.topology)
    levels = levels_of(topology, cluster.nodes, jobs)
    if levels:
        nodes = replace(nodes, domains=levels.pop("domains"))
    now_s = rows.state.now_s
    made = Snapshot(
        version=rows.state.version,
        now_s=now_s,
        trigger=trigger,
        gpu_models=gpu_models,
        jobs=job_table(
            jobs,
            rows.efficiencies,
            eligible,
            now_s,
            control_curves=curve_of_kind,
            speed_curves=speed_rows,
            predicted_gpu_s=dict(zip(predictions.job_id, predictions.gpu_s, strict=True)) if predictions else {},
            flexes=rows.flexes,
            zone_of=dict(zip(nodes.ids, nodes.zone.tolist(), strict=True)) if len(zones) > 1 else {},
        ),
        nodes=without_devices(nodes, {nodes.index[NodeId(on)]: devices for on, devices in held.items()}),
        outlooks=tuple(outlooks),
        tenant_gpu_quota=dict(rows.quotas),
        tenant_guarantees=rows.guarantees,
        tenant_gpus_in_cells=rows.in_cells,
        undivided=frozenset(at for at, kind in enumerate(cluster.kinds) if kind.engine in rows.queueing),
        tenant_weights=rows.weights,
        speed_curves=speed_curves,
        control_curves=control_curves,
        settable=by_kind,
        gangs=gangs,
        idle_w=idle_w(cluster, cut.hidden) + by_host_w,
        host_w=by_host_w,
        next_active_s=_next_active_s(trigger, now_s, rows.state.last_active_s, settings),
        measured_w=drawn_w(cluster) - instances_w + rows.asleep_w if at_rest else float("nan"),
        measures=settings.measures_controls and any(by_kind),
        measuring=frozenset(JobId(job_id) for job_id in rows.measured),
        placement=settings.placement,
        graphs={JobId(job.id): graph for job in jobs.where(jobs.have("layout")) if (graph := _graph(job.layout or ""))},
        services=waiting_instances(jobs, cluster.nodes, nodes, eligible),
        services_gpus=sum(map(len, held.values())),
        services_w=instances_w,
        shared=shared_pairs(cluster.claims, jobs),
        gpu_memory_gib=np.array([kind.memory_gib for kind in cluster.kinds], dtype=np.float64),
        slice_units=cut.units,
        slice_jobs=waiting_slice_jobs(jobs, cluster.nodes, nodes, eligible, cut),
        bound={JobId(job): tuple(map(NodeId, nodes)) for job, nodes in rows.bound.items()},
        network=replace(
            settings.network,
            server_gpus=cluster.widest_node_gpus,
            within_bytes_per_s=topology.bytes_per_s(levels.get("levels", ()), settings.network.inter_bytes_per_s),
        ),
        **levels,
        length_spreads=length_spreads(jobs, predictions),
        orders=power_orders(
            rows.orders, cluster, zones, held, now_s, rows.asleep_w, settings.power_limit_w, at_rest=at_rest
        ),
        limit_range_w=limit_range_w(cluster),
        min_run_s=settings.min_run_s,
        saves={JobId(row.job_id): Saves(row.last_s, row.every_s or math.nan) for row in rows.saves},
        save_wait_s=settings.round_interval_s if settings.save_wait_s is None else settings.save_wait_s,
        windows=tuple(map(window_of, rows.reservations)),
        endings={JobId(row.id): ending_of(row, now_s) for row in rows.endings},
    )
    served = Counter[str]()
    for instance in instances:
        served[instance.tenant_id] += instance.gpus
    made = made.again(**made.less(served))
    return with_permitted(made, jobs, rows.tables, rows.noise_scales)


def _next_active_s(trigger: Trigger, now_s: float, last_s: float | None, settings: SchedulerSettings) -> float:
    """Return when the next active round is held at the latest, UTC seconds: up to one tick after it is due."""
    due_s = now_s + settings.round_interval_s
    if trigger is Trigger.PASSIVE:
        due_s = now_s if last_s is None else max(last_s + settings.round_interval_s, now_s)
    return due_s + settings.tick_s


@lru_cache(maxsize=4_096)
def _graph(layout: str) -> JobGraph | None:
    """Return the graph of a layout; None for one that was accepted under older rules and is no longer valid."""
    try:
        return graph_of(ParallelLayout.model_validate_json(layout))
    except ValidationError:
        return None


def _speed_curves(gangs: tuple[Gangs, ...]) -> tuple[list[int], Floats]:
    """Return the row of each kind of job in ``Snapshot.speed_curves``, -1 for none, and those curves."""
    known = [next(iter(tables.values()), None) for tables in gangs]
    curves = [learned.speed_curve(table) for table in known if table is not None]
    rows = np.where([table is not None for table in known], np.cumsum([table is not None for table in known]) - 1, -1)
    return rows.tolist(), np.array(curves).reshape(len(curves), learned.WIDEST)


def window_of(row: ReservationRow) -> Window:
    """Return a reservation."""
    gpus = {NodeId(node_id): count for node_id, count in row.gpus.items()}
    return Window(row.id, row.start_at.timestamp(), row.end_at.timestamp(), gpus, row.tenant_id)


def ending_of(row: EndingRow, now_s: float) -> Ending:
    """Return how a job's gang ends; one that does not run yet has its whole time limit ahead."""
    since_s = now_s if row.running_s is None else row.running_s
    left_s = math.inf if row.limit_s is None else since_s + row.limit_s + row.grace_s - now_s
    return Ending(left_s, row.grace_s)


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
        scope, beside_w = cluster, asleep_w
        if row.zone is not None:
            nodes = [node for node in cluster.nodes if node.zone == row.zone]
            ids = {node.id for node in nodes}
            hosts_w = {node: watts for node, watts in cluster.hosts_w.items() if node in ids}
            scope, beside_w = replace(cluster, nodes=nodes, hosts_w=hosts_w), 0.0
        zone, limits = -1 if row.zone is None else zones.index(row.zone), curve(row)
        if limits is None:
            prepares_s = row.start_at.timestamp() - max(row.notice_s, STOPS_AHEAD_S)
            again_s, ends_s = prepares_s if prepares_s > now_s else math.inf, row.end_at.timestamp()
            made = PowerOrder(row.id, zone, math.inf, math.inf, again_s, ends_s, **seen(scope, beside_w))
        else:
            made = order_at(row.id, zone, limits, now_s, **seen(scope, beside_w))
        found.append(replace(made, ratio=row.ratio))
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
