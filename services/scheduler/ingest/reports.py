"""Fold what nodes report, and what they no longer report, into allocations and jobs.

Every step is one short transaction that locks what it changes and looks again before it does, so that any of them may
be repeated or interrupted anywhere.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from services.contracts.nodes import ControlsStatus, EndedBy, RankState
from services.core.domain.counted import counted
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db import nodes
from services.db.database import Connection, Database
from services.kit.logging import Log
from services.scheduler.commands import set_commands, start_commands, stop_commands
from services.scheduler.counters import GANGS_ENDED, NODES_LOST
from services.scheduler.failures import contained
from services.scheduler.ingest.database_clock import DatabaseClock
from services.scheduler.ingest.gangs import (
    FINISHED_BEFORE,
    End,
    EndReason,
    Gang,
    GangState,
    Run,
    ShareReport,
    Stop,
    fate_of,
)
from services.scheduler.power.device_controls import take_refusals, unacknowledged_shares
from services.scheduler.repository import gangs, jobs, outbox
from services.scheduler.repository.gangs import CONTROL_COLUMNS, LiveGang, LostShare, RankReport, StoppableGang
from services.scheduler.repository.outbox import Outgoing
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING)


class Ingested(NamedTuple):
    """The changes of one pass: nodes that were given up, and gangs that run, are stopped or have ended since."""

    nodes_lost: int
    gangs: int


Row = TypeVar("Row", RankReport, LostShare)
ShareReports = Mapping[tuple[str, str], ShareReport]  #: The last reports on shares, by allocation and node


class Ingest:
    """Checks every live gang; its only memory is when it last repeated a command."""

    def __init__(self, database: Database, settings: SchedulerSettings) -> None:
        self._database = database
        self._settings = settings
        self._repeated_at_s: dict[str, float] = {}
        self._unacknowledged_since_s: dict[str, float] = {}
        self._looks_since_s = self._looked_at_s = -math.inf
        self._clock = DatabaseClock(settings.lease_margin_s, begins_unsure=settings.node_return_s > 0)

    async def look(self, now_s: float) -> Ingested:
        """Fold everything reported; return what changed; ``now_s``, by any steady clock, spaces repeated commands."""
        lost = await self._lose_nodes_unless_unheard(now_s)
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            live = await gangs.live(connection)
            ranks, lost_shares = await gangs.reports(connection)
            unsent = await outbox.unsent_gangs(connection)
            controls = await gangs.controls(connection)
            lost_slices = await gangs.lost_slices(connection)
            lost_gpus = await gangs.lost_gpus(connection)
            finished = await gangs.finished_before(connection)
        said_of, lost_of = _by_gang(ranks), _by_gang(lost_shares)
        moved = 0
        for gang in live:
            with contained("gang.failed", allocation=gang.id):  # such as one that another release has stored
                reports = share_reports(said_of[gang.id], lost_of[gang.id])
                facts = self._gang(
                    gang,
                    reports,
                    slice_lost=gang.id in lost_slices,
                    gpu_lost=lost_gpus.get(gang.id, ""),
                    finished_before=gang.job_id in finished,
                )
                match fate_of(facts):
                    case Run():
                        moved += await self._run(gang)
                    case Stop(reason):
                        moved += await self._stop(gang, reason)
                    case End():
                        moved += await self._end(gang)
                    case None:
                        said = controls.get(gang.id, {})
                        await take_refusals(self._database, gang, said)
                        # While a command is on its way to Redis, repeating it would only make the outbox longer.
                        if gang.id not in unsent:
                            await self._repeat(gang, reports, now_s)
                            await self._set_again(gang, reports, said, now_s)
        for job_id in finished:
            with contained("gang.failed", job=job_id):
                moved += await self._believe(job_id)
        names = {gang.id for gang in live}
        self._repeated_at_s = {name: at for name, at in self._repeated_at_s.items() if name in names}
        self._unacknowledged_since_s = {name: at for name, at in self._unacknowledged_since_s.items() if name in names}
        return Ingested(lost, moved)

    def _gang(self, gang: LiveGang, reports: ShareReports, **facts: Any) -> Gang:
        """Return a gang with what was reported of it; ``facts``: fields that its row does not have."""
        same: dict[str, Any] = {name: getattr(gang, name) for name in gang._fields if name in Gang.__dataclass_fields__}
        read: dict[str, Any] = {
            "state": GangState(gang.state),
            "stop_reason": EndReason(gang.stop_reason) if gang.stop_reason else None,
            "shares": [reports.get((gang.id, share["node_id"]), ShareReport()) for share in gang.shares],
        }
        return Gang(
            **same | read | facts,
            is_late=gang.age_s > self._settings.start_timeout_s,
            start_attempts=self._settings.start_attempts,
            max_node_losses=self._settings.max_node_losses,
        )

    async def _lose_nodes_unless_unheard(self, now_s: float) -> int:
        """Give up silent nodes, but not before they have had a chance to be heard.

        While this process did not look, or the database took no writes (its disk was full), heartbeats may have been
        refused through no fault of the nodes: these get a moment to report what has ended meanwhile.
        """
        if now_s - self._looked_at_s > max(self._settings.lease_margin_s, 2 * self._settings.tick_s):
            self._looks_since_s = now_s
        self._looked_at_s = now_s
        if now_s - self._looks_since_s < self._settings.node_return_s:
            return 0
        try:
            return await self._lose_nodes()
        except Exception:
            self._looked_at_s = -math.inf
            raise

    async def _lose_nodes(self) -> int:
        """Give up nodes whose lease has certainly expired; a heartbeat that locks the row first keeps its node."""
        async with self._database.transaction() as connection:
            if not await self._clock.is_steady(connection):
                return 0
            lost = await nodes.lock_expired(connection, self._settings.lease_margin_s)
            if lost:
                await gangs.lose_nodes(connection, lost)
        for node in lost:
            log.warning("node.lost", node=node)
            NODES_LOST.inc()
        return len(lost)

    async def _run(self, gang: LiveGang) -> bool:
        async with self._database.transaction() as connection:
            if await connection.fetchval(gangs.RUN, gang.id) is None:
                return False
            await jobs.move(
                connection,
                gang.job_id,
                [JobState.STARTING],
                JobState.RUNNING,
                reason="running",
                detail=f"It runs on {counted(gang.gpus, 'GPU')}.",
                data={"allocation_id": gang.id, "gpus": gang.gpus},
            )
        return True

    async def _stop(self, gang: LiveGang, reason: EndReason) -> bool:
        return await self._database.in_transaction(stop_gang, gang, reason, detail=STOP_SENTENCES[reason])

    async def _end(self, seen: LiveGang) -> bool:
        """End a gang whose shares have all ended; check again under the job's lock, as its user may act in between."""
        async with self._database.transaction() as connection:
            await jobs.lock(connection, seen.job_id)
            gang = await gangs.live_one(connection, seen.id)
            if gang is None:
                return False
            reports = share_reports(*await gangs.reports(connection, gang.id))
            is_lost = any(report.broke_off is EndReason.NODE_LOST for report in reports.values())
            facts = self._gang(
                gang,
                reports,
                **await gangs.earlier(connection, gang.job_id),
                stands_out=is_lost
                and await connection.fetchval(gangs.LOSS_STANDS_OUT, gang.id, gangs.ABOUT_THE_SAME_TIME),
                slice_lost=gang.id in await gangs.lost_slices(connection),
                gpu_lost=(await gangs.lost_gpus(connection, gang.id)).get(gang.id, ""),
                finished_before=gang.job_id in await gangs.finished_before(connection, gang.job_id),
            )
            end = fate_of(facts)
            if not isinstance(end, End):
                return False
            attained_gpu_s = await gangs.end(connection, gang.id, end.reason.value)
            await connection.execute(gangs.BIND, gang.job_id, gang.id)
            sources = HOLDING
            if end.job_state is JobState.HELD:
                await connection.execute(jobs.MARK_PREEMPTING, gang.job_id)
                sources = (JobState.PREEMPTING,)
            await jobs.move(
                connection,
                gang.job_id,
                sources,
                end.job_state,
                reason=end.reason.value,
                detail=end.detail,
                exit_code=end.exit_code,
                restarts=int(end.counts_as_restart),
                preemptions=int(end.counts_as_preemption),
                node_losses=end.node_losses,
                pause_s=end.pause_s(gang.age_s, self._settings.restart_pause_s),
                attained_gpu_s=attained_gpu_s,
                data={"allocation_id": gang.id} | ({"detail": end.detail} if end.reason in EXPLAINED else {}),
            )
        log.info("gang.ended", allocation=gang.id, reason=end.reason.value, job_state=end.job_state.value)
        GANGS_ENDED.labels(end.reason.value, end.job_state.value).inc()
        return True

    async def _believe(self, job_id: str) -> bool:
        """End a job that waits to run again but had finished, according to a node that had been given up."""
        moved = await self._database.in_transaction(
            jobs.move,
            job_id,
            (JobState.QUEUED, JobState.HELD),
            JobState.SUCCEEDED,
            reason=EndReason.FINISHED.value,
            detail=FINISHED_BEFORE,
            exit_code=0,
        )
        if moved:
            log.info("job.had_finished", job=job_id)
            GANGS_ENDED.labels(EndReason.FINISHED.value, JobState.SUCCEEDED.value).inc()
        return moved

    async def _repeat(self, gang: LiveGang, reports: ShareReports, now_s: float) -> None:
        """Send a command again that has had no effect: Redis may have lost it. Agents do nothing twice.

        A gang that starts on a sleeping node gets its commands here, as soon as all of its nodes are awake.
        """
        if gang.asleep:
            return
        is_first = gang.was_asleep and gang.id not in self._repeated_at_s
        if gang.state == GangState.STOPPING and (gang.stopping_s or 0.0) < 0:
            first = reports.get((gang.id, gang.shares[0]["node_id"]), ShareReport())
            any_ended = any(reports.get((gang.id, each["node_id"]), first).has_ended for each in gang.shares)
            if any_ended or first.state is RankState.STOPPING or gang.cancel_requested or gang.hold_requested:
                await self._database.in_transaction(hurry, gang.id)
            return
        after_s = 0.0 if is_first else self._settings.republish_after_s
        last_s = self._repeated_at_s.get(gang.id, -after_s)
        stopping = gang.state == GangState.STOPPING
        unanswered_s = gang.stopping_s or 0.0 if stopping else gang.age_s
        if unanswered_s < after_s or now_s - last_s < after_s:
            return
        answers = (RankState.STOPPING, RankState.EXITED) if stopping else tuple(RankState)
        silent = [
            share
            for share in gang.shares
            if (report := reports.get((gang.id, share["node_id"]), ShareReport())).state not in answers
            and not report.lost
        ]
        if not silent:
            return
        self._repeated_at_s[gang.id] = now_s
        async with self._database.transaction() as connection:
            if stopping:
                commands = stop_commands(gang.id, silent, gang.grace_s, gang.stop_reason or "")
            else:
                commands = await _start_again(connection, gang, {share["node_id"] for share in silent})
            await outbox.put(connection, commands)
        if not is_first:
            log.warning("command.repeated", allocation=gang.id, nodes=",".join(share["node_id"] for share in silent))

    async def _set_again(
        self, gang: LiveGang, reports: ShareReports, said: Mapping[str, ControlsStatus], now_s: float
    ) -> None:
        """Send again what a running gang's devices are set to, if nodes have not acknowledged it for a while."""
        if not gang.settings_revision or gang.state == GangState.STOPPING:
            return
        running = {
            share["node_id"]
            for share in gang.shares
            if (report := reports.get((gang.id, share["node_id"]))) is not None and report.state is RankState.RUNNING
        }
        missing = unacknowledged_shares(gang, said, running)
        if not missing:
            self._unacknowledged_since_s.pop(gang.id, None)
            return
        since_s = self._unacknowledged_since_s.setdefault(gang.id, now_s)
        if now_s - since_s < self._settings.republish_after_s:
            return
        self._unacknowledged_since_s[gang.id] = now_s
        values = dict(zip(CONTROL_COLUMNS.values(), (gang.power_limit_w, gang.clock_mhz), strict=True))
        commands = set_commands(gang.id, missing, gang.settings_revision, values, gang.interval_s)
        await self._database.in_transaction(outbox.put, commands)
        log.warning("controls.repeated", allocation=gang.id, nodes=",".join(each["node_id"] for each in missing))


STOP_SENTENCES: dict[EndReason, str] = {
    EndReason.FINISHED: "It had finished before its node was given up; its second run is being stopped.",
    EndReason.CANCELLED: "It is being cancelled.",
    EndReason.HELD: "It is being put on hold.",
    EndReason.PREEMPTED: "It is being stopped, to go on in a cell.",
    EndReason.FAILED: "A part of it failed; the rest is being stopped.",
    EndReason.NODE_LOST: "A node it runs on was lost; the rest is being stopped.",
    EndReason.START_FAILED: "It did not start everywhere; it is being stopped.",
    EndReason.TIME_LIMIT: "It reached its time limit; the rest is being stopped.",
    EndReason.GPU_LOST: "A GPU it runs on is out of service; it is being stopped.",
    EndReason.SLICE_LOST: "Its node no longer has its MIG slice; it is being stopped.",
    EndReason.NODE_DRAINED: "A node it runs on was drained and went away; the rest is being stopped.",
    EndReason.NODE_NOT_WOKEN: "A node that it was to run on did not wake; the rest is being stopped.",
    EndReason.INSTALLATION_STOPPED: "The installation was stopped; the rest of it is being stopped.",
}
EXPLAINED = frozenset(
    {
        EndReason.FAILED,
        EndReason.OUT_OF_MEMORY,
        EndReason.PORT_TAKEN,
        EndReason.NODE_LOSSES,
        EndReason.INSTALLATION_STOPPED,
    }
)
"""Ends whose events have the sentence too."""

LOST_AS = {
    "lost": EndReason.NODE_LOST,
    "drained": EndReason.NODE_DRAINED,
    "not_woken": EndReason.NODE_NOT_WOKEN,
    "stopped": EndReason.INSTALLATION_STOPPED,
}
"""Why a share ended that went with its node, by how that was noted."""


async def mark_stopping(
    connection: Connection,
    gang: LiveGang | StoppableGang,
    reason: EndReason,
    *,
    detail: str,
    code: str | None = None,
    wait_s: float = 0.0,
) -> bool:
    """Mark a gang and its job as stopping; the caller tells whoever runs the gang, as `stop_gang` does."""
    if not await gangs.stop(connection, gang.id, reason.value, wait_s):
        return False
    await jobs.move(
        connection,
        gang.job_id,
        [JobState.STARTING, JobState.RUNNING],
        JobState.PREEMPTING,
        reason=code or reason.value,
        detail=detail,
        data={"allocation_id": gang.id} | ({"detail": detail} if code == Reason.GUARANTEED else {}),
    )
    return True


async def stop_gang(
    connection: Connection,
    gang: LiveGang | StoppableGang,
    reason: EndReason,
    *,
    detail: str,
    code: str | None = None,
    wait_s: float = 0.0,
) -> bool:
    """Begin to stop a gang: its allocation, its job, and a command to each node; return whether it was running.

    Args:
        connection: In a transaction.
        reason: Why, as its end will say.
        code: The job's reason code in the meantime, if it is not ``reason``.
        wait_s: How long it may go on until it saves its work. Only the node of rank 0, where jobs report that, is told
            so; the others are when it stops.
    """
    if not await mark_stopping(connection, gang, reason, detail=detail, code=code, wait_s=wait_s):
        return False
    asleep = await gangs.give_up_asleep(connection, gang.id, [share["node_id"] for share in gang.shares])
    awake = [share for share in gang.shares if share["node_id"] not in asleep]
    told = awake[:1] if wait_s else awake
    await outbox.put(connection, stop_commands(gang.id, told, gang.grace_s, code or reason.value, wait_s))
    return True


async def hurry(connection: Connection, allocation_id: str | None = None) -> None:
    """Stop a gang that is waited for to save its work, or every such gang, now."""
    for gang in await gangs.hurry(connection, allocation_id):
        await outbox.put(connection, stop_commands(gang.id, gang.shares, gang.grace_s, EndReason.PREEMPTED.value))


async def _start_again(connection: Connection, gang: LiveGang, node_ids: set[str]) -> list[Outgoing]:
    parents = await gangs.traceparents(connection, [gang.job_id])
    commands = start_commands(
        allocation_id=gang.id,
        job_id=gang.job_id,
        generation=gang.generation,
        tenant_id=gang.tenant_id,
        spec=await jobs.spec(connection, gang.job_id),
        shares=gang.shares,
        master_addr=await gangs.address(connection, gang.shares[0]["node_id"]),
        master_port=gang.master_port,
        account=await connection.fetchval(gangs.ACCOUNT, gang.job_id),
        uuids=await gangs.uuids(connection, gang.id),
        batch_size=gang.batch_size,
        packed=gang.packed,
        traceparent=parents.get(gang.job_id),
    )
    return [command for command, share in zip(commands, gang.shares, strict=True) if share["node_id"] in node_ids]


def _by_gang(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    found = defaultdict[str, list[Row]](list)
    for row in rows:
        found[row.allocation_id].append(row)
    return found


def share_reports(reports: Iterable[RankReport], lost: Iterable[LostShare]) -> ShareReports:
    """Return the last reports on shares.

    A share that was lost with its node cannot be running any more. If it was over before that, it ended as its node
    reported, whether before the node was lost or when it came back. A share that was told to stop did not fail: a node
    that comes back stops what it should no longer run, and may report that before the gang has ended.
    """
    found = {
        (row.allocation_id, row.node_id): ShareReport(
            state=RankState(row.state),
            exit_code=row.exit_code,
            ended_by=EndedBy(row.ended_by) if row.ended_by else None,
            detail=row.detail,
        )
        for row in reports
    }
    for row in lost:
        place = row.allocation_id, row.node_id
        said = found.get(place, ShareReport())
        if said.state is not RankState.EXITED or (said.ended_by is EndedBy.STOP and said.exit_code):
            found[place] = ShareReport(lost=LOST_AS[row.ended_by], detail="The node was lost.")
    return found
