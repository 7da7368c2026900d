"""Power limits and clocks of gangs: from a plan to the nodes, and what the nodes made of them.

An allocation keeps what its devices are set to, with a revision that every change raises; nodes follow the highest
they have heard of and report it. A setting that a node's devices refuse goes back to the default on all of the gang's
nodes, once and for this gang, and the job's events say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.contracts.nodes import ControlsStatus
from services.core.cycle.plan import SetClock, SetPowerLimit
from services.core.domain.controls import ControlKind
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.commands import send, set_commands
from services.scheduler.reasons import SENTENCES

log = Log(__name__)

COLUMNS = {ControlKind.POWER_LIMIT: "power_limit_w", ControlKind.CLOCK: "clock_mhz"}

GANGS = """
SELECT a.id, a.job_id, a.shares, a.power_limit_w, a.clock_mhz, a.settings_revision, a.settings_refused
  FROM allocations a WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running')
 ORDER BY a.job_id FOR UPDATE
"""

GANG = """
SELECT a.id, a.job_id, a.shares, a.power_limit_w, a.clock_mhz, a.settings_revision, a.settings_refused
  FROM allocations a WHERE a.id = $1 AND a.settings_revision = $2 AND a.state <> 'ended' FOR UPDATE
"""

WRITE = """
UPDATE allocations SET power_limit_w = $2, clock_mhz = $3, settings_refused = $4,
       settings_revision = settings_revision + 1
 WHERE id = $1 RETURNING settings_revision
"""

CUT_MEASUREMENT = """
UPDATE setting_measurements SET state = 'cut', detail = 'A plan has set the gang meanwhile.', ended_at = now()
 WHERE allocation_id = $1 AND state = 'running'
"""

EVENT = "INSERT INTO job_events (job_id, tenant_id, type, data) SELECT id, tenant_id, $2, $3 FROM jobs WHERE id = $1"


class NoSuchGangError(Exception):
    """A job that is to be set has no gang any more."""


async def set_gangs(connection: Any, actions: Sequence[SetPowerLimit | SetClock]) -> list[SetPowerLimit | SetClock]:
    """Write what a plan sets, with an event and the nodes' commands; return what changed anything.

    What a gang's devices have refused is not asked of them again.

    Raises:
        NoSuchGangError: a job does not run any more.
    """
    if not actions:
        return []
    rows = {row["job_id"]: row for row in await connection.fetch(GANGS, [action.job_id for action in actions])}
    done: list[SetPowerLimit | SetClock] = []
    for job_id in dict.fromkeys(action.job_id for action in actions):
        row = rows.get(job_id)
        if row is None:
            raise NoSuchGangError(f"job {job_id} has no gang to be set")
        changes = [
            action
            for action in actions
            if action.job_id == job_id
            and action.kind not in row["settings_refused"]
            and action.value != row[COLUMNS[action.kind]]
        ]
        if changes:
            values = {COLUMNS[action.kind]: action.value for action in changes}
            reason = changes[0].reason
            why = {"reason": reason.value, "detail": SENTENCES[reason]}
            await connection.execute(CUT_MEASUREMENT, row["id"])
            await write_settings(connection, row, values, row["settings_refused"], event="job.set", why=why)
            done += changes
    return done


async def follow(database: Database, row: Any, reports: Mapping[str, ControlsStatus]) -> bool:
    """Take note of refusals; return whether there were any that are news.

    Args:
        database: The database.
        row: The live allocation, with ``id`` and ``settings_revision``.
        reports: What its nodes say of its settings.
    """
    revision = row["settings_revision"]
    refusals = {
        kind: f"{node}: {why}"
        for node, status in sorted(reports.items())
        if status.revision == revision
        for kind, why in status.refused.items()
    }
    if not refusals:
        return False
    async with database.transaction() as connection:
        locked = await connection.fetchrow(GANG, row["id"], revision)
        if locked is None:
            return False
        refused = {**locked["settings_refused"], **{kind.value: why for kind, why in refusals.items()}}
        said = {"detail": "; ".join(refusals.values())}
        defaults = {COLUMNS[kind]: None for kind in refusals}
        await write_settings(connection, locked, defaults, refused, event="job.setting_refused", why=said)
    log.warning("settings.refused", allocation=row["id"], **{kind.value: why for kind, why in refusals.items()})
    return True


def deaf_shares(row: Any, reports: Mapping[str, ControlsStatus], running: set[str]) -> list[dict[str, Any]]:
    """Return the shares whose ranks run and whose node has not heard of the newest settings."""
    if not row["settings_revision"]:
        return []
    return [
        share
        for share in row["shares"]
        if (node := share["node_id"]) in running
        and (node not in reports or reports[node].revision < row["settings_revision"])
    ]


async def write_settings(
    connection: Any,
    row: Any,
    values: dict[str, Any],
    refused: dict[str, str],
    *,
    event: str | None = None,
    why: dict[str, Any] | None = None,
    slice_s: float | None = None,
) -> None:
    """Put a gang to other settings: its allocation, the nodes' commands, and an event where there is one to tell.

    Args:
        connection: In a transaction, with the allocation locked.
        row: The allocation, with its shares and the columns of its settings.
        values: What changes, by column.
        refused: What the devices refuse from now on, by kind.
        event: Its type.
        why: What the event says beside the settings.
        slice_s: Where the nodes are to report what the gang does: after how long its slice ends with a report.
    """
    settings = {name: values.get(name, row[name]) for name in COLUMNS.values()}
    revision = await connection.fetchval(WRITE, row["id"], *settings.values(), refused)
    if event is not None:
        data = {"allocation_id": row["id"], **settings, **(why or {})}
        await connection.execute(EVENT, row["job_id"], event, data)
    await send(connection, set_commands(row["id"], row["shares"], revision, settings, slice_s))
