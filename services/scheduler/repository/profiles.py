"""What has been learned about kinds of jobs: the measured points, and the tables fitted to them."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from services.contracts.profiles import ControlInForce, ControlMeasurement
from services.db.database import Connection
from services.db.job_specs import BATCH_MIN, FAMILY, GLOBAL_BATCH, MIN_GPUS
from services.db.rows import fetch_messages, fetch_row, fetch_rows
from services.scheduler.repository.documents import StoredStepTimes

KIND = "coalesce(j.tenant_id || '/' || (j.labels ->> 'kind'), j.id)"
"""A kind of job, as the tables name it, of a row ``j`` of jobs: what is learned from a tenant's jobs is used only for
that tenant."""

NEWS = """
SELECT p.kind, p.gpu_model, p.setting AS control, max(p.measured_at) AS newest,
       coalesce((SELECT max((SELECT count(*) FROM jsonb_array_elements(n.devices) d WHERE d ->> 'parent' IS NULL))
                   FROM known_nodes n WHERE n.devices -> 0 ->> 'model' = p.gpu_model), 1) AS gpus_per_node
  FROM setting_points p LEFT JOIN setting_profiles f USING (kind, gpu_model, setting)
 WHERE NOT EXISTS (SELECT FROM setting_measurements m
                    WHERE m.state = 'running' AND (m.kind, m.gpu_model, m.setting) = (p.kind, p.gpu_model, p.setting))
 GROUP BY p.kind, p.gpu_model, p.setting, f.fitted_at
HAVING f.fitted_at IS NULL OR max(p.measured_at) > f.fitted_at LIMIT 1
"""

POINTS = f"""
SELECT p.gpus, p.nodes, p.local_batch, p.value, p.step_time_s, p.power_w, {FAMILY} AS family,
       CASE WHEN {BATCH_MIN} IS NOT NULL THEN coalesce({GLOBAL_BATCH}, {BATCH_MIN}) END AS base_batch
  FROM setting_points p LEFT JOIN jobs j ON j.id = p.job_id
 WHERE p.kind = $1 AND p.gpu_model = $2 AND p.setting = $3 ORDER BY p.measured_at DESC, p.gpus, p.value
"""

STORE = """
INSERT INTO setting_profiles (kind, gpu_model, setting, fitted_at, points, detail, gpus, settings, speed, power_w,
                              measured_gpus, time_mape, energy_mape, by_batch)
VALUES ($1, $2, $3, greatest(now(), $4), $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
ON CONFLICT (kind, gpu_model, setting) DO UPDATE SET
    gpus = excluded.gpus, settings = excluded.settings, speed = excluded.speed, power_w = excluded.power_w,
    measured_gpus = excluded.measured_gpus, points = excluded.points, time_mape = excluded.time_mape,
    energy_mape = excluded.energy_mape, detail = excluded.detail, fitted_at = excluded.fitted_at,
    by_batch = excluded.by_batch
"""

_FITTED = """
SELECT kind, gpu_model, setting AS control, gpus, settings AS values, speed, power_w,
       coalesce(time_mape + energy_mape, 0) AS power_error, by_batch::text AS by_batch
  FROM setting_profiles WHERE jsonb_array_length(gpus) > 0
"""

TABLES = f"""
{_FITTED} AND kind IN (SELECT {KIND} FROM jobs j WHERE j.state IN ('queued', 'starting', 'running', 'preempting'))
 ORDER BY fitted_at
"""

TABLES_OF_JOB = f"{_FITTED} AND kind = (SELECT {KIND} FROM jobs j WHERE j.id = $1) ORDER BY fitted_at"

JOB = f"""
SELECT j.tenant_id, j.project, {KIND} AS kind, coalesce(j.labels ->> 'kind', j.id) AS name,
       coalesce(a.gpus, {MIN_GPUS}) AS gpus
  FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended' WHERE j.id = $1
"""

LEARNED = f"""
SELECT gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, points, time_mape, energy_mape, detail,
       fitted_at, said.family, coalesce(said.batch_known, false) AS batch_known
  FROM setting_profiles f, LATERAL (
       SELECT (array_agg({FAMILY} ORDER BY p.measured_at DESC) FILTER (WHERE {FAMILY} <> ''))[1] AS family,
              bool_or(p.local_batch > 0) AS batch_known
         FROM setting_points p LEFT JOIN jobs j ON j.id = p.job_id
        WHERE (p.kind, p.gpu_model, p.setting) = (f.kind, f.gpu_model, f.setting)) said
 WHERE f.kind = $1 ORDER BY gpu_model, setting
"""

MEASUREMENTS = """
SELECT job_id, allocation_id, gpu_model, setting, gpus, state, detail, settings, position, began_at, ended_at
  FROM setting_measurements WHERE kind = $1 ORDER BY began_at DESC, allocation_id LIMIT 20
"""

IN_FORCE = """
SELECT s.allocation_id, s.node_id, s.revision, s.power_limit_w, s.clock_mhz, s.enforced_w, s.refused, s.since,
       a.state <> 'ended' AS current
  FROM settings_in_force s JOIN allocations a ON a.id = s.allocation_id
 WHERE a.job_id = $1 ORDER BY s.since DESC, s.node_id LIMIT 50
"""


class News(NamedTuple):
    """A kind of job on one GPU model with one control that has new points since it was last fitted."""

    kind: str
    gpu_model: str
    control: str
    newest: datetime
    gpus_per_node: int


class PointRow(NamedTuple):
    """What a gang did at one value of a control; an unknown batch is 0, an unknown family None.

    ``base_batch``: the user's own total batch, where policies may choose another; None elsewhere.
    """

    gpus: int
    nodes: int
    local_batch: float
    value: float
    step_time_s: float
    power_w: float
    family: str | None
    base_batch: float | None = None


class NewProfile(NamedTuple):
    """What was fitted: tables of (sizes x values), which are empty, with a detail, if nothing could be."""

    kind: str
    gpu_model: str
    control: str
    newest: datetime
    points: int
    detail: str = ""
    gpus: Sequence[int] = ()
    values: Sequence[float] = ()
    speed: Sequence[list[float]] = ()
    power_w: Sequence[list[float]] = ()
    measured_gpus: Sequence[int] = ()
    time_mape: float | None = None
    energy_mape: float | None = None
    by_batch: StoredStepTimes | None = None


class TableRow(NamedTuple):
    """The table of one kind of job on one GPU model with one control, and the error of its power, as a share.

    ``by_batch`` is a ``StoredStepTimes``, as JSON text.
    """

    kind: str
    gpu_model: str
    control: str
    gpus: list[int]
    values: list[float]
    speed: list[list[float]]
    power_w: list[list[float]]
    power_error: float
    by_batch: str | None


class ProfiledJob(NamedTuple):
    """A job's owner, its kind, its user's name for that kind, and the size of its gang."""

    tenant_id: str
    project: str
    kind: str
    name: str
    gpus: int


class LearnedRow(NamedTuple):
    """What was learned about a kind of job on one GPU model with one control."""

    gpu_model: str
    setting: str
    gpus: list[int]
    settings: list[float]
    speed: list[list[float]]
    power_w: list[list[float]]
    measured_gpus: list[int]
    points: int
    time_mape: float | None
    energy_mape: float | None
    detail: str
    fitted_at: datetime
    family: str | None
    batch_known: bool


async def news(connection: Connection) -> News | None:
    """Return one kind that has new points since it was last fitted and is not being measured; None if there is none."""
    return await fetch_row(connection, News, NEWS)


async def points(connection: Connection, kind: str, gpu_model: str, control: str) -> list[PointRow]:
    """Return what was measured of a kind of job, newest first."""
    return await fetch_rows(connection, PointRow, POINTS, kind, gpu_model, control)


async def job(connection: Connection, job_id: str) -> ProfiledJob | None:
    """Return a job's owner, its kind and its size; None if there is no such job."""
    return await fetch_row(connection, ProfiledJob, JOB, job_id)


async def learned(connection: Connection, kind: str) -> list[LearnedRow]:
    """Return what was learned about a kind of job."""
    return await fetch_rows(connection, LearnedRow, LEARNED, kind)


async def measurements(connection: Connection, kind: str) -> list[ControlMeasurement]:
    """Return the last measurements of a kind of job, newest first."""
    return await fetch_messages(connection, ControlMeasurement, MEASUREMENTS, kind)


async def in_force(connection: Connection, job_id: str) -> list[ControlInForce]:
    """Return what a job's devices were set to, newest first."""
    return await fetch_messages(connection, ControlInForce, IN_FORCE, job_id)
