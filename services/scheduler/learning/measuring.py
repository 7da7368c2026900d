"""Online profiling: a gang is run at several values of a control in turn, and what it does at each is kept.

A policy asks for it (``ProfileControls``); the table ``setting_measurements`` records how far it has got, and every
look takes it one step further. Agents count an interval from one progress report to another, so that it holds whole
iterations; it ends with the first report after its share of the time. A value in whose interval the job did not report
twice is left out, and the events say which. The default comes first and lasts until the job reports. How often the job
reports decides how many values fit into four minutes from its first report: fewer if reports are rare. A job that does
not report, or too rarely for two values, or whose devices refuse, goes on at the default, and its events say why.

Every step is one transaction that names the step before it, so that any of them may be repeated or interrupted
anywhere.

Source: PowerFlow section 5.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.contracts.nodes import ControlsStatus
from services.core.cycle.plan import ProfileControls
from services.core.domain.controls import ControlKind
from services.db.database import Connection, Database
from services.kit.logging import Log
from services.scheduler.failures import contained
from services.scheduler.power.device_controls import write_controls
from services.scheduler.repository import gangs, jobs, measurements
from services.scheduler.repository.documents import Json, StoredDevice
from services.scheduler.repository.measurements import Measurement

log = Log(__name__)

LONGEST_S = 240.0
"""All intervals together (PowerFlow's four minutes), and how long a job may take to report for the first time."""
LEAST_SHARE = 0.4
"""The lowest power limit that is tried on a board that does not name its own, as a share of its default."""
REPORTS = 3.0
"""Times between two reports, at the default, that an interval leaves room for: it waits for its first and its last
report, which may come half as often at its value."""
SHARE = 0.8  #: Of the rest, what is measured; the nodes need what is left to set their devices and to report
TOO_RARE = "It reports progress every {:.0f} s: too rarely to measure a second value."


@dataclass(frozen=True)
class Point:
    """A gang's speed and power at one value of a control."""

    step_time_s: float  #: Seconds per unit of the job's own work
    power_w: float  #: Mean draw of one of its GPUs
    elapsed_s: float
    local_batch: float  #: Samples per GPU and step; 0 where the job does not say
    report_s: float
    over: bool  #: Whether a report has ended its interval


@dataclass(frozen=True)
class End:
    """A measurement is over. A ``failed`` one is not tried again for its job."""

    state: str
    detail: str


@dataclass(frozen=True)
class Next:
    """An interval is over, and what it showed; None where nothing could be measured in it."""

    point: Point | None


def values_to_try(kind: ControlKind, devices: Sequence[StoredDevice], count: int) -> list[float]:
    """Return the values to try on these devices, from the default down, evenly spread over what all support."""
    if kind is ControlKind.CLOCK:
        first, *others = (device.get("clocks_mhz", list[int]()) for device in devices)
        common = sorted(set(first).intersection(*others), reverse=True)
        picked = np.unique(np.linspace(0, len(common) - 1, min(count, len(common))).round()).tolist()
        return [float(common[int(at)]) for at in picked]
    limits_w = [device.get("power_limit_w", 0.0) for device in devices]
    top = min(limits_w)
    least = max(
        device.get("lowest_limit_w") or LEAST_SHARE * limit_w for device, limit_w in zip(devices, limits_w, strict=True)
    )
    return np.unique(np.linspace(least, top, count).round())[::-1].tolist() if least < top else [float(top)]


async def begin(connection: Connection, actions: Sequence[ProfileControls], count: int) -> list[ProfileControls]:
    """Begin the measurements that a plan asks for; return those begun. A repeated or refused request does nothing."""
    gangs = await measurements.lock_measurable(connection, [action.job_id for action in actions])
    by_job = {gang.job_id: gang for gang in gangs}
    begun: list[ProfileControls] = []
    for action in actions:
        gang = by_job.get(action.job_id)
        if gang is None or gang.devices is None:
            continue
        control = action.kind.value
        devices = [device for node in gang.devices for device in node]
        values = values_to_try(action.kind, devices, count)
        if len(values) < 2 or await connection.fetchval(measurements.HAS_FAILED, gang.kind, gang.job_id, control):
            continue
        window_s = min(action.window_s, LONGEST_S / len(values))
        if await measurements.begin(connection, gang, devices[0]["model"], control, values, window_s):
            data = {"allocation_id": gang.id, "setting": control, "settings": values, "window_s": window_s}
            await jobs.note(connection, gang.job_id, "job.profiling", data)
            begun.append(action)
    return begun


def point_of(reports: Sequence[ControlsStatus], nodes: int, gpus: int) -> Point | None:
    """Return what the intervals of a gang's nodes show together; None while one is missing or no work was done.

    The time is that of the node that reports most often. Each node's draw is its own mean.
    """
    intervals = [status.interval for status in reports if status.interval is not None and status.interval.elapsed_s > 0]
    if len(intervals) < nodes:
        return None
    lead = max(intervals, key=lambda each: each.marks)
    power_w = sum(each.gpu_energy_j / each.elapsed_s for each in intervals) / gpus
    if lead.marks < 2 or lead.work <= 0 or power_w <= 0:
        return None
    report_s = lead.elapsed_s / (lead.marks - 1)
    return Point(lead.elapsed_s / lead.work, power_w, lead.elapsed_s, lead.local_batch or 0.0, report_s, lead.over)


@dataclass(frozen=True)
class Sweep:
    """Which values are tried, how long each may take at most, and the time after which a report ends its interval."""

    values: list[float]
    window_s: float
    least_s: float


def sweep_after(sweep: Sweep, default: Point) -> Sweep | None:
    """Return how to divide the time that is left after the default; None if no other value fits into it.

    If the job reports too rarely for all values, fewer are tried, still down to the lowest.
    """
    reports_s = REPORTS * default.report_s
    others = sweep.values[1:]
    left_s = sweep.window_s * len(sweep.values) - default.elapsed_s
    count = min(len(others), int(left_s / reports_s))
    if count < 1:
        return None
    picked = np.linspace(-1, len(others) - 1, count + 1)[1:].round().astype(np.int64)
    window_s = min(left_s / count, max(sweep.window_s, reports_s))
    least_s = max(window_s - reports_s, 0.0) * SHARE
    return Sweep([sweep.values[0], *(others[at] for at in picked.tolist())], window_s, least_s)


def verdict_of(measurement: Measurement, reports: Mapping[str, ControlsStatus]) -> End | Next | None:
    """Return what comes next for a measurement whose interval is under way; None to wait."""
    if measurement.allocation_state in ("stopping", "ended"):
        return End("cut", "The gang has ended.")
    if measurement.control in measurement.settings_refused:
        return End("failed", f"Its devices refused: {measurement.settings_refused[measurement.control]}")
    if measurement.allocation_state != "running":
        return None
    if measurement.elapsed_s is None:
        return Next(None)
    newest = [status for status in reports.values() if status.revision == measurement.settings_revision]
    point = point_of(newest, measurement.nodes, measurement.gpus)
    if point is not None and point.over:
        return Next(point)
    if measurement.elapsed_s < (measurement.window_s if measurement.position else LONGEST_S):
        return None
    if point is None and measurement.position == 0:
        return End("failed", f"It did not report progress twice within {LONGEST_S:g} s.")
    return Next(point)


class Measuring:
    """Advances measurements; all its state is in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def look(self) -> int:
        """Take every measurement that is due one step further; return how many."""
        async with self._database.connection() as connection:
            running = await measurements.running(connection)
            if not running:
                return 0
            reports = await gangs.controls(connection)
        moved = 0
        for measurement in running:
            with contained("measurement.failed", allocation=measurement.allocation_id):
                verdict = verdict_of(measurement, reports.get(measurement.allocation_id, {}))
                if verdict is not None:
                    moved += await self._carry_out(measurement, verdict)
        return moved

    async def _carry_out(self, measurement: Measurement, verdict: End | Next) -> bool:
        async with self._database.transaction() as connection:
            await gangs.lock(connection, measurement.allocation_id)
            if not await measurements.lock(connection, measurement.allocation_id, measurement.position):
                return False
            await _follow(connection, measurement, verdict)
        return True


async def _follow(connection: Connection, measurement: Measurement, verdict: End | Next) -> None:
    at, sweep = measurement.position, Sweep(measurement.values, measurement.window_s, measurement.least_s)
    if isinstance(verdict, End):
        return await _end(connection, measurement, verdict)
    if measurement.elapsed_s is None:
        return await _begin_interval(connection, measurement, at, sweep)
    if verdict.point is not None:
        await _keep(connection, measurement, verdict.point)
        narrowed = sweep_after(sweep, verdict.point) if at == 0 else sweep
        if narrowed is None:
            return await _end(connection, measurement, End("failed", TOO_RARE.format(verdict.point.report_s)))
        sweep = narrowed
    if at + 1 < len(sweep.values):
        return await _begin_interval(connection, measurement, at + 1, sweep)
    return await _end(connection, measurement, End("done", await _without_point(connection, measurement)))


async def _begin_interval(connection: Connection, measurement: Measurement, at: int, sweep: Sweep) -> None:
    await connection.execute(
        measurements.STEP, measurement.allocation_id, at, sweep.values, sweep.window_s, sweep.least_s
    )
    await _set(connection, measurement, None if at == 0 else sweep.values[at], interval_s=sweep.least_s)


async def _without_point(connection: Connection, measurement: Measurement) -> str:
    """Return, for the user, which values gave no point."""
    values = await measurements.values_without_point(connection, measurement.allocation_id)
    return f"Too few reports of progress at {', '.join(f'{value:g}' for value in values)}." if values else ""


async def _keep(connection: Connection, measurement: Measurement, point: Point) -> None:
    local_batch = point.local_batch or measurement.spec_batch or 0.0
    of_point = local_batch, point.step_time_s, point.power_w, point.elapsed_s
    await connection.execute(measurements.KEEP, measurement.allocation_id, *of_point)


async def _set(
    connection: Connection,
    measurement: Measurement,
    value: float | None,
    *,
    interval_s: float | None,
    event: str | None = None,
    why: Json | None = None,
) -> None:
    kind = ControlKind(measurement.control)
    asked = value if value is None or kind is ControlKind.POWER_LIMIT else round(value)
    await write_controls(
        connection,
        measurement.gang,
        {kind: asked},
        measurement.settings_refused,
        event=event,
        why=why,
        interval_s=interval_s,
    )


async def _end(connection: Connection, measurement: Measurement, end: End) -> None:
    await connection.execute(measurements.END, measurement.allocation_id, end.state, end.detail)
    event = {"done": "job.profiled", "failed": "job.profiling_failed"}.get(end.state)
    if measurement.allocation_state in ("starting", "running"):
        await _set(connection, measurement, None, interval_s=None, event=event, why={"detail": end.detail})
    log.info(
        "measurement.ended",
        allocation=measurement.allocation_id,
        kind=measurement.kind,
        state=end.state,
        detail=end.detail,
    )
