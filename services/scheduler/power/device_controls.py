"""Power limits and clocks of gangs: from a plan to the nodes, and the nodes' reports on them.

An allocation keeps what its devices are set to, with a revision that every change raises; nodes follow the highest
they have received and report it. A control that a node's devices refuse goes back to the default on all of the gang's
nodes, once and for the life of the gang, and the job's events say why.
"""

from collections.abc import Mapping, Sequence

from services.contracts.nodes import ControlsStatus
from services.core.cycle.plan import SetControl
from services.core.domain.controls import ControlKind
from services.core.domain.reasons import Reason
from services.db.database import Connection, Database
from services.kit.logging import Log
from services.scheduler.commands import set_commands
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository import gangs, jobs, measurements, outbox
from services.scheduler.repository.documents import Json, StoredShare
from services.scheduler.repository.gangs import CONTROL_COLUMNS, ControlledGang, LiveGang

log = Log(__name__)


class NoSuchGangError(Exception):
    """A job whose devices are to be set no longer has a gang."""


async def set_gangs(connection: Connection, actions: Sequence[SetControl]) -> list[SetControl]:
    """Write the controls that a plan sets, with an event and the nodes' commands; return those that changed something.

    Controls that a gang's devices have refused are not sent to them again.

    Raises:
        NoSuchGangError: a job no longer runs.
    """
    if not actions:
        return []
    locked = await gangs.lock_controlled(connection, [action.job_id for action in actions])
    by_job = {gang.job_id: gang for gang in locked}
    done: list[SetControl] = []
    for job_id in dict.fromkeys(action.job_id for action in actions):
        gang = by_job.get(job_id)
        if gang is None:
            raise NoSuchGangError(f"job {job_id} has no gang whose devices could be set")
        changes = [
            action
            for action in actions
            if action.job_id == job_id
            and action.kind not in gang.settings_refused
            and action.value != gang.value(action.kind)
        ]
        if changes:
            values = {action.kind: action.value for action in changes}
            reason = changes[0].reason
            by_order = any(action.reason is Reason.GRID_ORDER for action in changes)
            why = {"reason": reason.value, "detail": SENTENCES[reason]}
            await connection.execute(measurements.CUT, gang.id)
            await write_controls(
                connection, gang, values, gang.settings_refused, event="job.set", why=why, by_order=by_order
            )
            done += changes
    return done


async def take_refusals(database: Database, gang: LiveGang, reports: Mapping[str, ControlsStatus]) -> bool:
    """Reset refused controls to the default on all of a gang's nodes; return whether there was anything new."""
    refusals = {
        kind: f"{node}: {why}"
        for node, status in sorted(reports.items())
        if status.revision == gang.settings_revision
        for kind, why in status.refused.items()
    }
    if not refusals:
        return False
    async with database.transaction() as connection:
        locked = await gangs.lock_controlled_at(connection, gang.id, gang.settings_revision)
        if locked is None:
            return False
        refused = {**locked.settings_refused, **{kind.value: why for kind, why in refusals.items()}}
        why = {"detail": "; ".join(refusals.values())}
        defaults: dict[ControlKind, float | None] = dict.fromkeys(refusals)
        await write_controls(connection, locked, defaults, refused, event="job.setting_refused", why=why)
    log.warning("controls.refused", allocation=gang.id, **{kind.value: why for kind, why in refusals.items()})
    return True


def unacknowledged_shares(
    gang: LiveGang, reports: Mapping[str, ControlsStatus], running: set[str]
) -> list[StoredShare]:
    """Return the shares whose ranks run and whose node has not acknowledged the newest controls."""
    if not gang.settings_revision:
        return []
    return [
        share
        for share in gang.shares
        if (node := share["node_id"]) in running
        and (node not in reports or reports[node].revision < gang.settings_revision)
    ]


async def write_controls(
    connection: Connection,
    gang: ControlledGang,
    values: Mapping[ControlKind, float | None],
    refused: Mapping[str, str],
    *,
    event: str | None = None,
    why: Json | None = None,
    interval_s: float | None = None,
    by_order: bool = False,
) -> None:
    """Set a gang's devices: its allocation, the nodes' commands, and an event where there is one to tell.

    Args:
        connection: In a transaction, with the allocation locked.
        gang: What its devices are set to now.
        values: What changes, None for the default.
        refused: The controls that the devices refuse from now on, by kind.
        why: What the event says besides the values.
        interval_s: If the nodes are to report what the gang does, the time after which a report ends its interval.
        by_order: Whether an order of the grid wants it.
    """
    columns = {name: values.get(kind, gang.value(kind)) for kind, name in CONTROL_COLUMNS.items()}
    revision = await gangs.set_controls(connection, gang.id, columns, refused, by_order=by_order)
    if event is not None:
        data = {"allocation_id": gang.id, **columns, **(why or {})}
        await jobs.note(connection, gang.job_id, event, data)
    await outbox.put(connection, set_commands(gang.id, gang.shares, revision, columns, interval_s))
