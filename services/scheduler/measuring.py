"""Online profiling: a gang is run at each of its devices' settings in turn, and what it does there is kept.

A policy asks for it (``ProfileSettings``); the table ``setting_measurements`` holds how far it is, and every look takes
it one step further. A slice is counted by the agents from one report of progress to another, so that it holds whole
iterations. The default comes first and lasts until the job reports; a job that does not report, or whose devices
refuse, goes on at the default, and its events say why.

Every step is one transaction that names the step before it, so that any of them may be repeated or cut off anywhere.

Source: PowerFlow section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.contracts.nodes import SettingsStatus
from services.core.cycle.plan import ProfileSettings
from services.core.domain.settings import SettingKind
from services.db.pool import Pool
from services.kit.logging import Log
from services.scheduler.device_settings import COLUMNS, EVENT, write_settings
from services.scheduler.ingest import settings_of

log = Log(__name__)

LONGEST_S = 240.0
"""All slices together (PowerFlow's four minutes), and how long a job may take to report for the first time."""
LEAST_SHARE = 0.4
"""The lowest power limit that is tried on a board that does not name its own, as a share of its default."""

GANGS = """
SELECT a.id, a.job_id, a.gpus, a.shares, a.power_limit_w, a.clock_mhz, a.settings_refused,
       coalesce(j.labels ->> 'kind', j.id) AS kind,
       (SELECT jsonb_agg(n.devices ORDER BY n.id) FROM nodes n
         WHERE a.shares @> jsonb_build_array(jsonb_build_object('node_id', n.id))) AS devices
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') ORDER BY a.job_id FOR UPDATE OF a
"""

FAILED = """
SELECT detail FROM setting_measurements WHERE kind = $1 AND job_id = $2 AND setting = $3 AND state = 'failed' LIMIT 1
"""

BEGIN = """
INSERT INTO setting_measurements (allocation_id, job_id, kind, gpu_model, setting, gpus, nodes, settings, window_s)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING RETURNING allocation_id
"""

RUNNING = """
SELECT m.allocation_id AS id, m.job_id, m.kind, m.gpu_model, m.setting, m.gpus, m.nodes, m.settings, m.window_s,
       m.position, extract(epoch FROM now() - m.slice_since)::float8 AS slice_s,
       a.state AS allocation_state, a.shares, a.power_limit_w, a.clock_mhz, a.settings_revision, a.settings_refused
  FROM setting_measurements m JOIN allocations a ON a.id = m.allocation_id WHERE m.state = 'running'
"""

SAID = """
SELECT s.allocation_id, s.node_id, s.settings
  FROM rank_statuses s JOIN setting_measurements m ON m.allocation_id = s.allocation_id
 WHERE m.state = 'running' AND s.settings IS NOT NULL
"""

STEP = """
UPDATE setting_measurements SET position = $3, slice_since = now()
 WHERE allocation_id = $1 AND position = $2 AND state = 'running' RETURNING allocation_id
"""

END = """
UPDATE setting_measurements SET state = $3, detail = $4, ended_at = now()
 WHERE allocation_id = $1 AND position = $2 AND state = 'running' RETURNING allocation_id
"""

KEEP = """
INSERT INTO setting_points
    (kind, gpu_model, setting, gpus, nodes, local_batch, value, step_time_s, power_w, elapsed_s, job_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
ON CONFLICT (kind, gpu_model, setting, gpus, nodes, local_batch, value) DO UPDATE SET
    step_time_s = excluded.step_time_s, power_w = excluded.power_w, elapsed_s = excluded.elapsed_s,
    job_id = excluded.job_id, measured_at = now()
"""


@dataclass(frozen=True)
class Point:
    """What a gang did at one setting.

    Attributes:
        step_time_s: Seconds per unit of the job's own work.
        power_w: Mean draw of one of its GPUs.
        elapsed_s: How long was measured.
        local_batch: Samples per GPU and step; 0 where the job does not say.
    """

    step_time_s: float
    power_w: float
    elapsed_s: float
    local_batch: float


@dataclass(frozen=True)
class End:
    """A measurement is over. A ``failed`` one is not tried again for its job."""

    state: str
    detail: str


@dataclass(frozen=True)
class Next:
    """A slice is over, and what it showed; None where nothing could be seen in it."""

    point: Point | None


def settings_to_try(kind: SettingKind, devices: Sequence[Mapping[str, Any]], count: int) -> list[float]:
    """Return what to try on these devices, the default first and then downwards; evenly spread over what all take."""
    if kind is SettingKind.CLOCK:
        common = sorted(set.intersection(*(set(device["clocks_mhz"]) for device in devices)), reverse=True)
        picked = np.unique(np.linspace(0, len(common) - 1, min(count, len(common))).round().astype(np.int64))
        return [float(common[at]) for at in picked.tolist()]
    top = min(device["power_limit_w"] for device in devices)
    least = max(device.get("lowest_limit_w") or LEAST_SHARE * device["power_limit_w"] for device in devices)
    return np.unique(np.linspace(least, top, count).round())[::-1].tolist() if least < top else [float(top)]


async def begin(connection: Any, actions: Sequence[ProfileSettings], count: int) -> list[ProfileSettings]:
    """Note which gangs a plan has measured; return those that are. Repeated, or refused before, it does nothing."""
    rows = {row["job_id"]: row for row in await connection.fetch(GANGS, [action.job_id for action in actions])}
    begun: list[ProfileSettings] = []
    for action in actions:
        row = rows.get(action.job_id)
        if row is None or row["devices"] is None:
            continue
        name = action.kind.value
        devices = [device for node in row["devices"] for device in node]
        values = settings_to_try(action.kind, devices, count)
        if len(values) < 2 or await connection.fetchval(FAILED, row["kind"], row["job_id"], name) is not None:
            continue
        window_s = min(action.window_s, LONGEST_S / len(values))
        where = (devices[0]["model"], name, row["gpus"], len(row["shares"]))
        if await connection.fetchval(BEGIN, row["id"], row["job_id"], row["kind"], *where, values, window_s):
            data = {"allocation_id": row["id"], "setting": name, "settings": values, "window_s": window_s}
            await connection.execute(EVENT, row["job_id"], "job.profiling", data)
            begun.append(action)
    return begun


def point_of(said: Sequence[SettingsStatus], nodes: int, gpus: int) -> Point | None:
    """Return what the slices of a gang's nodes show together; None while one is missing or nothing was done.

    The node that reports most tells the time. Each node's draw is its own mean.
    """
    slices = [status.slice for status in said if status.slice is not None and status.slice.elapsed_s > 0]
    if len(slices) < nodes:
        return None
    lead = max(slices, key=lambda each: each.marks)
    power_w = sum(each.gpu_energy_j / each.elapsed_s for each in slices) / gpus
    if lead.marks < 2 or lead.work <= 0 or power_w <= 0:
        return None
    return Point(lead.elapsed_s / lead.work, power_w, lead.elapsed_s, lead.local_batch or 0.0)


def judge(row: Any, said: Mapping[str, SettingsStatus]) -> End | Next | None:
    """Return what comes next of a measurement whose slice is under way; None to wait.

    Args:
        row: As ``RUNNING`` gives it.
        said: What its nodes say of its settings.
    """
    if row["allocation_state"] in ("stopping", "ended"):
        return End("cut", "The gang has ended.")
    if row["setting"] in row["settings_refused"]:
        return End("failed", f"Its devices refuse: {row['settings_refused'][row['setting']]}")
    if row["allocation_state"] != "running":
        return None
    if row["slice_s"] is None:
        return Next(None)
    newest = [status for status in said.values() if status.revision == row["settings_revision"]]
    point = point_of(newest, row["nodes"], row["gpus"])
    if row["slice_s"] < row["window_s"]:
        return None
    if point is None and row["position"] == 0:
        why = f"It has reported no progress twice within {LONGEST_S:g} s."
        return End("failed", why) if row["slice_s"] >= LONGEST_S else None
    return Next(point)


class Measuring:
    """Takes measurements further; all that it knows is in the database."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def look(self) -> int:
        """Take every measurement one step further that is due; return how many were."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(RUNNING)
            said = settings_of(await connection.fetch(SAID)) if rows else {}
        moved = 0
        for row in rows:
            verdict = judge(row, said.get(row["id"], {}))
            if verdict is not None:
                moved += await self._carry_out(row, verdict)
        return moved

    async def _carry_out(self, row: Any, verdict: End | Next) -> bool:
        async with self._pool.transaction() as connection:
            await connection.fetchval("SELECT id FROM allocations WHERE id = $1 FOR UPDATE", row["id"])
            if isinstance(verdict, End):
                return await _end(connection, row, verdict)
            begins = row["slice_s"] is None
            following = row["position"] + (0 if begins else 1)
            values: list[float] = row["settings"]
            if following == len(values):
                moved = await _end(connection, row, End("done", ""))
            else:
                moved = bool(await connection.fetchval(STEP, row["id"], row["position"], following))
                if moved:
                    value = None if following == 0 else values[following]
                    await _set(connection, row, value, measure=True)
            if moved and verdict.point is not None:
                await _keep(connection, row, verdict.point)
            return moved


async def _keep(connection: Any, row: Any, point: Point) -> None:
    value = row["settings"][row["position"]]
    where = (row["kind"], row["gpu_model"], row["setting"], row["gpus"], row["nodes"], point.local_batch, value)
    await connection.execute(KEEP, *where, point.step_time_s, point.power_w, point.elapsed_s, row["job_id"])


async def _set(connection: Any, row: Any, value: float | None, *, measure: bool, **words: Any) -> None:
    kind = SettingKind(row["setting"])
    asked = value if value is None or kind is SettingKind.POWER_LIMIT else round(value)
    await write_settings(connection, row, {COLUMNS[kind]: asked}, row["settings_refused"], measure=measure, **words)


async def _end(connection: Any, row: Any, end: End) -> bool:
    if not await connection.fetchval(END, row["id"], row["position"], end.state, end.detail):
        return False
    event = {"done": "job.profiled", "failed": "job.profiling_failed"}.get(end.state)
    if row["allocation_state"] in ("starting", "running"):
        await _set(connection, row, None, measure=False, event=event, why={"detail": end.detail})
    log.info("measurement.ended", allocation=row["id"], kind=row["kind"], state=end.state, detail=end.detail)
    return True
