"""Online profiling: a gang is run at each of its devices' settings in turn, and what it does there is kept.

A policy asks for it (``ProfileControls``); the table ``setting_measurements`` holds how far it is, and every look takes
it one step further. A slice is counted by the agents from one report of progress to another, so that it holds whole
iterations, and ends with the first report after its share of time; a setting in whose slice the job did not report
twice is left out, and the events say which. The default comes first and lasts until the job reports. How often it does
says how many settings fit into four minutes from its first report: fewer, where reports are rare. A job that does not
report, or too rarely for two settings, or whose devices refuse, goes on at the default, and its events say why.

Every step is one transaction that names the step before it, so that any of them may be repeated or cut off anywhere.

Source: PowerFlow section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.contracts.nodes import ControlsStatus
from services.core.cycle.plan import ProfileControls
from services.core.domain.controls import ControlKind
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.ingest.reports import settings_of
from services.scheduler.learning.learned import KIND
from services.scheduler.power.device_controls import COLUMNS, EVENT, write_settings

log = Log(__name__)

LONGEST_S = 240.0
"""All slices together (PowerFlow's four minutes), and how long a job may take to report for the first time."""
LEAST_SHARE = 0.4
"""The lowest power limit that is tried on a board that does not name its own, as a share of its default."""
REPORTS = 3.0
"""Intervals between reports, at the default, that a slice leaves room for: it waits for its first and its last one,
which may come half as often at its setting."""
SHARE = 0.8
"""Of the rest, what is measured; what is left is for the nodes to set their devices and to be heard."""
TOO_RARE = "It reports progress every {:.0f} s: too rarely for a second setting."

GANGS = f"""
SELECT a.id, a.job_id, a.gpus, a.shares, a.power_limit_w, a.clock_mhz, a.settings_refused,
       {KIND} AS kind,
       (SELECT jsonb_agg(n.devices ORDER BY n.id) FROM nodes n
         WHERE a.shares @> jsonb_build_array(jsonb_build_object('node_id', n.id))) AS devices
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') ORDER BY a.job_id FOR UPDATE OF a
"""

FAILED = """
SELECT detail FROM setting_measurements WHERE kind = $1 AND job_id = $2 AND setting = $3 AND state = 'failed' LIMIT 1
"""

BEGIN = """
INSERT INTO setting_measurements
    (allocation_id, job_id, kind, gpu_model, setting, gpus, nodes, settings, window_s, slice_s)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::float8, $9::float8 / 2) ON CONFLICT DO NOTHING RETURNING allocation_id
"""

RUNNING = """
SELECT m.allocation_id AS id, m.job_id, m.kind, m.gpu_model, m.setting, m.gpus, m.nodes, m.settings, m.window_s,
       m.slice_s AS share_s, m.began_at, m.position, extract(epoch FROM now() - m.slice_since)::float8 AS slice_s,
       a.state AS allocation_state, a.shares, a.power_limit_w, a.clock_mhz, a.settings_revision, a.settings_refused,
       (j.spec ->> 'global_batch')::float8 / m.gpus AS spec_batch
  FROM setting_measurements m JOIN allocations a ON a.id = m.allocation_id
  JOIN jobs j ON j.id = m.job_id WHERE m.state = 'running'
"""

SAID = """
SELECT s.allocation_id, s.node_id, s.settings
  FROM rank_statuses s JOIN setting_measurements m ON m.allocation_id = s.allocation_id
 WHERE m.state = 'running' AND s.settings IS NOT NULL
"""

STANDS = """
SELECT true FROM setting_measurements WHERE allocation_id = $1 AND position = $2 AND state = 'running' FOR UPDATE
"""

STEP = """
UPDATE setting_measurements SET position = $2, settings = $3, window_s = $4, slice_s = $5, slice_since = now()
 WHERE allocation_id = $1
"""

END = """
UPDATE setting_measurements SET state = $2, detail = $3, ended_at = now() WHERE allocation_id = $1
"""

UNSEEN = """
SELECT value FROM jsonb_array_elements_text($2) WITH ORDINALITY AS tried (value, at)
 WHERE at <= $3 AND NOT EXISTS (SELECT FROM setting_points p WHERE p.job_id = $1 AND p.value = tried.value::float8
   AND (p.kind, p.gpu_model, p.setting, p.gpus) = ($4, $5, $6, $7) AND p.measured_at >= $8)
 ORDER BY at
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
        report_s: Mean time between two reports.
        over: Whether a report has ended its slice.
    """

    step_time_s: float
    power_w: float
    elapsed_s: float
    local_batch: float
    report_s: float
    over: bool


@dataclass(frozen=True)
class End:
    """A measurement is over. A ``failed`` one is not tried again for its job."""

    state: str
    detail: str


@dataclass(frozen=True)
class Next:
    """A slice is over, and what it showed; None where nothing could be seen in it."""

    point: Point | None


def settings_to_try(kind: ControlKind, devices: Sequence[Mapping[str, Any]], count: int) -> list[float]:
    """Return what to try on these devices, the default first and then downwards; evenly spread over what all take."""
    if kind is ControlKind.CLOCK:
        common = sorted(set.intersection(*(set(device["clocks_mhz"]) for device in devices)), reverse=True)
        picked = np.unique(np.linspace(0, len(common) - 1, min(count, len(common))).round().astype(np.int64))
        return [float(common[at]) for at in picked.tolist()]
    top = min(device["power_limit_w"] for device in devices)
    least = max(device.get("lowest_limit_w") or LEAST_SHARE * device["power_limit_w"] for device in devices)
    return np.unique(np.linspace(least, top, count).round())[::-1].tolist() if least < top else [float(top)]


async def begin(connection: Any, actions: Sequence[ProfileControls], count: int) -> list[ProfileControls]:
    """Note which gangs a plan has measured; return those that are. Repeated, or refused before, it does nothing."""
    rows = {row["job_id"]: row for row in await connection.fetch(GANGS, [action.job_id for action in actions])}
    begun: list[ProfileControls] = []
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


def point_of(said: Sequence[ControlsStatus], nodes: int, gpus: int) -> Point | None:
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
    report_s = lead.elapsed_s / (lead.marks - 1)
    return Point(lead.elapsed_s / lead.work, power_w, lead.elapsed_s, lead.local_batch or 0.0, report_s, lead.over)


@dataclass(frozen=True)
class Sweep:
    """Which settings are tried, how long one may take at most, and after how long its slice ends with a report."""

    settings: list[float]
    window_s: float
    share_s: float


def sweep_after(sweep: Sweep, default: Point) -> Sweep | None:
    """Return how the time that is left after the default is sliced; None where no other setting fits into it.

    Where the job reports too rarely for all settings, fewer are tried, still down to the lowest.
    """
    least_s = REPORTS * default.report_s
    others = sweep.settings[1:]
    left_s = sweep.window_s * len(sweep.settings) - default.elapsed_s
    count = min(len(others), int(left_s / least_s))
    if count < 1:
        return None
    picked = np.linspace(-1, len(others) - 1, count + 1)[1:].round().astype(np.int64)
    window_s = min(left_s / count, max(sweep.window_s, least_s))
    share_s = max(window_s - least_s, 0.0) * SHARE
    return Sweep([sweep.settings[0], *(others[at] for at in picked.tolist())], window_s, share_s)


def judge(row: Any, said: Mapping[str, ControlsStatus]) -> End | Next | None:
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
    if point is not None and point.over:
        return Next(point)
    if row["slice_s"] < (row["window_s"] if row["position"] else LONGEST_S):
        return None
    if point is None and row["position"] == 0:
        return End("failed", f"It has reported no progress twice within {LONGEST_S:g} s.")
    return Next(point)


class Measuring:
    """Takes measurements further; all that it knows is in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def look(self) -> int:
        """Take every measurement one step further that is due; return how many were."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(RUNNING)
            said = settings_of(await connection.fetch(SAID)) if rows else {}
        moved = 0
        for row in rows:
            verdict = judge(row, said.get(row["id"], {}))
            if verdict is not None:
                moved += await self._carry_out(row, verdict)
        return moved

    async def _carry_out(self, row: Any, verdict: End | Next) -> bool:
        async with self._database.transaction() as connection:
            await connection.fetchval("SELECT id FROM allocations WHERE id = $1 FOR UPDATE", row["id"])
            if not await connection.fetchval(STANDS, row["id"], row["position"]):
                return False
            await _follow(connection, row, verdict)
        return True


async def _follow(connection: Any, row: Any, verdict: End | Next) -> None:
    at, sweep = row["position"], Sweep(row["settings"], row["window_s"], row["share_s"])
    if isinstance(verdict, End):
        return await _end(connection, row, verdict)
    if row["slice_s"] is None:
        return await _begin_slice(connection, row, at, sweep)
    if verdict.point is not None:
        await _keep(connection, row, verdict.point)
        narrowed = sweep_after(sweep, verdict.point) if at == 0 else sweep
        if narrowed is None:
            return await _end(connection, row, End("failed", TOO_RARE.format(verdict.point.report_s)))
        sweep = narrowed
    if at + 1 < len(sweep.settings):
        return await _begin_slice(connection, row, at + 1, sweep)
    return await _end(connection, row, End("done", await _unseen(connection, row)))


async def _begin_slice(connection: Any, row: Any, at: int, sweep: Sweep) -> None:
    await connection.execute(STEP, row["id"], at, sweep.settings, sweep.window_s, sweep.share_s)
    await _set(connection, row, None if at == 0 else sweep.settings[at], slice_s=sweep.share_s)


async def _unseen(connection: Any, row: Any) -> str:
    """Return which settings gave no point."""
    where = row["kind"], row["gpu_model"], row["setting"], row["gpus"], row["began_at"]
    values = await connection.fetch(UNSEEN, row["job_id"], row["settings"], row["position"] + 1, *where)
    named = ", ".join(f"{float(each['value']):g}" for each in values)
    return f"Too few reports of progress at {named}." if named else ""


async def _keep(connection: Any, row: Any, point: Point) -> None:
    value = row["settings"][row["position"]]
    local_batch = point.local_batch or row["spec_batch"] or 0.0
    where = (row["kind"], row["gpu_model"], row["setting"], row["gpus"], row["nodes"], local_batch, value)
    await connection.execute(KEEP, *where, point.step_time_s, point.power_w, point.elapsed_s, row["job_id"])


async def _set(connection: Any, row: Any, value: float | None, *, slice_s: float | None, **words: Any) -> None:
    kind = ControlKind(row["setting"])
    asked = value if value is None or kind is ControlKind.POWER_LIMIT else round(value)
    await write_settings(connection, row, {COLUMNS[kind]: asked}, row["settings_refused"], slice_s=slice_s, **words)


async def _end(connection: Any, row: Any, end: End) -> None:
    await connection.execute(END, row["id"], end.state, end.detail)
    event = {"done": "job.profiled", "failed": "job.profiling_failed"}.get(end.state)
    if row["allocation_state"] in ("starting", "running"):
        await _set(connection, row, None, slice_s=None, event=event, why={"detail": end.detail})
    log.info("measurement.ended", allocation=row["id"], kind=row["kind"], state=end.state, detail=end.detail)
