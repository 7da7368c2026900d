"""Carry out a plan: allocations, device claims, job states, memory and commands, in one transaction or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import asyncpg
import numpy as np
from pydantic import ValidationError

from services.contracts.engines import OURS
from services.contracts.invalid import first_error
from services.contracts.nodes import PowerState
from services.core.cycle import plan as plans
from services.core.cycle.grids import cluster_intensity
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.ids import JobId, NodeId, allocation_id
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db.database import Connection, Database
from services.kit import traces
from services.kit.logging import Log
from services.scheduler.commands import base_batch, free_port, start_commands
from services.scheduler.engines.decisions import decide, shrunk, stop_run
from services.scheduler.engines.directing import Theirs
from services.scheduler.ingest.gangs import EndReason
from services.scheduler.ingest.reports import hurry, stop_gang
from services.scheduler.learning.measuring import begin
from services.scheduler.planning.closed import SHORT, closed_to
from services.scheduler.power.device_controls import NoSuchGangError, set_gangs
from services.scheduler.power.nodes import WOKEN
from services.scheduler.reasons import SENTENCES, detail_of, words_of_stop
from services.scheduler.repository import engines, gangs, jobs, node_power, outbox, rounds
from services.scheduler.repository.documents import Json, StoredShare
from services.scheduler.repository.gangs import CONTROL_COLUMNS, NewGang, StartableJob
from services.scheduler.repository.jobs import Starting, Waiting
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.outbox import Outgoing
from services.scheduler.repository.rounds import NewPlan
from services.scheduler.repository.snapshots import ClusterRows, fixed_quotas

log = Log(__name__)


class StalePlanError(Exception):
    """The cluster has changed since the snapshot; nothing was written. Routine: the round is repeated."""


class _UnreadableError(Exception):
    """A job to be started cannot be read, as one that a later release has stored: its id, and why."""


@dataclass(frozen=True)
class Said:
    """Why jobs wait, as it is stored."""

    reasons: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])  #: By job; None: none is stored
    expected_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Until when, UTC seconds, for jobs whose end of waiting is stored."""
    rows: ClusterRows | None = None  #: The cluster that they wait for

    @classmethod
    def of(cls, rows: ClusterRows) -> Said:
        """Return what is stored about each job of a cluster."""
        columns = JobRows.of(rows.jobs).columns
        known = np.isfinite(columns["expected_start_s"])
        ids, expected_s = columns["id"], columns["expected_start_s"]
        return cls(
            dict(zip(ids.tolist(), columns["reason"].tolist(), strict=True)),
            dict(zip(ids[known].tolist(), expected_s[known].tolist(), strict=True)),
            rows,
        )

    def new(self, holds: Sequence[plans.Hold], bound: Mapping[JobId, tuple[NodeId, ...]]) -> list[Waiting]:
        """Return the holds that differ from what is stored, nearly none; ``bound``: nodes that jobs must wait for."""
        reasons, expected_s = self.reasons, self.expected_s
        closed: dict[str, str] = {}
        if self.rows and self.rows.away:
            closed = closed_to(self.rows, [hold.job_id for hold in holds if hold.reason in SHORT])
            holds = [hold for hold in holds if hold.job_id not in closed]
        if expected_s or any(hold.expected_start_s is not None for hold in holds):
            timed = [hold for hold in holds if reasons.get(hold.job_id) != hold.reason or self._differs(hold)]
        else:
            timed = [hold for hold in holds if reasons.get(hold.job_id) != hold.reason]
        return [
            Waiting(
                hold.job_id,
                hold.reason.value,
                detail_of(hold.reason, bound.get(hold.job_id, ())),
                _instant(_until_s(hold)),
            )
            for hold in timed
        ] + [Waiting(job_id, Reason.NODE_CLOSED.value, words, None) for job_id, words in closed.items()]

    def _differs(self, hold: plans.Hold) -> bool:
        return self.expected_s.get(hold.job_id) != _until_s(hold)


@dataclass(frozen=True)
class Decided:
    """A round's outcome, to be applied."""

    snapshot: Snapshot
    policy: str
    plan: plans.Plan
    memory: dict[str, Any] | None  #: What the policy is to remember; None: what it already does
    decide_ms: float
    said: Said = field(default_factory=Said)  #: Why jobs wait, as it was stored when the snapshot was made


@dataclass(frozen=True)
class Applied:
    """What a plan did; ``controls`` counts the controls that it set.

    ``first_waits_s`` and ``later_waits_s`` are how long the jobs that it started had waited: for their first gang, and
    for another one after they were stopped.
    """

    round: int
    starts: int
    preemptions: int
    holds: int
    controls: int = 0
    nodes: int = 0
    first_waits_s: tuple[float, ...] = ()
    later_waits_s: tuple[float, ...] = ()

    @property
    def changes(self) -> int:
        """How many gangs were started, stopped or set, and nodes powered."""
        return self.starts + self.preemptions + self.controls + self.nodes


async def apply(
    database: Database, decided: Decided, ports: tuple[int, int], measured_values: int = 8, *, rehearsed: bool = False
) -> Applied:
    """Write a plan.

    Args:
        ports: First and last port for rank 0.
        measured_values: How many values of a control a gang is measured at.
        rehearsed: Whether nothing stays written, but a job's unreadability.

    Raises:
        StalePlanError: the snapshot is out of date; or a job cannot be read, and is now held; or it was a rehearsal.
    """
    holds = [action for action in decided.plan.actions if isinstance(action, plans.Hold)]  # one for each job that waits
    rest: list[plans.Action] = []
    if len(holds) < len(decided.plan.actions):
        rest = [action for action in decided.plan.actions if not isinstance(action, plans.Hold)]
    starts = [action for action in rest if isinstance(action, plans.Start)]
    preempts = [action for action in rest if isinstance(action, plans.Preempt)]
    controls = [action for action in rest if isinstance(action, plans.SetControl)]
    measurements = [action for action in rest if isinstance(action, plans.ProfileControls)]
    active = decided.snapshot.trigger is Trigger.ACTIVE
    try:
        async with database.transaction() as connection:
            version = decided.plan.snapshot_version
            round_number = await connection.fetchval(rounds.CLAIM_VERSION, version, decided.memory, active)
            if round_number is None:
                raise StalePlanError("another plan or another policy came first")
            seen = decided.snapshot.tenant_gpu_quota if starts else {}
            left = await fixed_quotas(connection) if seen else {}  # before any job is locked, as admission does
            theirs = await Theirs.read(connection, decided.snapshot)
            starts, preempts = theirs.carried_out(starts, preempts)
            if decided.plan.hurries:
                await hurry(connection)
            await _preempt(connection, preempts)
            started = await _start(connection, starts, ports, decided.snapshot)
            if any(left[job.tenant_id] < seen.get(job.tenant_id, 0) for job in started if job.tenant_id in left):
                raise StalePlanError("a cell was given a job of a tenant with a limit of GPUs")
            controls = await set_gangs(connection, controls)
            begun = await begin(connection, measurements, measured_values) if measurements else []
            await jobs.hold(connection, decided.said.new(holds, decided.snapshot.bound))
            await theirs.direct(connection, starts, holds)
            await _power(connection, decided.plan.nodes)
            if starts or preempts or controls or begun or decided.plan.nodes or active:
                await _record(connection, round_number, decided, starts, preempts, holds, [*controls, *begun])
            if rehearsed:
                raise StalePlanError("it was a rehearsal")
    except NoSuchGangError as error:
        raise StalePlanError(str(error)) from error
    except asyncpg.UniqueViolationError as error:
        raise StalePlanError(f"a device or a job is taken: {error}") from error
    except _UnreadableError as error:
        job_id, detail = error.args
        log.error("job.unreadable", job_id=job_id, error=detail)
        async with database.transaction() as connection:  # the others are started without it
            reason, detail = EndReason.START_FAILED.value, f"This release cannot read the job: {detail}."
            await jobs.move(connection, job_id, [JobState.QUEUED], JobState.HELD, reason=reason, detail=detail)
        raise StalePlanError(f"job {job_id} cannot be read") from error
    return Applied(
        round_number,
        len(starts),
        len(preempts),
        len(holds),
        len(controls),
        len(decided.plan.nodes),
        tuple(job.waited_s for job in started if not job.generation),
        tuple(job.waited_s for job in started if job.generation),
    )


async def _start(
    connection: Connection, starts: Sequence[plans.Start], ports: tuple[int, int], seen: Snapshot
) -> Sequence[StartableJob]:
    if not starts:
        return ()
    startable = {job.id: job for job in await gangs.startable(connection, [start.job_id for start in starts])}
    if len(startable) < len(starts):
        raise StalePlanError("a job no longer waits")
    wanted = {share.node_id for start in starts for share in start.placement.shares}
    hosts = {host.id: host for host in await gangs.hosts(connection, sorted(wanted))}
    if len(hosts) < len(wanted):
        raise StalePlanError("a node no longer accepts work")
    uuids = _checked_slices(starts, hosts, seen)
    asleep = {host.id for host in hosts.values() if host.power != PowerState.ON}
    await node_power.wake(connection, asleep, *WOKEN)
    taken = await gangs.ports_in_use(connection)
    parents = await gangs.traceparents(connection, [start.job_id for start in starts])
    made: list[NewGang] = []
    commands: list[Outgoing] = []
    for start in starts:
        job = startable[start.job_id]
        generation = job.generation + 1
        name = allocation_id(start.job_id, generation)
        shares: list[StoredShare] = [
            {"node_id": share.node_id, "devices": list(share.devices)} for share in start.placement.shares
        ]
        address = hosts[start.placement.shares[0].node_id].address
        port = free_port(name, taken.setdefault(address, set()), ports)
        taken[address].add(port)
        batch_size = start.batch_size or base_batch(job.spec)
        made.append(NewGang(name, start.job_id, generation, start.gpus, shares, port, batch_size))
        if job.engine != OURS:
            continue
        if any(share["node_id"] in asleep for share in shares):
            continue  # `Ingest` sends its commands when all of its nodes are awake, so that no rank waits for another
        with traces.span("job.start", parents.get(start.job_id), job_id=start.job_id, allocation_id=name) as span:
            try:
                commands += start_commands(
                    allocation_id=name,
                    job_id=start.job_id,
                    generation=generation,
                    tenant_id=job.tenant_id,
                    spec=job.spec,
                    shares=shares,
                    master_addr=address,
                    master_port=port,
                    account=job.account,
                    uuids=uuids,
                    batch_size=batch_size,
                    packed=start.shares,
                    traceparent=span.traceparent,
                )
            except ValidationError as error:
                raise _UnreadableError(start.job_id, first_error(error)) from error
            log.info("job.start", job_id=start.job_id, allocation_id=name)
    packed = {gang.id for gang, start in zip(made, starts, strict=True) if start.shares}
    await gangs.insert(connection, made, hosts, packed)
    await _write_starts(connection, starts, made, asleep)
    await outbox.put(connection, commands)
    return list(startable.values())


def _checked_slices(
    starts: Sequence[plans.Start], hosts: Mapping[str, gangs.Host], seen: Snapshot
) -> dict[tuple[str, int], str]:
    """Return the UUIDs of starts' slices by node and device; ``StalePlanError`` if a node has others by now."""
    ids, found = seen.nodes.ids, dict[tuple[str, int], str]()
    planned = {(ids[unit.node], unit.device): unit.uuid for unit in seen.slice_units}
    for share in (share for start in starts for share in start.placement.shares) if planned else ():
        for device in share.devices:
            uuid = planned.get((share.node_id, device))
            if uuid is None:
                continue
            if ((hosts[share.node_id].units or {}).get(str(device)) or {}).get("uuid") != uuid:
                raise StalePlanError(f"device {device} of {share.node_id} is another one now")
            found[share.node_id, device] = uuid
    return found


async def _write_starts(
    connection: Connection, starts: Sequence[plans.Start], made: Sequence[NewGang], asleep: set[str]
) -> None:
    starting: list[Starting] = []
    for start, gang in zip(starts, made, strict=True):
        waits = any(share.node_id in asleep for share in start.placement.shares)
        reason = Reason.WAITING_FOR_NODE if waits else start.reason
        event: Json = {"reason": reason.value, "allocation_id": gang.id, "gpus": start.gpus}
        if gang.batch_size is not None:
            event["batch_size"] = gang.batch_size
        starting.append(Starting(start.job_id, reason.value, SENTENCES[reason], event))
    await jobs.start(connection, starting)


async def _preempt(connection: Connection, preempts: Sequence[plans.Preempt]) -> None:
    if not preempts:
        return
    running = await gangs.stoppable(connection, [preempt.job_id for preempt in preempts])
    if len(running) < len(preempts):
        raise StalePlanError("a job no longer runs")
    planned = {preempt.job_id: preempt for preempt in preempts}
    smaller = {preempt.job_id: preempt.next_gpus for preempt in preempts if preempt.reason is Reason.SCALE_IN}
    shrinkable = await engines.shrinkable(connection, list(smaller)) if smaller else frozenset[str]()
    for gang in running:
        reason, to, wait_s = (stop := planned[JobId(gang.job_id)]).reason, stop.to, stop.wait_s
        if gang.job_id in shrinkable:
            note = f"shrinks:{reason.value}"
            await decide(connection, {gang.job_id: shrunk(smaller[JobId(gang.job_id)], gang.grace_s, note)})
            continue
        stop = partial(stop_gang, wait_s=wait_s) if gang.engine == OURS else stop_run
        await stop(connection, gang, EndReason.PREEMPTED, detail=words_of_stop(reason, to), code=reason.value)


def _until_s(hold: plans.Hold) -> int | None:
    return None if hold.expected_start_s is None else round(hold.expected_start_s)


def _instant(whole_s: int | None) -> datetime | None:
    """Return UTC seconds as an instant; they are whole, so that a float's last digits change nothing."""
    return None if whole_s is None else datetime.fromtimestamp(whole_s, UTC)


async def _power(connection: Connection, nodes: Sequence[plans.PowerNode]) -> None:
    for on in (False, True):
        reasons = {node.node_id: node.reason for node in nodes if node.on is on}
        for reason in dict.fromkeys(reasons.values()):
            named = [node_id for node_id, why in reasons.items() if why is reason]
            change = node_power.wake if on else node_power.power_down
            if len(await change(connection, named, reason.value, SENTENCES[reason])) < len(named):
                raise StalePlanError("a node's power can no longer be changed as planned")


def _control_fields(control: plans.Control) -> Json:
    if isinstance(control, plans.ProfileControls):
        return {"setting": control.kind.value}
    return {CONTROL_COLUMNS[control.kind]: control.value}


def _said(name: str, action: plans.Start | plans.Preempt | plans.Control, **more: Any) -> Json:
    """Return an action on a job as it is stored."""
    return {"action": name, "job_id": action.job_id, "reason": action.reason.value, **more}


async def _record(
    connection: Connection,
    round_number: int,
    decided: Decided,
    starts: Sequence[plans.Start],
    preempts: Sequence[plans.Preempt],
    holds: Sequence[plans.Hold],
    controls: Sequence[plans.Control],
) -> None:
    snapshot = decided.snapshot
    batches = {start.job_id: {"batch_size": start.batch_size} for start in starts if start.batch_size is not None}
    actions = [_said("start", each, gpus=each.gpus, **batches.get(each.job_id, {})) for each in starts]
    actions += [_said("preempt", each, gpus=each.next_gpus) for each in preempts]
    actions += [_said(plans.name_of(each), each, **_control_fields(each)) for each in controls]
    actions += [
        {"action": "wake" if node.on else "power_down", "node_id": node.node_id, "reason": node.reason.value}
        for node in decided.plan.nodes
    ]
    plan = NewPlan(
        round=round_number,
        trigger=snapshot.trigger.value,
        policy=decided.policy,
        jobs=len(snapshot.jobs),
        starts=len(starts),
        preemptions=len(preempts),
        holds=len(holds),
        intensity_gco2_per_kwh=cluster_intensity(snapshot),
        intensity_stale=any(outlook.stale for outlook in snapshot.outlooks),
        decide_ms=decided.decide_ms,
        actions=actions,
    )
    await connection.execute(rounds.RECORD, *plan)
