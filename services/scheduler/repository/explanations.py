"""What explanations of single jobs are made of, besides the snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from services.contracts.jobs import JobSpec
from services.db.database import Connection
from services.db.rows import fetch_row, fetch_rows
from services.scheduler.repository import profiles, rounds
from services.scheduler.repository.documents import Json, StoredShare

_NAMES = "energy_j", "gpu_energy_j", "carbon_gco2", "gpu_s", "estimated_energy_j"
_FIGURES = ", ".join(f"coalesce(f.{name}, 0) + coalesce(c.{name}, 0) AS {name}" for name in _NAMES)
_IN_CELLS = ", ".join(f"sum({name}) AS {name}" for name in _NAMES)

EXPLAINED = f"""
SELECT j.id, j.tenant_id, j.project, j.name, j.state, j.reason, j.detail, j.spec, j.submitted_at, j.queued_at,
       j.ended_at, j.expected_start_at, j.exit_code, j.generation, j.preemptions, j.restarts,
       j.number, j.array_index, j.engine, j.cell, {_FIGURES}
  FROM jobs j LEFT JOIN footprints f ON f.job_id = j.id
 CROSS JOIN (SELECT {_IN_CELLS} FROM cell_lines WHERE job_id = $1) c WHERE j.id = $1
"""

GANG = """
SELECT gpus, shares, started_at, running_at, power_limit_w, clock_mhz, stop_requested_at
  FROM allocations WHERE job_id = $1 AND state <> 'ended'
"""

HELD_S = """
SELECT coalesce(sum(extract(epoch FROM coalesce(ended_at, now()) - started_at)), 0)::float8
  FROM (SELECT started_at, ended_at FROM allocations WHERE job_id = $1
        UNION ALL SELECT started_at, ended_at FROM jobs WHERE id = $1 AND cell <> '') held
"""

SIZES = "SELECT gpus, progress, energy_j, duration_s FROM job_profiles WHERE job_id = $1 ORDER BY gpus"

GANGS = """
SELECT a.started_at, a.running_at, a.ended_at, a.gpus, n.devices -> 0 ->> 'model' AS gpu_model, a.batch_size,
       a.power_limit_w IS NOT NULL OR EXISTS (
           SELECT FROM settings_in_force s WHERE s.allocation_id = a.id AND s.power_limit_w IS NOT NULL
       ) AS was_limited
  FROM allocations a LEFT JOIN known_nodes n ON n.id = a.shares -> 0 ->> 'node_id'
 WHERE a.job_id = $1 ORDER BY a.generation
"""

# Of a gang over several nodes, what its first one reported.
LIMITS = """
SELECT c.allocation_id, c.gpus, n.devices -> 0 ->> 'model' AS gpu_model, c.power_limit_w,
       greatest(extract(epoch FROM c.until - c.since), 0)::float8 AS duration_s
  FROM (SELECT s.allocation_id, a.gpus, s.node_id, s.power_limit_w, s.since,
               coalesce(lead(s.since) OVER (PARTITION BY a.id ORDER BY s.revision), a.ended_at, now()) AS until
          FROM settings_in_force s JOIN allocations a ON a.id = s.allocation_id
         WHERE a.job_id = $1 AND s.node_id = a.shares -> 0 ->> 'node_id') c LEFT JOIN known_nodes n ON n.id = c.node_id
 WHERE c.power_limit_w IS NOT NULL
"""

NOISE_SCALE = "SELECT noise_scale FROM reported_work WHERE job_id = $1"

STORY_ENDS = 100  #: How many events of a job are read from each end of its story

STORY = f"""
WITH story AS (
    SELECT at, type, data, row_number() OVER (ORDER BY transaction_id, sequence) AS nth, count(*) OVER () AS of
      FROM job_events WHERE job_id = $1
)
SELECT at, type, data, nth, of FROM story WHERE nth <= {STORY_ENDS} OR nth > of - {STORY_ENDS} ORDER BY nth
"""

ENERGY_BY_ZONE = """
SELECT zone, sum(facility_energy_j) / 3.6e6 AS kwh, count(DISTINCT signal) = 1 AS one_signal, min(signal) AS signal
  FROM booked_energy WHERE job_id = $1 GROUP BY zone ORDER BY zone
"""

NAMES = "SELECT id, name FROM jobs WHERE id = ANY($1::text[])"

OF_PROJECT = "SELECT id FROM jobs WHERE id = ANY($1::text[]) AND project = $2"

QUEUED = "SELECT count(*) FROM jobs WHERE state = 'queued'"


TIME_LIMITS = """
SELECT id, (spec ->> 'time_limit_s')::float8 AS time_limit_s FROM jobs
 WHERE state IN ('queued', 'starting', 'running', 'preempting') AND spec ->> 'time_limit_s' IS NOT NULL
"""


class ExplainedRow(NamedTuple):
    """A job in any state, with its sums from the ledger."""

    id: str
    tenant_id: str
    project: str
    name: str
    state: str
    reason: str | None
    detail: str | None
    spec: Json
    submitted_at: datetime
    queued_at: datetime | None
    ended_at: datetime | None
    expected_start_at: datetime | None
    exit_code: int | None
    generation: int
    preemptions: int
    restarts: int
    number: int | None
    array_index: int | None
    engine: str
    cell: str | None
    energy_j: float
    gpu_energy_j: float
    carbon_gco2: float
    gpu_s: float
    estimated_energy_j: float


class SizeRow(NamedTuple):
    """What a job did with gangs of one size: progress in its own unit, energy and time."""

    gpus: int
    progress: float
    energy_j: float
    duration_s: float


class GangRecordRow(NamedTuple):
    """A gang that a job had, and whether a power limit was ever in force on its devices.

    ``gpu_model``: None where its node is no longer known.
    """

    started_at: datetime
    running_at: datetime | None
    ended_at: datetime | None
    gpus: int
    gpu_model: str | None
    batch_size: int | None
    was_limited: bool


class LimitRow(NamedTuple):
    """A period in which a gang of a job had a power limit; ``gpu_model`` as in ``GangRecordRow``."""

    allocation_id: str
    gpus: int
    gpu_model: str | None
    power_limit_w: float
    duration_s: float


class GangRow(NamedTuple):
    """The devices that a job holds, and the controls that are set on them."""

    gpus: int
    shares: list[StoredShare]
    started_at: datetime
    running_at: datetime | None
    power_limit_w: float | None
    clock_mhz: int | None
    stop_requested_at: datetime | None


class EventRow(NamedTuple):
    """An event: number ``nth`` of ``of``."""

    at: datetime
    type: str
    data: Json
    nth: int
    of: int


class ZoneEnergyRow(NamedTuple):
    """A job's facility energy in one zone; ``signal`` is one of those that it was charged by."""

    zone: str
    kwh: float
    one_signal: bool
    signal: str


@dataclass(frozen=True)
class Ledger:
    """What is stored about a job that has ended."""

    row: ExplainedRow
    sizes: Sequence[SizeRow]  #: What it did at each size
    gangs: Sequence[GangRecordRow]  #: In order
    limits: Sequence[LimitRow]
    tables: Sequence[profiles.TableRow]
    noise_scale: float | None  #: The gradient noise scale that it reported last, samples; None if it never did

    @property
    def gco2_per_j(self) -> float:
        """What the job emitted per joule; it must have used some energy."""
        return self.row.carbon_gco2 / self.row.energy_j


@dataclass(frozen=True)
class Facts:
    """What the database says about a job, besides the snapshot."""

    row: ExplainedRow
    gang: GangRow | None
    events: list[EventRow]  #: In order; of a long story, only the beginning and the end
    held_s: float  #: How long it has held GPUs, all its gangs together, seconds
    policy: str
    by_zone: Sequence[ZoneEnergyRow] = ()  #: The energy of one that has ended, including PUE
    ledger: Ledger | None = None  #: Of one that has ended

    @cached_property
    def spec(self) -> JobSpec:
        """What its user asked for."""
        return JobSpec.as_stored(self.row.spec)


async def facts(connection: Connection, job_id: str) -> Facts | None:
    """Return what is known about a job; None if there is no such job."""
    row = await fetch_row(connection, ExplainedRow, EXPLAINED, job_id)
    if row is None:
        return None
    policy = await rounds.active_policy(connection)
    found = Facts(
        row,
        await fetch_row(connection, GangRow, GANG, job_id),
        await fetch_rows(connection, EventRow, STORY, job_id),
        await connection.fetchval(HELD_S, job_id),
        "" if policy is None else policy.policy,
    )
    if row.ended_at is None:
        return found
    ledger = Ledger(
        row,
        await fetch_rows(connection, SizeRow, SIZES, job_id),
        await fetch_rows(connection, GangRecordRow, GANGS, job_id),
        await fetch_rows(connection, LimitRow, LIMITS, job_id),
        await fetch_rows(connection, profiles.TableRow, profiles.TABLES_OF_JOB, job_id),
        await connection.fetchval(NOISE_SCALE, job_id),
    )
    by_zone = await fetch_rows(connection, ZoneEnergyRow, ENERGY_BY_ZONE, job_id)
    return replace(found, ledger=ledger, by_zone=by_zone)


async def names(connection: Connection, job_ids: Sequence[str]) -> dict[str, str]:
    return {record["id"]: record["name"] for record in await connection.fetch(NAMES, list(job_ids))}


async def of_project(connection: Connection, job_ids: Sequence[str], project: str) -> set[str]:
    return {record["id"] for record in await connection.fetch(OF_PROJECT, list(job_ids), project)}


async def time_limits_s(connection: Connection) -> dict[str, float]:
    """Return the time limits of the live jobs that have one, seconds."""
    return {record["id"]: record["time_limit_s"] for record in await connection.fetch(TIME_LIMITS)}
