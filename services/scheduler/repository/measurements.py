"""Gangs that are run at each value of one of their devices' controls in turn, and the points that result."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from services.db.database import Connection
from services.db.job_specs import GLOBAL_BATCH
from services.db.rows import fetch_rows
from services.scheduler.repository.documents import StoredDevice, StoredShare
from services.scheduler.repository.gangs import ControlledGang
from services.scheduler.repository.profiles import KIND

MEASURABLE = f"""
SELECT a.id, a.job_id, a.gpus, a.shares, {KIND} AS kind,
       (SELECT jsonb_agg(n.devices ORDER BY n.id) FROM known_nodes n
         WHERE a.shares @> jsonb_build_array(jsonb_build_object('node_id', n.id))) AS devices
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') ORDER BY a.job_id FOR UPDATE OF a
"""

HAS_FAILED = """
SELECT EXISTS (SELECT FROM setting_measurements WHERE kind = $1 AND job_id = $2 AND setting = $3 AND state = 'failed')
"""

BEGIN = """
INSERT INTO setting_measurements
    (allocation_id, job_id, kind, gpu_model, setting, gpus, nodes, settings, window_s, slice_s)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::float8, $9::float8 / 2) ON CONFLICT DO NOTHING RETURNING allocation_id
"""

RUNNING = f"""
SELECT m.allocation_id, m.job_id, m.kind, m.gpu_model, m.setting AS control, m.gpus, m.nodes, m.settings AS values,
       m.window_s, m.slice_s AS least_s, m.began_at, m.position,
       extract(epoch FROM now() - m.slice_since)::float8 AS elapsed_s,
       a.state AS allocation_state, a.shares, a.power_limit_w, a.clock_mhz, a.settings_revision, a.settings_refused,
       coalesce(a.batch_size, {GLOBAL_BATCH}) / m.gpus AS spec_batch
  FROM setting_measurements m JOIN allocations a ON a.id = m.allocation_id
  JOIN jobs j ON j.id = m.job_id WHERE m.state = 'running'
"""

LOCK = """
SELECT true FROM setting_measurements WHERE allocation_id = $1 AND position = $2 AND state = 'running' FOR UPDATE
"""

STEP = """
UPDATE setting_measurements SET position = $2, settings = $3, window_s = $4, slice_s = $5, slice_since = now()
 WHERE allocation_id = $1
"""

END = "UPDATE setting_measurements SET state = $2, detail = $3, ended_at = now() WHERE allocation_id = $1"

# The measurement, if there is one, of a gang whose controls a plan sets.
CUT = """
UPDATE setting_measurements SET state = 'cut', detail = 'A plan has set the gang meanwhile.', ended_at = now()
 WHERE allocation_id = $1 AND state = 'running'
"""

WITHOUT_POINT = """
SELECT value FROM setting_measurements m, jsonb_array_elements_text(m.settings) WITH ORDINALITY AS tried (value, at)
 WHERE m.allocation_id = $1 AND at <= m.position + 1 AND NOT EXISTS (
       SELECT FROM setting_points p WHERE p.job_id = m.job_id AND p.value = tried.value::float8
          AND (p.kind, p.gpu_model, p.setting, p.gpus) = (m.kind, m.gpu_model, m.setting, m.gpus)
          AND p.measured_at >= m.began_at)
 ORDER BY at
"""

# A point at the present value replaces an earlier one of the same configuration; a batch of 0: the job does not say.
KEEP = """
INSERT INTO setting_points
    (kind, gpu_model, setting, gpus, nodes, local_batch, value, step_time_s, power_w, elapsed_s, job_id)
SELECT kind, gpu_model, setting, gpus, nodes, $2, (settings ->> position)::float8, $3, $4, $5, job_id
  FROM setting_measurements WHERE allocation_id = $1
ON CONFLICT (kind, gpu_model, setting, gpus, nodes, local_batch, value) DO UPDATE SET
    step_time_s = excluded.step_time_s, power_w = excluded.power_w, elapsed_s = excluded.elapsed_s,
    job_id = excluded.job_id, measured_at = now()
"""


class MeasurableGang(NamedTuple):
    """A gang that is starting or running, locked; ``devices`` are those of its nodes, None for nodes that are gone."""

    id: str
    job_id: str
    gpus: int
    shares: list[StoredShare]
    kind: str
    devices: list[list[StoredDevice]] | None


class Measurement(NamedTuple):
    """A measurement under way, and its gang.

    Attributes:
        allocation_id, job_id, kind: The gang, its job, and the kind of job.
        gpu_model, control, gpus, nodes: What is measured, and on how many GPUs of how many nodes.
        allocation_state, shares, power_limit_w, clock_mhz, settings_revision, settings_refused: Of the allocation.
    """

    allocation_id: str
    job_id: str
    kind: str
    gpu_model: str
    control: str
    gpus: int
    nodes: int
    values: list[float]  #: The values to be tried, the default first
    window_s: float  #: How long an interval at one of them may last
    least_s: float  #: The time after which the next report ends an interval
    began_at: datetime
    position: int  #: Which of the values is in force
    elapsed_s: float | None
    allocation_state: str
    shares: list[StoredShare]
    power_limit_w: float | None
    clock_mhz: int | None
    settings_revision: int
    settings_refused: dict[str, str]
    spec_batch: float | None
    """Samples per GPU and step, as chosen for the gang or by the job's specification; None if neither says."""

    @property
    def gang(self) -> ControlledGang:
        """What the gang's devices are set to."""
        return ControlledGang(
            id=self.allocation_id,
            job_id=self.job_id,
            shares=self.shares,
            power_limit_w=self.power_limit_w,
            clock_mhz=self.clock_mhz,
            settings_refused=self.settings_refused,
        )


async def lock_measurable(connection: Connection, job_ids: Sequence[str]) -> list[MeasurableGang]:
    """Lock and return the gangs of these jobs that are starting or running."""
    return await fetch_rows(connection, MeasurableGang, MEASURABLE, list(job_ids))


async def begin(
    connection: Connection, gang: MeasurableGang, gpu_model: str, control: str, values: list[float], window_s: float
) -> bool:
    """Begin to measure ``values``, the default first, for ``window_s`` each; return whether that is new."""
    measured = gang.id, gang.job_id, gang.kind, gpu_model, control, gang.gpus, len(gang.shares)
    return await connection.fetchval(BEGIN, *measured, values, window_s) is not None


async def running(connection: Connection) -> list[Measurement]:
    """Return the measurements that are under way."""
    return await fetch_rows(connection, Measurement, RUNNING)


async def lock(connection: Connection, allocation_id: str, position: int) -> bool:
    """Lock a measurement; return whether it is under way and still at this position."""
    return await connection.fetchval(LOCK, allocation_id, position) is not None


async def values_without_point(connection: Connection, allocation_id: str) -> list[float]:
    """Return the values that were tried but gave no point."""
    return [float(record[0]) for record in await connection.fetch(WITHOUT_POINT, allocation_id)]
