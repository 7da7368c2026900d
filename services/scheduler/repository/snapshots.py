"""What a snapshot is made of: jobs, nodes, and what is known about both, in one consistent view."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.contracts.engines import OURS, QUEUEING
from services.db import locks
from services.db.database import Connection, Database
from services.db.job_specs import (
    ASKED_GPUS,
    BATCH_MAX,
    BATCH_MIN,
    DEADLINE,
    FAMILY,
    FLEX,
    GLOBAL_BATCH,
    GPU_MEMORY_GIB,
    GPU_MODEL,
    GPU_NEAR,
    GPU_WITHIN,
    GPU_ZONE,
    MAX_GPUS,
    MAY_SHARE_GPU,
    MIN_GPUS,
    PREEMPTIBLE,
    PRIORITY,
    SLICE,
    STEP_GPUS,
    WORK_TOTAL,
)
from services.db.rows import fetch_rows
from services.scheduler.repository import orders, profiles, reservations, rounds
from services.scheduler.repository.documents import Json, StoredDevice, StoredReading, StoredServiceTerms, StoredShare
from services.scheduler.repository.jobs import KEEPS_CHECKPOINTS
from services.scheduler.repository.orders import OrderRow
from services.scheduler.repository.reservations import EndingRow, ReservationRow

_COLUMNS = f"""
SELECT j.id, j.tenant_id, j.state,
       extract(epoch FROM j.submitted_at)::float8 AS submitted_s,
       extract(epoch FROM coalesce(a.started_at, j.queued_at, j.submitted_at))::float8 AS since_s,
       {MIN_GPUS} AS min_gpus, {MAX_GPUS} AS max_gpus, {STEP_GPUS} AS step_gpus,
       {ASKED_GPUS} AS asked_gpus,
       {GPU_MODEL} AS gpu_model, {GPU_MEMORY_GIB} AS memory_gib, {GPU_ZONE} AS zone,
       {SLICE} AS slice,
       (j.spec ->> 'image') IS NOT NULL AS needs_container,
       j.spec ->> 'layout' AS layout,
       {PREEMPTIBLE} AS preemptible, {MAY_SHARE_GPU} AS may_share_gpu, {PRIORITY} AS priority,
       coalesce(extract(epoch FROM {DEADLINE})::float8, 'infinity') AS deadline_s,
       {WORK_TOTAL} AS work, {FLEX} AS flex, {profiles.KIND} AS kind, j.labels ->> 'kind' AS kind_label,
       {BATCH_MIN} AS batch_min, {BATCH_MAX} AS batch_max, coalesce({GLOBAL_BATCH}, {BATCH_MIN}) AS base_batch,
       {FAMILY} AS family, j.spec -> 'service' AS service,
       j.cancel_requested OR j.hold_requested OR j.cell IS NOT NULL AS leaves,
       j.attained_gpu_s, a.state AS allocation_state, coalesce(a.gpus, 0) AS gpus, a.shares,
       a.power_limit_w, a.clock_mhz, a.unordered_w,
       coalesce(f.energy_j, 0) AS energy_j, coalesce(f.carbon_gco2, 0) AS carbon_gco2,
       coalesce(a.unlimited_w, f.gpu_energy_j / nullif(f.gpu_s, 0)) AS gpu_power_w, coalesce(f.gpu_s, 0) AS gpu_s,
       p.done, q.gpu_s AS predicted_gpu_s, CASE WHEN q.seen AND q.gpu_s > 0 THEN q.spread_gpu_s END AS spread_gpu_s,
       p.noise_scale, j.engine, coalesce(j.labels ->> 'queue', '') AS queue,
       j.reason, extract(epoch FROM j.expected_start_at)::float8 AS expected_start_s, {GPU_WITHIN} AS within,
       {GPU_NEAR} AS near"""
_LIVE = """
  FROM jobs j
  LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
  LEFT JOIN footprints f ON f.job_id = j.id
  LEFT JOIN reported_work p ON p.job_id = j.id
  LEFT JOIN job_predictions q ON q.job_id = j.id AND q.predicted_at IS NOT NULL
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting') AND (j.cell IS NULL OR a.id IS NOT NULL)
   AND a.gpus IS DISTINCT FROM 0
   AND NOT (EXISTS (SELECT FROM held_projects)  -- asked once: mostly there is none
            AND j.state = 'queued' AND j.spec -> 'service' IS NULL AND EXISTS (
       SELECT FROM held_projects b WHERE b.tenant_id = j.tenant_id AND b.project IN ('', j.project)))
"""
_OF_GATED = " AND (NOT j.gated OR j.id = ANY($1::text[]))"
_BY_ID = ' ORDER BY j.id COLLATE "C"'
JOBS = f"{_COLUMNS} {_LIVE}"
JOBS_BY_ID = f"{JOBS} AND j.id = ANY($1::text[]) {_BY_ID}"
VERSIONS = f"""
SELECT j.id, j.xmin, coalesce(a.xmin, '0'), coalesce(f.version, '0'), coalesce(p.version, '0'), coalesce(q.xmin, '0')
{_LIVE}
"""
# Jobs beyond their project's budget are not there to be started; admission holds them and says why. Nor is a run of
# which its engine has not said where it is (Slurm does not while a job completes): nothing can be decided about it.

SPECS = "SELECT id, tenant_id, spec FROM jobs WHERE id = ANY($1::text[]) ORDER BY id"

EFFICIENCIES = """
SELECT r.job_id, r.gpus, r.generation, r.progress / r.energy_j AS progress_per_j
  FROM job_profiles r JOIN jobs j ON j.id = r.job_id
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
   AND r.duration_s >= $1 AND r.energy_j > 0 AND r.progress > 0
"""

NODES = """
SELECT n.id, n.zone, n.labels, n.devices, n.readings, n.draining, n.containers, n.power,
       n.engine = 'wattshift'
           AND coalesce(p.state = 'off'
                OR p.state = 'on' AND NOT p.pinned AND p.since + make_interval(secs => $1) <= now()
                   AND coalesce(p.stays_on_until <= now(), true), true) AS may_sleep,
       n.engine, to_jsonb(n.queues) AS queues
  FROM usable_nodes n LEFT JOIN node_power p ON p.node_id = n.id ORDER BY n.id
"""

# Nodes that get no new work, or some GPUs of which get none, and why not.
AWAY = """
SELECT n.id, n.zone, n.labels, n.devices, n.containers, n.engine, to_jsonb(n.queues) AS queues,
       CASE WHEN p.state = 'failed' THEN 'its power could not be switched'
            WHEN n.state <> 'up' OR NOT n.heard THEN 'it is silent'
            WHEN n.draining THEN 'it is drained'
            ELSE coalesce(n.closed, 'GPUs of it are out of service') END AS why
  FROM known_nodes n LEFT JOIN node_power p ON p.node_id = n.id LEFT JOIN usable_nodes u ON u.id = n.id
 WHERE NOT n.measures_only AND n.devices <> '[]'
   AND (u.id IS NULL OR u.draining OR EXISTS (SELECT FROM unusable_gpus h WHERE h.node_id = n.id))
 ORDER BY n.id
"""

ZONES = "SELECT DISTINCT zone FROM known_nodes WHERE state = 'up' AND NOT measures_only ORDER BY zone"

HOSTS = """
SELECT l.node_id, coalesce(sum(l.host_energy_j)
       / nullif(extract(epoch FROM max(l.end_at) - min(l.start_at))::float8, 0), 0) AS power_w
  FROM energy_lines l JOIN usable_nodes n ON n.id = l.node_id AND n.power NOT IN ('off', 'waking')
 WHERE l.start_at > now() - interval '60 seconds' AND l.boot_id <> 'power' GROUP BY l.node_id
"""

ASLEEP_W = """
SELECT count(*) FILTER (WHERE state = 'off' OR acted_at IS NULL) * $1::float8
       + count(*) FILTER (WHERE state = 'waking' AND acted_at IS NOT NULL) * $2::float8
  FROM node_power WHERE state IN ('off', 'waking')
"""

CLAIMS = "SELECT node_id, device FROM device_claims"

PARTITIONS = "SELECT node_id, gpu, sizes, owner, state FROM gpu_partitions"

UNUSABLE_GPUS = "SELECT node_id, gpu FROM unusable_gpus"

# What is left for GPUs here: jobs in cells count by the most that they may have there.
QUOTAS = f"""
SELECT tenant_id, greatest(max_gpus - coalesce((SELECT sum({MAX_GPUS}) FROM jobs j
    WHERE j.tenant_id = l.tenant_id AND j.cell <> '' AND j.ended_at IS NULL), 0), 0)::int AS gpus
  FROM tenant_limits l WHERE max_gpus IS NOT NULL
"""

IN_CELLS = f"""
SELECT tenant_id, sum({ASKED_GPUS})::int AS gpus FROM jobs j
 WHERE cell <> '' AND ended_at IS NULL AND state IN ('starting', 'running', 'preempting') GROUP BY 1
"""

GUARANTEES = "SELECT tenant_id, guaranteed_gpus AS gpus FROM tenant_limits WHERE guaranteed_gpus > 0"

QUEUEING_ENGINES = "SELECT name FROM known_engines WHERE kind = ANY($1::text[])"

NOISE_SCALES = f"""
SELECT {profiles.KIND} AS kind, exp(avg(ln(p.noise_scale))) AS noise_scale
  FROM reported_work p JOIN jobs j ON j.id = p.job_id
 WHERE p.noise_scale IS NOT NULL AND {profiles.KIND} = ANY($1::text[]) GROUP BY 1
"""

FLEXES = "SELECT tenant_id, flex FROM tenant_limits WHERE flex IS NOT NULL"

WEIGHTS = "SELECT tenant_id, share_weight AS weight FROM tenant_limits WHERE share_weight <> 1"

# A job that waits is bound to the nodes of its last gang, as `gangs.BIND` wrote; one that has a gang to those of that,
# where one of them keeps checkpoints to itself.
BOUND = f"""
SELECT j.id AS job_id, j.bound_to AS nodes FROM jobs j WHERE j.bound_to IS NOT NULL AND j.state = 'queued'
UNION ALL
SELECT a.job_id, ARRAY(SELECT s.share ->> 'node_id' FROM jsonb_array_elements(a.shares) WITH ORDINALITY AS s (share, at)
                        ORDER BY s.at)
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE EXISTS (SELECT FROM known_nodes WHERE checkpoints = 'local')  -- asked once: mostly there is none
   AND a.state <> 'ended' AND {KEEPS_CHECKPOINTS} AND EXISTS (
       SELECT FROM jsonb_array_elements(a.shares) s JOIN known_nodes n ON n.id = s ->> 'node_id'
        WHERE n.checkpoints = 'local')
"""

SAVES = """
SELECT j.id AS job_id, extract(epoch FROM p.saved_at)::float8 AS last_s, p.save_every_s AS every_s
  FROM jobs j JOIN reported_work p ON p.job_id = j.id
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting') AND p.saved_at IS NOT NULL
"""

MEASURED = "SELECT job_id FROM setting_measurements WHERE state = 'running'"


class JobRow(NamedTuple):
    """A job that waits or holds devices.

    Attributes:
        gpu_model, memory_gib, zone, needs_container: What it asks of each node; None: nothing.
        work, done: How much there is to do, and how much is done, in the job's own unit; None where it does not say.
        allocation_state, gpus, shares, power_limit_w, clock_mhz: Of its gang, if it has one.
        kind, kind_label: Its kind, as tables of profiles name it, and as its user does.
        gpu_power_w, gpu_s: Mean draw of one of its GPUs, that before anything limited its gang if that is known, and
            the GPU seconds over which the job was measured.
        batch_min, batch_max: The range of total batches that policies may choose, samples; None: the batch is the
            user's.
        engine, queue: What runs it, and the queue of that engine that it is in.
        reason, expected_start_s: Why it waits, and until when, UTC seconds, as stored.
        within, near: The levels in one domain of which its gang must lie, and should.
    """

    id: str
    tenant_id: str
    state: str
    submitted_s: float
    since_s: float  #: When its gang started, or else since when it has waited, UTC seconds
    min_gpus: int
    max_gpus: int
    step_gpus: int
    asked_gpus: int  #: The size that its user would ask for if it could have only one
    gpu_model: str | None
    memory_gib: float | None
    zone: str | None
    slice: str | None  #: The name of the slice that it needs instead of GPUs; None for all others
    needs_container: bool
    layout: str | None
    preemptible: bool
    may_share_gpu: bool
    priority: int
    deadline_s: float
    work: float | None
    flex: float | None  #: Its class, percent; None: its tenant's
    kind: str
    kind_label: str | None
    batch_min: int | None
    batch_max: int | None
    base_batch: float | None  #: The user's own batch; None where it is not known
    family: str | None
    service: StoredServiceTerms | None = None  #: The terms of a service instance; None for a training job
    leaves: bool = False  #: Whether it is to be cancelled, held or placed anew
    attained_gpu_s: float = 0.0
    allocation_state: str | None = None
    gpus: int = 0
    shares: list[StoredShare] | None = None
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    unordered_w: float | None = None  #: What a GPU drew before an order of the grid set its controls, 0 if unknown
    energy_j: float = 0.0
    carbon_gco2: float = 0.0
    gpu_power_w: float | None = None
    gpu_s: float = 0.0
    done: float | None = None
    predicted_gpu_s: float | None = None  #: Its predicted length; None where none is predicted yet
    spread_gpu_s: float | None = None  #: Standard deviation of that; None where nothing like it was seen before
    noise_scale: float | None = None  #: The gradient noise scale that it has reported, samples
    engine: str = OURS
    queue: str = ""
    reason: str | None = None
    expected_start_s: float | None = None
    within: str | None = None
    near: str | None = None


class SpecRow(NamedTuple):
    """What a job's user asked for."""

    id: str
    tenant_id: str
    spec: Json


class SavesRow(NamedTuple):
    """When a job that holds devices last said that it has saved its work, UTC seconds, and its last interval."""

    job_id: str
    last_s: float
    every_s: float | None


class EfficiencyRow(NamedTuple):
    """What a job did per joule with gangs of one size; ``generation`` is that of the last one."""

    job_id: str
    gpus: int
    generation: int
    progress_per_j: float


class AwayRow(NamedTuple):
    """A node whose GPUs, some or all, get no new work, and why not."""

    id: str
    zone: str
    labels: dict[str, str]
    devices: list[StoredDevice]
    containers: bool
    engine: str
    queues: list[str]
    why: str


class NodeRow(NamedTuple):
    """A node that takes work, or will once it is powered up.

    Attributes:
        engine, queues: What runs jobs there, and the queues of that engine that use it.
    """

    id: str
    zone: str
    labels: dict[str, str]
    devices: list[StoredDevice]
    readings: list[StoredReading]
    draining: bool  #: Whether it takes no new work, because an operator or the node itself wants that
    containers: bool
    power: str  #: On, off, or between the two
    may_sleep: bool  #: Whether a plan may power it down or up, provided that there is a hook for it
    engine: str
    queues: list[str]


class ClaimRow(NamedTuple):
    """A device that a gang holds."""

    node_id: str
    device: int


class PartitionRow(NamedTuple):
    """How a GPU is to be cut, and how far its node has got."""

    node_id: str
    gpu: int
    sizes: list[int]
    owner: str | None
    state: str


@dataclass(frozen=True)
class ClusterRows:
    """All that a snapshot is made of."""

    state: rounds.State
    jobs: Sequence[JobRow]
    unpredicted: list[SpecRow]  #: The specs of jobs whose lengths are not predicted yet
    efficiencies: list[EfficiencyRow]
    nodes: list[NodeRow]
    claims: list[ClaimRow]
    partitions: list[PartitionRow]
    unusable: frozenset[tuple[str, int]]  #: GPUs that get no new work, by node and number
    quotas: Mapping[str, int]  #: The most GPUs that a tenant may hold here
    in_cells: Mapping[str, int]  #: Those that it holds in cells
    guarantees: Mapping[str, int]  #: The GPUs that tenants are guaranteed
    queueing: frozenset[str]  #: Where there are guarantees, the engines with queues of their own
    weights: Mapping[str, float]  #: Tenants' shares relative to others, where they are not 1
    measured: list[str]
    hosts_w: Mapping[str, float]  #: What hosts draw, by node, watts
    asleep_w: float  #: What is configured for nodes that are off or booting, watts
    tables: list[profiles.TableRow]  #: What was learned about the kinds of these jobs
    noise_scales: Mapping[str, float] = field(default_factory=dict[str, float])
    """The geometric mean, by kind, of what jobs have reported, samples; for kinds of which a job here has reported
    none."""
    bound: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The jobs that may start only where their checkpoints are, and those nodes in order of rank."""
    away: Sequence[AwayRow] = ()
    flexes: Mapping[str, float] = field(default_factory=dict[str, float])
    """The classes of tenants' jobs that name none, percent."""
    orders: Sequence[OrderRow] = ()  #: The grid's orders, until the time after them is over
    reservations: Sequence[ReservationRow] = ()  #: Those ahead and in force
    saves: Sequence[SavesRow] = ()
    endings: Sequence[EndingRow] = ()  #: How gangs end, where that matters to a reservation


def query_of(query: str, of_gated: Sequence[str] | None) -> tuple[str, list[list[str]]]:
    """Return a query of live jobs, and its arguments.

    Args:
        of_gated: Of the jobs that may have to wait for others, those that hold GPUs or may start; None: all jobs.
    """
    return (query, []) if of_gated is None else (query + _OF_GATED, [[*of_gated]])


async def jobs(connection: Connection, of_gated: Sequence[str] | None = None) -> list[JobRow]:
    """Return the live jobs, in order of id; ``of_gated`` as for `query_of`."""
    if of_gated is None:
        return await fetch_rows(connection, JobRow, JOBS + _BY_ID)
    return await fetch_rows(connection, JobRow, JOBS + _OF_GATED + _BY_ID, [*of_gated])


async def cluster(
    connection: Connection,
    jobs: Sequence[JobRow],
    *,
    min_profile_s: float,
    node_min_on_s: float,
    node_standby_w: float,
    node_boot_w: float,
    unpredicted: Sequence[str],
    unscaled: Sequence[str],
    known_version: int | None = None,
    with_endings: bool = False,
) -> ClusterRows:
    """Return the live state.

    Args:
        connection: In a transaction that sees one state of the database throughout.
        min_profile_s: How long a gang of one size must have run before its efficiency counts.
        node_min_on_s: How long a node must have been on before plans may power it down.
        node_standby_w, node_boot_w: What nodes draw while they are off, and while they boot.
        unpredicted: The jobs whose specs are wanted.
        unscaled: The kinds of jobs for which the noise scale that other jobs have reported is wanted.
        known_version: As for `rounds.state`.
        with_endings: Whether it is wanted how gangs end even where nothing is reserved.
    """
    reserved = await reservations.live(connection)
    guarantees = await _pairs(connection, GUARANTEES)
    queueing = await connection.fetch(QUEUEING_ENGINES, [*QUEUEING]) if guarantees else []
    return ClusterRows(
        state=await rounds.state(connection, known_version),
        jobs=jobs,
        unpredicted=await fetch_rows(connection, SpecRow, SPECS, [*unpredicted]) if unpredicted else [],
        efficiencies=await fetch_rows(connection, EfficiencyRow, EFFICIENCIES, min_profile_s),
        nodes=await fetch_rows(connection, NodeRow, NODES, node_min_on_s),
        claims=await fetch_rows(connection, ClaimRow, CLAIMS),
        partitions=await fetch_rows(connection, PartitionRow, PARTITIONS),
        unusable=frozenset([(row[0], row[1]) for row in await connection.fetch(UNUSABLE_GPUS)]),
        quotas=await _pairs(connection, QUOTAS),
        in_cells=await _pairs(connection, IN_CELLS),
        guarantees=guarantees,
        queueing=frozenset([record[0] for record in queueing]),
        weights=await _pairs(connection, WEIGHTS),
        measured=[record[0] for record in await connection.fetch(MEASURED)],
        hosts_w=await _pairs(connection, HOSTS),
        asleep_w=await connection.fetchval(ASLEEP_W, node_standby_w, node_boot_w),
        tables=await fetch_rows(connection, profiles.TableRow, profiles.TABLES),
        noise_scales=await _pairs(connection, NOISE_SCALES, [*unscaled]) if unscaled else {},
        bound=await _pairs(connection, BOUND),
        away=await fetch_rows(connection, AwayRow, AWAY),
        flexes=await _pairs(connection, FLEXES),
        orders=await orders.live(connection),
        reservations=reserved,
        saves=await fetch_rows(connection, SavesRow, SAVES),
        endings=await fetch_rows(connection, EndingRow, reservations.ENDINGS) if reserved or with_endings else (),
    )


async def _pairs(connection: Connection, query: str, *arguments: object) -> dict[str, Any]:
    """Return the rows of a query as a mapping from its first column to its second."""
    return {row[0]: row[1] for row in await connection.fetch(query, *arguments)}


async def fixed_quotas(connection: Connection) -> dict[str, int]:
    """Return what tenants may hold here, of which no job that goes to a cell takes anything in this transaction."""
    await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.GPUS_HELD)
    return await _pairs(connection, QUOTAS)


async def zones(database: Database) -> list[str]:
    """Return the zones of the nodes that are up or asleep."""
    return await database.run(zones_seen)


async def zones_seen(connection: Connection) -> list[str]:
    """Return the same by a connection that is open."""
    return [record[0] for record in await connection.fetch(ZONES)]
