"""The ledger's lines, and the sums kept with them: footprints and profiles of jobs."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from services.contracts.nodes import EnergySource
from services.db.database import Connection, Database
from services.db.rows import columns_of, fetch_row, fetch_rows, rows_of
from services.telemetry.repository.lines import GANG_BEGIN, GANG_END

STORE_INTERVALS = """
INSERT INTO energy_intervals
    (node_id, boot_id, sequence, start_at, end_at, metered_gpu_energy_j, reported_gpu_energy_j)
SELECT i.* FROM unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[], $5::timestamptz[], $6::float8[],
    $7::float8[]) AS i (node_id, boot_id, sequence, start_at, end_at, metered_j, reported_j)
WHERE NOT EXISTS (
    SELECT FROM folded_intervals f
    WHERE f.node_id = i.node_id AND f.boot_id = i.boot_id AND f.through_sequence >= i.sequence)
ON CONFLICT DO NOTHING RETURNING node_id, boot_id, sequence
"""

BOOKED_THROUGH = """
SELECT n.id, coalesce((SELECT max(end_at) FROM energy_intervals i
                        WHERE i.node_id = n.id AND i.boot_id <> 'power' AND i.end_at <= now()), c.enrolled_at)
  FROM unnest($1::text[]) AS n (id) LEFT JOIN node_credentials c ON c.node_id = n.id
"""

GANGS = f"""
SELECT w.node_id, a.id, a.job_id, a.generation, a.gpus, a.leader, a.tenant_id, a.project, {GANG_BEGIN} AS began_at,
    {GANG_END} AS ended_at
FROM unnest($1::text[], $2::text[]) AS w (node_id, id) JOIN gangs a USING (id)
LEFT JOIN rank_statuses r ON r.allocation_id = a.id AND r.node_id = w.node_id
WHERE a.shares @> jsonb_build_array(jsonb_build_object('node_id', w.node_id))
"""

STORE_USAGES = """
INSERT INTO energy_usages (
    node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, cpu_energy_j, static_energy_j,
    source, cpu_source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, carbon_gco2, devices, provider,
    intensity_kind, fetched_at, release, basis, reported_energy_j)
SELECT u.node_id, u.boot_id, u.sequence, u.owner, u.job_id, u.start_at, u.end_at, u.gpus, u.gpu_j, u.cpu_j, u.static_j,
    u.source, u.cpu_source, u.zone, u.signal, u.intensity, u.estimated, $1, u.carbon, u.devices::int[], u.provider,
    u.kind, u.fetched_at, $2, u.basis, u.reported_j
FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::text[], $10::timestamptz[],
    $11::timestamptz[], $12::int[], $13::float8[], $14::float8[], $15::float8[], $16::text[], $17::text[],
    $18::float8[], $19::bool[], $20::float8[], $21::text[], $22::text[], $23::text[], $24::timestamptz[],
    $25::text[], $26::float8[])
    AS u (node_id, cpu_source, zone, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_j, cpu_j, static_j,
          source, signal, intensity, estimated, carbon, devices, provider, kind, fetched_at, basis, reported_j)
"""

# In the order in which heartbeats lock nodes.
COUNT_MARKED = """
WITH marked AS (
    SELECT n.id, w.counted FROM nodes n JOIN unnest($1::text[], $2::int[]) AS w (id, counted) USING (id)
    ORDER BY n.id FOR NO KEY UPDATE OF n
)
UPDATE nodes n SET marked_intervals = n.marked_intervals + marked.counted FROM marked WHERE n.id = marked.id
"""

ADD_FOOTPRINTS = """
INSERT INTO job_footprints AS known (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
SELECT * FROM unnest($1::text[], $2::float8[], $3::float8[], $4::float8[], $5::float8[], $6::float8[]) ORDER BY 1
ON CONFLICT (job_id) DO UPDATE SET
    energy_j = known.energy_j + excluded.energy_j, gpu_energy_j = known.gpu_energy_j + excluded.gpu_energy_j,
    estimated_energy_j = known.estimated_energy_j + excluded.estimated_energy_j,
    carbon_gco2 = known.carbon_gco2 + excluded.carbon_gco2, gpu_s = known.gpu_s + excluded.gpu_s
"""

PROFILES = """
SELECT p.job_id, p.gpus, p.progress, p.energy_j, p.gpu_energy_j, p.duration_s, coalesce(p.last_done, 0) AS last_done,
    p.generation, coalesce(extract(epoch FROM p.since_at), 0)::float8 AS since_s
FROM job_profiles p JOIN unnest($1::text[], $2::int[]) AS w (job_id, gpus) USING (job_id, gpus)
ORDER BY p.job_id, p.gpus FOR UPDATE OF p
"""

STORE_PROFILES = """
INSERT INTO job_profiles AS known
    (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s, last_done, generation, since_at)
SELECT job_id, gpus, progress, energy_j, gpu_energy_j, duration_s, last_done, generation, to_timestamp(since_s)
FROM unnest($1::text[], $2::int[], $3::float8[], $4::float8[], $5::float8[], $6::float8[], $7::float8[], $8::int[],
    $9::float8[])
    AS p (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s, last_done, generation, since_s) ORDER BY 1, 2
ON CONFLICT (job_id, gpus) DO UPDATE SET
    progress = excluded.progress, energy_j = excluded.energy_j, gpu_energy_j = excluded.gpu_energy_j,
    duration_s = excluded.duration_s, last_done = excluded.last_done, generation = excluded.generation,
    since_at = excluded.since_at
"""

LAST_USED = """
SELECT intensity_gco2_per_kwh AS gco2_per_kwh, signal, provider, fetched_at
FROM energy_usages WHERE zone = $1 AND start_at <= now() ORDER BY start_at DESC LIMIT 1
"""

UNBOOKED = """
SELECT id, node_id, start_at, end_at, power_w, zone FROM (
    SELECT *, row_number() OVER (PARTITION BY zone ORDER BY id) AS place FROM (
        SELECT d.*, coalesce(
            (SELECT z.zone FROM node_zones z WHERE z.node_id = d.node_id
             ORDER BY z.since <= d.start_at DESC, CASE WHEN z.since <= d.start_at THEN z.since END DESC, z.since
             LIMIT 1), n.zone) AS zone
        FROM node_power_periods d JOIN nodes n ON n.id = d.node_id
        WHERE d.power_w > 0
            AND NOT EXISTS (
                SELECT FROM energy_intervals e WHERE e.node_id = d.node_id AND e.boot_id = $1 AND e.sequence = d.id)
            AND NOT EXISTS (
                SELECT FROM folded_intervals f
                WHERE f.node_id = d.node_id AND f.boot_id = $1 AND f.through_sequence >= d.id)
    ) AS unbooked
) AS placed WHERE place <= 100 ORDER BY id
"""


MEASURED = frozenset({EnergySource.COUNTER, EnergySource.SAMPLED})


class IntervalKey(NamedTuple):
    """What identifies an interval."""

    node_id: str
    boot_id: str
    sequence: int


class IntervalRow(NamedTuple):
    """An interval of a node, as it is stored."""

    node_id: str
    boot_id: str
    sequence: int
    start_at: datetime
    end_at: datetime
    metered_gpu_energy_j: float
    reported_gpu_energy_j: float | None


class GangRow(NamedTuple):
    """A gang that has a share on a node; ``leader`` is the node of its rank 0.

    ``began_at`` is when it began there, and ``ended_at`` when it ended there; None while that is not known.
    """

    node_id: str
    id: str
    job_id: str
    generation: int
    gpus: int
    leader: str
    tenant_id: str
    project: str
    began_at: datetime | None
    ended_at: datetime | None


class UsageRow(NamedTuple):
    """A line of the ledger, without PUE and release, which all lines share; ``devices`` look like ``{0,1}``."""

    node_id: str
    cpu_source: str
    zone: str
    boot_id: str
    sequence: int
    owner: str
    job_id: str | None
    start_at: datetime
    end_at: datetime
    gpus: int
    gpu_energy_j: float
    cpu_energy_j: float
    static_energy_j: float
    source: str
    signal: str
    intensity_gco2_per_kwh: float
    intensity_estimated: bool
    carbon_gco2: float
    devices: str
    provider: str | None
    intensity_kind: str | None
    fetched_at: datetime | None
    basis: str | None
    reported_energy_j: float | None

    @property
    def energy_j(self) -> float:
        """GPU, CPU and static energy."""
        return self.gpu_energy_j + self.cpu_energy_j + self.static_energy_j

    @property
    def estimated_energy_j(self) -> float:
        """The part that was not measured: static watts are always configuration."""
        gpu = 0.0 if self.source in MEASURED else self.gpu_energy_j
        cpu = 0.0 if self.cpu_source in MEASURED else self.cpu_energy_j
        return gpu + cpu + self.static_energy_j

    @property
    def gpu_s(self) -> float:
        """GPU seconds held."""
        return self.gpus * max(0.0, (self.end_at - self.start_at).total_seconds())


class Profile(NamedTuple):
    """Progress and energy of one job at one gang size, over all its gangs of that size."""

    progress: float  #: Work done, in the job's unit
    energy_j: float  #: GPU, CPU and static energy it took
    gpu_energy_j: float  #: The GPUs' part
    duration_s: float  #: How long it was measured
    last_done: float  #: The newest gang's last report
    generation: int  #: The newest gang that counted
    since_s: float  #: When that gang first reported progress, UTC seconds; what came before does not count


class FootprintRow(NamedTuple):
    """An addition to a job's footprint."""

    job_id: str
    energy_j: float
    gpu_energy_j: float
    estimated_energy_j: float
    carbon_gco2: float
    gpu_s: float


class LastUsedRow(NamedTuple):
    """The intensity of a line."""

    gco2_per_kwh: float
    signal: str
    provider: str | None
    fetched_at: datetime | None


class SleepRow(NamedTuple):
    """A period for which a node was off or booting."""

    id: int
    node_id: str
    start_at: datetime
    end_at: datetime
    power_w: float
    zone: str


async def store_intervals(connection: Connection, intervals: Sequence[IntervalRow]) -> list[IntervalKey]:
    """Store intervals of nodes; return those that were not stored before."""
    records = await connection.fetch(STORE_INTERVALS, *columns_of(IntervalRow, intervals).values())
    return rows_of(IntervalKey, records)


async def booked_through(database: Database, node_ids: Collection[str]) -> dict[str, datetime]:
    """Return the end of the newest interval of each of these nodes, or when it became one; left out if neither is."""
    async with database.connection() as connection:
        return {row[0]: row[1] for row in await connection.fetch(BOOKED_THROUGH, sorted(node_ids)) if row[1]}


async def gangs_on(connection: Connection, named: Collection[tuple[str, str]]) -> dict[tuple[str, str], GangRow]:
    """Return the gangs that have a share on the node that they are named with, by node and id of the allocation."""
    ordered = sorted(named)
    columns = [node for node, _ in ordered], [allocation for _, allocation in ordered]
    rows = await fetch_rows(connection, GangRow, GANGS, *columns)
    return {(row.node_id, row.id): row for row in rows}


async def store_usages(connection: Connection, pue: float, release: str, usages: Sequence[UsageRow]) -> None:
    """Store lines of the ledger, priced with a PUE by the method of a release."""
    await connection.execute(STORE_USAGES, pue, release, *columns_of(UsageRow, usages).values())


async def count_marked(connection: Connection, counts: Mapping[str, int]) -> None:
    """Add to nodes' numbers of intervals that are not booked as their meters measured them."""
    await connection.execute(COUNT_MARKED, list(counts), list(counts.values()))


async def add_footprints(connection: Connection, footprints: Sequence[FootprintRow]) -> None:
    await connection.execute(ADD_FOOTPRINTS, *columns_of(FootprintRow, footprints).values())


async def lock_profiles(connection: Connection, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Profile]:
    """Return the existing profiles by job and gang size, locked until the transaction ends."""
    jobs, sizes = [job for job, _ in wanted], [size for _, size in wanted]
    records = await connection.fetch(PROFILES, jobs, sizes)
    return {(record["job_id"], record["gpus"]): Profile(*list(record)[2:]) for record in records}


async def store_profiles(connection: Connection, profiles: Mapping[tuple[str, int], Profile]) -> None:
    """Store profiles by job and gang size, replacing existing ones."""
    columns = zip(*((*key, *profile) for key, profile in profiles.items()), strict=True)
    await connection.execute(STORE_PROFILES, *map(list, columns))


async def last_used(database: Database, zone: str) -> LastUsedRow | None:
    """Return the intensity of the newest line of a zone; those of a node whose clock is ahead do not count."""
    return await database.run(fetch_row, LastUsedRow, LAST_USED, zone)


async def unbooked_sleeps(database: Database, life: str) -> list[SleepRow]:
    """Return the periods of sleep that have no line of the life ``life`` yet: at most a hundred of each zone."""
    return await database.run(fetch_rows, SleepRow, UNBOOKED, life)
