"""Carry out a plan: allocations, device claims, job states, memory and commands, in one transaction or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from services.contracts.nodes import PowerState
from services.core.cycle.grids import cluster_intensity
from services.core.cycle.plan import (
    ACTION_NAMES,
    Control,
    Hold,
    Plan,
    PowerNode,
    Preempt,
    ProfileControls,
    Reason,
    SetClock,
    SetPowerLimit,
    Start,
)
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.ids import allocation_id
from services.core.domain.jobs import JobState
from services.db.database import Database
from services.scheduler.commands import Outgoing, free_port, send, start_commands
from services.scheduler.ingest.gangs import EndReason
from services.scheduler.ingest.reports import stop_gang
from services.scheduler.learning.measuring import begin
from services.scheduler.planning.transitions import move
from services.scheduler.power.device_controls import COLUMNS, NoSuchGangError, set_gangs
from services.scheduler.power.nodes import WOKEN, power_down, wake
from services.scheduler.reasons import SENTENCES

CLAIM_VERSION = """
UPDATE scheduler_state
   SET version = version + 1, memory = $2, last_active_at = CASE WHEN $3 THEN now() ELSE last_active_at END
 WHERE id = 1 AND version = $1 RETURNING version
"""

STARTABLE = """
SELECT id, tenant_id, generation, spec FROM jobs
 WHERE id = ANY($1::text[]) AND state = 'queued' AND NOT cancel_requested AND NOT hold_requested
 ORDER BY id FOR UPDATE
"""

HOSTS = """
SELECT n.id, n.address, coalesce(p.state, 'on') AS power FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.id = ANY($1::text[]) AND n.state = 'up' AND NOT n.draining
   AND coalesce(p.state, 'on') IN ('on', 'off', 'waking') FOR SHARE OF n
"""

PORTS = """
SELECT n.address, a.master_port FROM allocations a JOIN nodes n ON n.id = a.shares -> 0 ->> 'node_id'
 WHERE a.state <> 'ended'
"""

STOPPABLE = """
SELECT a.id, a.job_id, a.shares, coalesce((j.spec ->> 'grace_s')::float8, 120) AS grace_s
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') ORDER BY j.id FOR UPDATE OF j
"""

HOLD = """
UPDATE jobs SET reason = h.reason, detail = h.detail, expected_start_at = h.expected_start_at
  FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS h(id, reason, detail, expected_start_at)
 WHERE jobs.id = h.id AND jobs.state = 'queued'
   AND (jobs.reason, jobs.expected_start_at) IS DISTINCT FROM (h.reason, h.expected_start_at)
"""

RECORD = """
INSERT INTO plans (round, trigger, policy, jobs, starts, preemptions, holds, intensity_gco2_per_kwh, intensity_stale,
                   decide_ms, actions)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""


class StalePlanError(Exception):
    """The cluster has moved on since the snapshot; nothing was written. Routine: the round is held again."""


@dataclass(frozen=True)
class Decided:
    """A round's outcome, to be applied."""

    snapshot: Snapshot
    policy: str
    plan: Plan
    memory: dict[str, Any]
    decide_ms: float


@dataclass(frozen=True)
class Applied:
    """What a plan did."""

    round: int
    starts: int
    preemptions: int
    holds: int
    settings: int = 0
    nodes: int = 0

    @property
    def changes(self) -> int:
        """How many gangs it started, stopped or set, and nodes it powered."""
        return self.starts + self.preemptions + self.settings + self.nodes


async def apply(database: Database, decided: Decided, ports: tuple[int, int], measured_settings: int = 8) -> Applied:
    """Write a plan.

    Args:
        database: The database.
        decided: The plan, and what it came from.
        ports: First and last port for rank 0.
        measured_settings: How many settings a gang is measured at.

    Raises:
        StalePlanError: the snapshot is out of date.
    """
    actions = decided.plan.actions
    starts = [action for action in actions if isinstance(action, Start)]
    preempts = [action for action in actions if isinstance(action, Preempt)]
    holds = [action for action in actions if isinstance(action, Hold)]
    settings = [action for action in actions if isinstance(action, (SetPowerLimit, SetClock))]
    measurements = [action for action in actions if isinstance(action, ProfileControls)]
    active = decided.snapshot.trigger is Trigger.ACTIVE
    try:
        async with database.transaction() as connection:
            round_number = await connection.fetchval(
                CLAIM_VERSION, decided.plan.snapshot_version, decided.memory, active
            )
            if round_number is None:
                raise StalePlanError("another plan or another policy came first")
            await _preempt(connection, preempts)
            await _start(connection, starts, ports)
            settings = await set_gangs(connection, settings)
            begun = await begin(connection, measurements, measured_settings) if measurements else []
            await _hold(connection, holds)
            await _power(connection, decided.plan.nodes)
            if starts or preempts or settings or begun or decided.plan.nodes or active:
                await _record(connection, round_number, decided, starts, preempts, holds, [*settings, *begun])
    except NoSuchGangError as error:
        raise StalePlanError(str(error)) from error
    except asyncpg.UniqueViolationError as error:
        raise StalePlanError(f"a device or a job is taken: {error}") from error
    return Applied(round_number, len(starts), len(preempts), len(holds), len(settings), len(decided.plan.nodes))


async def _start(connection: Any, starts: list[Start], ports: tuple[int, int]) -> None:
    if not starts:
        return
    jobs = {row["id"]: row for row in await connection.fetch(STARTABLE, [start.job_id for start in starts])}
    if len(jobs) < len(starts):
        raise StalePlanError("a job is not waiting any more")
    wanted = {share.node_id for start in starts for share in start.placement.shares}
    hosts = await connection.fetch(HOSTS, sorted(wanted))
    addresses = {row["id"]: row["address"] for row in hosts}
    if len(addresses) < len(wanted):
        raise StalePlanError("a node takes no work any more")
    asleep = {row["id"] for row in hosts if row["power"] != PowerState.ON}
    await wake(connection, asleep, *WOKEN)
    taken: dict[str, set[int]] = {}
    for row in await connection.fetch(PORTS):
        taken.setdefault(row["address"], set()).add(row["master_port"])
    allocations: list[tuple[Any, ...]] = []
    claims: list[tuple[str, int, str]] = []
    commands: list[Outgoing] = []
    for start in starts:
        job = jobs[start.job_id]
        generation = job["generation"] + 1
        name = allocation_id(start.job_id, generation)
        shares = [{"node_id": share.node_id, "devices": list(share.devices)} for share in start.placement.shares]
        address = addresses[start.placement.shares[0].node_id]
        port = free_port(name, taken.setdefault(address, set()), ports)
        taken[address].add(port)
        allocations.append((name, start.job_id, generation, start.gpus, shares, port))
        claims += [(share["node_id"], device, name) for share in shares for device in share["devices"]]
        commands += start_commands(
            allocation_id=name,
            job_id=start.job_id,
            generation=generation,
            tenant_id=job["tenant_id"],
            spec=job["spec"],
            shares=shares,
            master_addr=address,
            master_port=port,
        )
    await _write_starts(connection, starts, allocations, claims, asleep)
    await send(connection, commands)


async def _write_starts(
    connection: Any,
    starts: list[Start],
    allocations: list[tuple[Any, ...]],
    claims: list[tuple[str, int, str]],
    asleep: set[str],
) -> None:
    await connection.executemany(
        "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
        "VALUES ($1, $2, $3, 'starting', $4, $5, $6)",
        allocations,
    )
    await connection.executemany(
        "INSERT INTO device_claims (node_id, device, allocation_id) VALUES ($1, $2, $3)", claims
    )
    await connection.execute(
        "UPDATE jobs SET generation = generation + 1, started_at = coalesce(started_at, now()) "
        "WHERE id = ANY($1::text[])",
        [start.job_id for start in starts],
    )
    for start, (name, *_) in zip(starts, allocations, strict=True):
        waits = any(share.node_id in asleep for share in start.placement.shares)
        reason = Reason.WAITING_FOR_NODE if waits else start.reason
        await move(
            connection,
            start.job_id,
            [JobState.QUEUED],
            JobState.STARTING,
            reason=reason.value,
            detail=SENTENCES[reason],
            data={"allocation_id": name, "gpus": start.gpus},
        )


async def _preempt(connection: Any, preempts: list[Preempt]) -> None:
    if not preempts:
        return
    rows = await connection.fetch(STOPPABLE, [preempt.job_id for preempt in preempts])
    if len(rows) < len(preempts):
        raise StalePlanError("a job does not run any more")
    reasons = {preempt.job_id: preempt.reason for preempt in preempts}
    for row in rows:
        reason = reasons[row["job_id"]]
        await stop_gang(connection, row, EndReason.PREEMPTED, detail=SENTENCES[reason], code=reason.value)


async def _hold(connection: Any, holds: list[Hold]) -> None:
    if holds:
        await connection.execute(
            HOLD,
            [hold.job_id for hold in holds],
            [hold.reason.value for hold in holds],
            [SENTENCES[hold.reason] for hold in holds],
            [_whole_second(hold.expected_start_s) for hold in holds],
        )


def _whole_second(time_s: float | None) -> datetime | None:
    """Return UTC seconds as an instant; what is the same but for a float's last digits stays the same."""
    return None if time_s is None else datetime.fromtimestamp(round(time_s), UTC)


async def _power(connection: Any, nodes: Sequence[PowerNode]) -> None:
    for on in (False, True):
        reasons = {node.node_id: node.reason for node in nodes if node.on is on}
        for reason in dict.fromkeys(reasons.values()):
            named = [node_id for node_id, why in reasons.items() if why is reason]
            change = wake if on else power_down
            if len(await change(connection, named, reason.value, SENTENCES[reason])) < len(named):
                raise StalePlanError("a node cannot be powered so any more")


async def _record(
    connection: Any,
    round_number: int,
    decided: Decided,
    starts: list[Start],
    preempts: list[Preempt],
    holds: list[Hold],
    settings: list[Control],
) -> None:
    snapshot = decided.snapshot
    actions = [
        {"action": "start", "job_id": start.job_id, "reason": start.reason.value, "gpus": start.gpus}
        for start in starts
    ] + [
        {"action": "preempt", "job_id": preempt.job_id, "reason": preempt.reason.value, "gpus": preempt.next_gpus}
        for preempt in preempts
    ]
    actions += [
        {
            "action": ACTION_NAMES[type(each)],
            "job_id": each.job_id,
            "reason": each.reason.value,
            **({"setting": each.kind} if isinstance(each, ProfileControls) else {COLUMNS[each.kind]: each.value}),
        }
        for each in settings
    ]
    actions += [
        {"action": "wake" if node.on else "power_down", "node_id": node.node_id, "reason": node.reason.value}
        for node in decided.plan.nodes
    ]
    await connection.execute(
        RECORD,
        round_number,
        snapshot.trigger.value,
        decided.policy,
        len(snapshot.jobs),
        len(starts),
        len(preempts),
        len(holds),
        cluster_intensity(snapshot),
        any(outlook.stale for outlook in snapshot.outlooks),
        decided.decide_ms,
        actions,
    )
