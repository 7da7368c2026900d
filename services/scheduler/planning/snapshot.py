"""Load what a policy sees: the live state of the database, in one consistent view, as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
from pydantic import ValidationError

from services.contracts.nodes import PowerState
from services.contracts.parallel import ParallelLayout
from services.core.cycle.services import without_devices
from services.core.cycle.snapshot import Gangs, JobTable, NodeTable, Phase, ServiceInstance, Snapshot, Trigger
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.parallel.graph import JobGraph
from services.core.profiles.priors import board_of
from services.db.database import Database
from services.scheduler.learning import learned as learned_rows
from services.scheduler.learning.curves import KnownCurves, known_of
from services.scheduler.learning.learned import tables_of
from services.scheduler.learning.predicting import Predicting, Told, remaining_s
from services.scheduler.settings import SchedulerSettings

JOBS = f"""
SELECT j.id, j.tenant_id, j.state,
       extract(epoch FROM j.submitted_at)::float8 AS submitted_s,
       extract(epoch FROM coalesce(a.started_at, j.queued_at, j.submitted_at))::float8 AS since_s,
       (j.spec #>> '{{gpus,min}}')::int AS min_gpus,
       coalesce((j.spec #>> '{{gpus,max}}')::int, (j.spec #>> '{{gpus,min}}')::int) AS max_gpus,
       coalesce((j.spec #>> '{{gpus,step}}')::int, 1) AS step_gpus,
       j.spec #>> '{{gpus,model}}' AS model, j.spec ->> 'layout' AS layout, j.spec -> 'service' AS service,
       (j.spec #>> '{{gpus,memory_gib}}')::float8 AS memory_gib,
       (j.spec ->> 'image') IS NOT NULL AS needs_container,
       j.cancel_requested OR j.hold_requested AS leaves,
       coalesce((j.spec ->> 'preemptible')::bool, true) AS preemptible,
       coalesce((j.spec ->> 'priority')::int, 0) AS priority,
       coalesce(extract(epoch FROM (j.spec ->> 'deadline')::timestamptz)::float8, 'infinity') AS deadline_s,
       (j.spec #>> '{{work,total}}')::float8 AS work,
       j.attained_gpu_s, a.state AS allocation_state, coalesce(a.gpus, 0) AS gpus, a.shares,
       a.power_limit_w, a.clock_mhz, {learned_rows.KIND} AS profile, j.labels ->> 'kind' AS kind,
       coalesce(f.energy_j, 0) AS energy_j, coalesce(f.carbon_gco2, 0) AS carbon_gco2,
       f.gpu_energy_j / nullif(f.gpu_s, 0) AS gpu_power_w, coalesce(f.gpu_s, 0) AS gpu_s,
       p.done, q.gpu_s AS told_gpu_s
  FROM jobs j
  LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
  LEFT JOIN job_footprints f ON f.job_id = j.id
  LEFT JOIN job_progress p ON p.job_id = j.id
  LEFT JOIN job_predictions q ON q.job_id = j.id AND q.predicted_at IS NOT NULL
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
 ORDER BY j.id
"""

UNTOLD = "SELECT id, tenant_id, spec FROM jobs WHERE id = ANY($1::text[]) ORDER BY id"

PROFILES = """
SELECT r.job_id, r.gpus, r.generation, r.progress / r.energy_j AS efficiency
  FROM job_profiles r JOIN jobs j ON j.id = r.job_id
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
   AND r.duration_s >= $1 AND r.energy_j > 0 AND r.progress > 0
"""

NODES = """
SELECT n.id, n.zone, n.labels, n.devices, n.readings, n.draining, n.containers, coalesce(p.state, 'on') AS power,
       coalesce(p.state = 'off'
                OR p.state = 'on' AND NOT p.pinned AND p.since + make_interval(secs => $1) <= now()
                   AND coalesce(p.stays_on_until <= now(), true), true) AS may_sleep
  FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.state = 'up' AND coalesce(p.state, 'on') <> 'failed'
   AND (n.lease_until > now() OR p.state IN ('off', 'waking'))
 ORDER BY n.id
"""

HOSTS = """
SELECT u.node_id, sum(u.cpu_energy_j + u.static_energy_j)
       / nullif(extract(epoch FROM max(u.end_at) - min(u.start_at))::float8, 0) AS power_w
  FROM energy_usages u JOIN nodes n ON n.id = u.node_id
 WHERE u.start_at > now() - interval '60 seconds' AND u.boot_id <> 'power' AND n.state = 'up' AND n.lease_until > now()
   AND NOT EXISTS (SELECT FROM node_power p WHERE p.node_id = n.id AND p.state IN ('off', 'waking', 'failed'))
 GROUP BY u.node_id
"""
"""What hosts draw that are on, by the last minute of the ledger."""

ASLEEP_W = """
SELECT count(*) FILTER (WHERE state = 'off' OR acted_at IS NULL) * $1::float8
       + count(*) FILTER (WHERE state = 'waking' AND acted_at IS NOT NULL) * $2::float8
  FROM node_power WHERE state IN ('off', 'waking')
"""
"""What is configured for nodes that are off, $1 each, or boot, $2."""

STATE = """
SELECT version, policy, parameters, memory, extract(epoch FROM last_active_at)::float8 AS last_active_s
  FROM scheduler_state WHERE id = 1
"""

MEASURING = "SELECT job_id FROM setting_measurements WHERE state = 'running'"

QUOTAS = "SELECT id, (limits ->> 'max_gpus')::int AS gpus FROM tenants WHERE limits ->> 'max_gpus' IS NOT NULL"

PHASES = {
    "queued": Phase.QUEUED,
    "starting": Phase.STARTING,
    "running": Phase.RUNNING,
    "preempting": Phase.PREEMPTING,
}


@dataclass(frozen=True)
class Loaded:
    """A snapshot with the policy in force and its stored memory."""

    snapshot: Snapshot
    policy: str
    parameters: dict[str, Any]
    memory: dict[str, Any]
    told: Told | None = None


async def load(
    database: Database,
    trigger: Trigger,
    carbon: CarbonOutlook,
    settings: SchedulerSettings,
    curves: KnownCurves | None = None,
    *,
    at_rest: bool = False,
    covers: Callable[[str], bool] = lambda _: False,
    predicting: Predicting | None = None,
) -> Loaded:
    """Return the live state as one snapshot.

    Args:
        database: The database.
        trigger: Why the round is held.
        carbon: The grid, now and ahead.
        settings: When a gang size counts as profiled (before, its efficiency is NaN), whether gangs are
            measured, how they are placed, when active rounds are held and what connects GPUs; the width of nodes is
            added.
        curves: What an operator knows of speed and power by setting; beside it stands what was measured here.
        at_rest: Whether what was changed last is in force, so that what is drawn now says something.
        covers: Whether a node can be powered down and up; one that is off and cannot be woken is left out.
        predicting: Foretells jobs that are seen for the first time; what it tells of them is to be kept.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        state = await connection.fetchrow(STATE)
        now_s = await connection.fetchval("SELECT extract(epoch FROM now())::float8")
        jobs = await connection.fetch(JOBS)
        trains = (row for row in jobs if row["service"] is None)
        new = [row["id"] for row in trains if row["told_gpu_s"] is None] if predicting else []
        told = predicting.tell(await connection.fetch(UNTOLD, new)) if predicting and new else None
        profiles = await connection.fetch(PROFILES, settings.min_profile_s)
        nodes = [
            row
            for row in await connection.fetch(NODES, settings.node_min_on_s)
            if row["devices"] and (row["power"] != PowerState.OFF or covers(row["id"]))
        ]
        claims = await connection.fetch("SELECT node_id, device FROM device_claims")
        quotas = await connection.fetch(QUOTAS)
        measuring = await connection.fetch(MEASURING)
        hosts = {row["node_id"]: row["power_w"] or 0.0 for row in await connection.fetch(HOSTS)}
        asleep_w = await connection.fetchval(ASLEEP_W, settings.node_standby_w, settings.node_boot_w)
        learned = tables_of(await connection.fetch(learned_rows.PROFILES, sorted({row["profile"] for row in jobs})))
    jobs, running = _sort_out(jobs)
    standing = _held_on(nodes, running)
    held_by = Counter[str]()
    for row in running:
        held_by[row["tenant_id"]] += row["gpus"]
    kinds = sorted({_kind(row) for row in nodes})
    models = tuple(model for model, _, _ in kinds)
    host_w = _host_w(nodes, hosts, kinds)
    of_kind, control_curves, gangs = known_of(
        jobs, models, curves or {}, learned, dict(zip(models, host_w, strict=True))
    )
    speed_rows, speed_curves = _speed_curves(gangs)
    settable = tuple(_settable(nodes, kind) for kind in kinds)
    drawn_w, services_w = _drawn_w(nodes, hosts), _services_w(nodes, hosts, standing)
    table, eligible = _node_table(nodes, claims, kinds, covers), _eligible(jobs, kinds)
    snapshot = Snapshot(
        version=state["version"],
        now_s=now_s,
        trigger=trigger,
        gpu_models=models,
        jobs=_job_table(jobs, profiles, eligible, now_s, of_kind, speed_rows, told),
        nodes=without_devices(table, {table.index[NodeId(on)]: held for on, held in standing.items()}),
        outlooks=(carbon,),
        tenant_gpu_quota={row["id"]: max(row["gpus"] - held_by[row["id"]], 0) for row in quotas},
        speed_curves=speed_curves,
        control_curves=control_curves,
        settable=settable,
        gangs=gangs,
        idle_w=_idle_w(nodes, claims, kinds) + host_w,
        next_active_s=_next_active_s(trigger, now_s, state["last_active_s"], settings),
        measured_w=drawn_w - services_w + asleep_w if at_rest else float("nan"),
        measures=settings.measures_controls and any(settable),
        measuring=frozenset(JobId(row["job_id"]) for row in measuring),
        placement=settings.placement,
        graphs={row["id"]: graph for row in jobs if row["layout"] and (graph := _graph(row["layout"]))},
        services=_waiting_services(jobs, nodes, table, eligible),
        services_gpus=sum(map(len, standing.values())),
        services_w=services_w,
        network=replace(settings.network, server_gpus=max((len(row["devices"]) for row in nodes), default=1)),
    )
    return Loaded(snapshot, state["policy"], state["parameters"], state["memory"], told)


def _next_active_s(trigger: Trigger, now_s: float, last_s: float | None, settings: SchedulerSettings) -> float:
    """Return by when the next active round is held, UTC seconds: it is due then but for the tick that may pass."""
    due_s = now_s + settings.round_interval_s
    if trigger is Trigger.PASSIVE:
        due_s = now_s if last_s is None else max(last_s + settings.round_interval_s, now_s)
    return due_s + settings.tick_s


@lru_cache(maxsize=4_096)
def _graph(layout: str) -> JobGraph | None:
    """Return the graph of a layout; None of one that was accepted under older rules and holds no longer."""
    try:
        return ParallelLayout.model_validate_json(layout).graph()
    except ValidationError:
        return None


Kind = tuple[str, float, bool]
"""What makes nodes interchangeable to a job: GPU model, memory of each GPU (GiB), and whether images run there."""


def _kind(node: Any) -> Kind:
    first = node["devices"][0]
    return first["model"], float(first["memory_gib"]), node["containers"]


def _settable(nodes: list[Any], kind: Kind) -> frozenset[ControlKind]:
    """Return what every device of a kind says it takes."""
    flags = {ControlKind.POWER_LIMIT: "can_set_power_limit", ControlKind.CLOCK: "can_set_clock"}
    devices = [device for row in nodes if _kind(row) == kind for device in row["devices"]]
    return frozenset(each for each, flag in flags.items() if all(device.get(flag) for device in devices))


def _is_awake(row: Any) -> bool:
    """Whether a node's newest readings are of a node that is on, and not of one that went off since."""
    return row["power"] not in (PowerState.OFF, PowerState.WAKING)


def _drawn_w(nodes: list[Any], hosts: Mapping[str, float]) -> float:
    """Return what GPUs draw, as the newest heartbeats have it, and hosts; NaN where no GPU was heard of."""
    readings = [each["power_w"] for row in nodes if _is_awake(row) for each in row["readings"]]
    return sum(readings) + sum(hosts.values()) if readings else float("nan")


def _host_w(nodes: list[Any], hosts: Mapping[str, float], kinds: list[Kind]) -> Floats:
    """Return what hosts of each kind of node draw per GPU, 0 where no meter has told: (n_gpu_models,) watts."""
    drawn_w, gpus = np.zeros((2, len(kinds)))
    for row in nodes:
        if row["id"] in hosts:
            drawn_w[kinds.index(_kind(row))] += hosts[row["id"]]
            gpus[kinds.index(_kind(row))] += len(row["devices"])
    return drawn_w / np.maximum(gpus, 1)


def _idle_w(nodes: list[Any], claims: list[Any], kinds: list[Kind]) -> Floats:
    """Return what a free device of each kind draws now, or its board by what is known of it: (n_gpu_models,) watts."""
    taken = {(claim["node_id"], claim["device"]) for claim in claims}
    draws: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for row in filter(_is_awake, nodes):
        draws[_kind(row)] += [each["power_w"] for each in row["readings"] if (row["id"], each["index"]) not in taken]
    means = [sum(each) / len(each) if each else board_of(kind[0]).idle_w for kind, each in draws.items()]
    return np.array(means, dtype=np.float64)


def _speed_curves(gangs: tuple[Gangs, ...]) -> tuple[list[int], Floats]:
    """Return the row of each kind of job in ``Snapshot.speed_curves``, -1 for none, and those."""
    known = [next(iter(tables.values()), None) for tables in gangs]
    curves = [learned_rows.speed_curve(table) for table in known if table is not None]
    rows = np.where([table is not None for table in known], np.cumsum([table is not None for table in known]) - 1, -1)
    return rows.tolist(), np.array(curves).reshape(len(curves), learned_rows.WIDEST)


def _job_table(
    rows: list[Any],
    profiles: list[Any],
    eligible: Bools,
    now_s: float,
    curve_rows: dict[str, int],
    speed_rows: list[int],
    told: Told | None,
) -> JobTable:
    def floats(column: str) -> Floats:
        return np.array([row[column] for row in rows], dtype=np.float64)

    def ints(column: str) -> Ints:
        return np.array([row[column] for row in rows], dtype=np.int64)

    gpus, since_s = ints("gpus"), floats("since_s")
    gpu_power_w = floats("gpu_power_w")
    gpu_power_w[floats("gpu_s") < 1] = np.nan
    base, now = _efficiencies(rows, profiles)
    of_kind = [curve_rows.get(row["profile"], -1) for row in rows]
    attained_gpu_s = floats("attained_gpu_s") + gpus * np.maximum(now_s - since_s, 0)
    progress = np.minimum(floats("done") / floats("work"), 1.0)
    just_told = dict(zip(told.job_ids, told.gpu_s, strict=True)) if told else {}
    told_gpu_s = np.array([just_told.get(row["id"], row["told_gpu_s"]) for row in rows], dtype=np.float64)
    return JobTable(
        ids=tuple(JobId(row["id"]) for row in rows),
        tenants=tuple(row["tenant_id"] for row in rows),
        submitted_s=floats("submitted_s"),
        waiting_since_s=since_s,
        phase=np.array([_phase(row) for row in rows], dtype=np.int64),
        min_gpus=ints("min_gpus"),
        max_gpus=ints("max_gpus"),
        step_gpus=ints("step_gpus"),
        gpus=gpus,
        eligible=eligible,
        preemptible=np.array([row["preemptible"] for row in rows], dtype=np.bool_),
        priority=ints("priority"),
        deadline_s=floats("deadline_s"),
        attained_gpu_s=attained_gpu_s,
        energy_j=floats("energy_j"),
        carbon_gco2=floats("carbon_gco2"),
        gpu_power_w=gpu_power_w,
        efficiency_base=base,
        efficiency_now=now,
        progress=progress,
        remaining_s=remaining_s(told_gpu_s, progress, attained_gpu_s, floats("min_gpus")),
        placements=tuple(_placement(row["shares"]) for row in rows),
        speed_curve=np.array([speed_rows[at] if at >= 0 else -1 for at in of_kind], dtype=np.int64),
        power_limit_w=floats("power_limit_w"),
        clock_mhz=floats("clock_mhz"),
        control_curve=np.array(of_kind, dtype=np.int64),
    )


def _phase(row: Any) -> Phase:
    # A gang that is being stopped for any reason is on its way out, whatever its job's state says.
    return Phase.PREEMPTING if row["allocation_state"] == "stopping" else PHASES[row["state"]]


def _placement(shares: list[Any] | None) -> Placement | None:
    if shares is None:
        return None
    return Placement(tuple(NodeShare(NodeId(share["node_id"]), tuple(share["devices"])) for share in shares))


def _sort_out(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the jobs of the table, and the standing services that start or run: they are in none.

    A service that waits is in the table, and so is one that stops: as any gang that is on its way out.
    """
    stands = [
        row["service"] is not None and row["gpus"] > 0 and _phase(row) is not Phase.PREEMPTING  # holds devices
        for row in rows
    ]
    return [row for row, out in zip(rows, stands, strict=True) if not out], list(compress(rows, stands))


def _held_on(nodes: list[Any], services: list[Any]) -> dict[str, set[int]]:
    """Return the devices that standing services hold, by node."""
    there = {row["id"]: {device["index"] for device in row["devices"]} for row in nodes}
    held: dict[str, set[int]] = {}
    for share in (share for row in services for share in row["shares"]):
        node_id = share["node_id"]
        if node_id in there:
            held[node_id] = held.get(node_id, set()) | (there[node_id] & set(share["devices"]))
    return held


def _services_w(nodes: list[Any], hosts: Mapping[str, float], held: Mapping[str, set[int]]) -> float:
    """Return what those devices draw, as the newest heartbeats have it, with their share of the host, watts."""
    drawn_w = 0.0
    for row in nodes:
        devices = held.get(row["id"])
        if devices and _is_awake(row):
            drawn_w += sum(each["power_w"] for each in row["readings"] if each["index"] in devices)
            drawn_w += hosts.get(row["id"], 0.0) * len(devices) / len(row["devices"])
    return drawn_w


def _waiting_services(
    rows: list[Any], nodes: list[Any], table: NodeTable, eligible: Bools
) -> tuple[ServiceInstance, ...]:
    """Return the standing services that wait, oldest first."""
    waiting = [at for at, row in enumerate(rows) if row["service"] is not None and row["state"] == "queued"]
    waiting.sort(key=lambda at: (rows[at]["submitted_s"], rows[at]["id"]))
    services: list[ServiceInstance] = []
    for at in waiting:
        terms, gpus = rows[at]["service"], rows[at]["min_gpus"]
        zone, labels = terms.get("zone"), terms.get("node_labels", {})
        place = (
            (zone is None or row["zone"] == zone)
            and labels.items() <= row["labels"].items()
            and len(row["devices"]) >= gpus
            for row in nodes
        )
        may_run = np.fromiter(place, np.bool_, len(nodes)) & table.schedulable & eligible[at, table.gpu_model]
        services.append(ServiceInstance(JobId(rows[at]["id"]), gpus, may_run))
    return tuple(services)


def _eligible(rows: list[Any], kinds: list[Kind]) -> Bools:
    answers: dict[tuple[Any, ...], list[bool]] = {}
    table: list[list[bool]] = []
    for row in rows:
        asked = (row["model"], row["memory_gib"], row["needs_container"])
        if asked not in answers:
            model, memory_gib, needs_container = asked
            answers[asked] = [
                (model is None or model == name)
                and (memory_gib is None or memory_gib <= memory)
                and (containers or not needs_container)
                for name, memory, containers in kinds
            ]
        table.append(answers[asked])
    eligible = np.array(table, dtype=np.bool_).reshape(len(rows), len(kinds))
    # A job that is being cancelled or held claims nothing of what it releases: it will not come back for it.
    # Nor does a service that stops: should it come back, it is placed before all jobs.
    leaves = [row["leaves"] or (row["service"] is not None and row["state"] != "queued") for row in rows]
    eligible[np.array(leaves, dtype=np.bool_)] = False
    return eligible


def _efficiencies(rows: list[Any], profiles: list[Any]) -> tuple[Floats, Floats]:
    """Return progress per joule at the minimum gang and at the present one, or the last one of a waiting job."""
    of_size: dict[tuple[str, int], float] = {}
    newest: dict[str, tuple[int, float]] = {}
    for profile in profiles:
        of_size[profile["job_id"], profile["gpus"]] = profile["efficiency"]
        newest[profile["job_id"]] = max(
            newest.get(profile["job_id"], (-1, 0.0)), (profile["generation"], profile["efficiency"])
        )
    base = [of_size.get((row["id"], row["min_gpus"]), np.nan) for row in rows]
    now = [
        of_size.get((row["id"], row["gpus"]), np.nan) if row["gpus"] else newest.get(row["id"], (0, np.nan))[1]
        for row in rows
    ]
    return np.array(base, dtype=np.float64), np.array(now, dtype=np.float64)


def _node_table(rows: list[Any], claims: list[Any], kinds: list[Kind], covers: Callable[[str], bool]) -> NodeTable:
    claimed: dict[str, set[int]] = {}
    for claim in claims:
        claimed.setdefault(claim["node_id"], set()).add(claim["device"])
    index = {kind: position for position, kind in enumerate(kinds)}
    return NodeTable(
        ids=tuple(NodeId(row["id"]) for row in rows),
        gpu_model=np.array([index[_kind(row)] for row in rows], dtype=np.int64),
        gpus=np.array([len(row["devices"]) for row in rows], dtype=np.int64),
        schedulable=np.array(
            [not row["draining"] and row["power"] != PowerState.GOING_DOWN for row in rows], dtype=np.bool_
        ),
        asleep=np.array([row["power"] == PowerState.OFF for row in rows], dtype=np.bool_),
        may_sleep=np.array([row["may_sleep"] and covers(row["id"]) for row in rows], dtype=np.bool_),
        free_devices=tuple(
            tuple(sorted({device["index"] for device in row["devices"]} - claimed.get(row["id"], set())))
            for row in rows
        ),
    )
