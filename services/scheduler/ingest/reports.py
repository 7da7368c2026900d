"""Fold what nodes report, and what they no longer report, into allocations and jobs.

Every step is one short transaction that locks what it changes and looks again before it does, so that any of them may
be repeated or cut off anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.contracts.nodes import ControlsStatus, EndedBy, RankState
from services.core.domain.jobs import JobState
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.commands import Outgoing, send, set_commands, start_commands, stop_commands
from services.scheduler.ingest.gangs import End, EndReason, Gang, GangState, Run, ShareReport, Stop, fate_of
from services.scheduler.planning.transitions import move
from services.scheduler.power.device_controls import COLUMNS, deaf_shares, follow
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

LIVE = """
SELECT a.id, a.job_id, a.generation, a.state, a.shares, a.gpus, a.stop_reason, a.master_port,
       a.settings_revision, a.power_limit_w, a.clock_mhz,
       (SELECT m.slice_s FROM setting_measurements m WHERE m.allocation_id = a.id AND m.state = 'running') AS slice_s,
       extract(epoch FROM now() - greatest(a.started_at, w.awake_at))::float8 AS age_s,
       extract(epoch FROM now() - a.stop_requested_at)::float8 AS stopping_s,
       j.state AS job_state, j.tenant_id, j.cancel_requested, j.hold_requested, j.restarts,
       coalesce((j.spec ->> 'max_restarts')::int, 0) AS max_restarts,
       coalesce((j.spec ->> 'grace_s')::float8, 120) AS grace_s,
       (j.spec #>> '{work,total}')::float8 <= p.done AS work_done
  FROM allocations a JOIN jobs j ON j.id = a.job_id LEFT JOIN job_progress p ON p.job_id = a.job_id
  LEFT JOIN LATERAL (
    SELECT max(CASE WHEN np.state = 'waking' THEN now() ELSE np.since END) AS awake_at
      FROM jsonb_array_elements(a.shares) s JOIN node_power np ON np.node_id = s ->> 'node_id'
     WHERE a.state = 'starting'
  ) w ON true
 WHERE a.state <> 'ended'
"""
"""``age_s`` counts from when the last of a starting gang's nodes was awake."""

REPORTS = """
SELECT s.allocation_id, s.node_id, s.state, s.exit_code, s.ended_by, s.detail
  FROM rank_statuses s JOIN allocations a ON a.id = s.allocation_id WHERE a.state <> 'ended'
"""

SETTINGS = """
SELECT s.allocation_id, s.node_id, s.settings FROM rank_statuses s JOIN allocations a ON a.id = s.allocation_id
 WHERE a.state IN ('starting', 'running') AND a.settings_revision > 0 AND s.settings IS NOT NULL
"""

LOST_SHARES = """
SELECT e.allocation_id, e.node_id FROM rank_ends e JOIN allocations a ON a.id = e.allocation_id WHERE a.state <> 'ended'
"""

UNSENT = "SELECT DISTINCT payload ->> 'allocation_id' AS allocation_id FROM outbox"
"""Gangs with a command that Redis has not had yet: repeating it would only make the outbox longer."""

EXPIRED_NODES = """
SELECT id FROM nodes n WHERE state = 'up' AND lease_until < now() - make_interval(secs => $1)
   AND NOT EXISTS (SELECT FROM node_power p WHERE p.node_id = n.id AND p.state IN ('going_down', 'off', 'waking'))
   FOR UPDATE SKIP LOCKED
"""
"""Nodes that ought to be silent are not among them: nothing runs there, and ``node_power`` knows their time limits."""

LOSE_SHARES = """
INSERT INTO rank_ends (allocation_id, node_id, ended_by, detail)
SELECT a.id, n.id, 'lost', 'The node was lost.'
  FROM allocations a, unnest($1::text[]) AS n(id)
 WHERE a.state <> 'ended' AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', n.id))
ON CONFLICT DO NOTHING
"""

UNTOLD = """
WITH untold AS (
    SELECT n.id FROM nodes n JOIN node_power p ON p.node_id = n.id
     WHERE n.id = ANY($2::text[]) AND p.state = 'waking' AND NOT coalesce(n.lease_until > now(), false)
       FOR UPDATE OF n
)
INSERT INTO rank_ends (allocation_id, node_id, ended_by, detail)
SELECT $1, id, 'lost', 'Its node was not awake yet.' FROM untold ON CONFLICT DO NOTHING RETURNING node_id
"""
"""The shares of a gang on nodes that still boot. Under the node's lock: its next heartbeat is told of no such gang."""

FAILED_STARTS = "SELECT count(*) FROM allocations WHERE job_id = $1 AND end_reason = 'start_failed'"

END = """
UPDATE allocations SET state = 'ended', ended_at = now(), end_reason = $2 WHERE id = $1 AND state <> 'ended'
RETURNING gpus * extract(epoch FROM now() - started_at)::float8
"""

HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING)


@dataclass(frozen=True)
class Ingested:
    """What one look changed."""

    nodes_lost: int = 0
    running: int = 0
    stopped: int = 0
    ended: int = 0
    repeated: int = 0
    refused: int = 0

    def __bool__(self) -> bool:
        return any((self.nodes_lost, self.running, self.stopped, self.ended))


class Ingest:
    """Looks at every live gang; remembers only when it last repeated a command."""

    def __init__(self, database: Database, settings: SchedulerSettings) -> None:
        self._database = database
        self._settings = settings
        self._repeated_at_s: dict[str, float] = {}
        self._deaf_since_s: dict[str, float] = {}

    async def look(self, now_s: float) -> Ingested:
        """Fold everything reported so far; return what changed.

        Args:
            now_s: Any steady clock, seconds; only for spacing repeated commands.
        """
        lost = await self._lose_nodes()
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            gangs = await connection.fetch(LIVE)
            reports = _reports(await connection.fetch(REPORTS), await connection.fetch(LOST_SHARES))
            unsent = {row["allocation_id"] for row in await connection.fetch(UNSENT)}
            settings = settings_of(await connection.fetch(SETTINGS))
        counts = {"running": 0, "stopped": 0, "ended": 0, "repeated": 0, "refused": 0}
        for row in gangs:
            match fate_of(self._gang(row, reports)):
                case Run():
                    counts["running"] += await self._run(row)
                case Stop(reason):
                    counts["stopped"] += await self._stop(row, reason)
                case End():
                    counts["ended"] += await self._end(row)
                case None:
                    said = settings.get(row["id"], {})
                    counts["refused"] += await follow(self._database, row, said)
                    if row["id"] not in unsent:
                        counts["repeated"] += await self._repeat(row, reports, now_s)
                        counts["repeated"] += await self._set_again(row, reports, said, now_s)
        live = {row["id"] for row in gangs}
        self._repeated_at_s = {name: at for name, at in self._repeated_at_s.items() if name in live}
        self._deaf_since_s = {name: at for name, at in self._deaf_since_s.items() if name in live}
        return Ingested(lost, **counts)

    def _gang(self, row: Any, reports: dict[tuple[str, str], ShareReport], failed_starts: int = 0) -> Gang:
        return Gang(
            state=GangState(row["state"]),
            stop_reason=EndReason(row["stop_reason"]) if row["stop_reason"] else None,
            shares=[reports.get((row["id"], share["node_id"]), ShareReport()) for share in row["shares"]],
            is_late=row["age_s"] > self._settings.start_timeout_s,
            work_done=bool(row["work_done"]),
            cancel_requested=row["cancel_requested"],
            hold_requested=row["hold_requested"],
            restarts=row["restarts"],
            max_restarts=row["max_restarts"],
            failed_starts=failed_starts,
            start_attempts=self._settings.start_attempts,
        )

    async def _lose_nodes(self) -> int:
        """Give up nodes whose lease is surely over; a heartbeat that takes the row's lock first keeps its node."""
        async with self._database.transaction() as connection:
            rows = await connection.fetch(EXPIRED_NODES, self._settings.lease_margin_s)
            lost = [row["id"] for row in rows]
            if lost:
                await lose_nodes(connection, lost)
        for node in lost:
            log.warning("node.lost", node=node)
        return len(lost)

    async def _run(self, row: Any) -> bool:
        async with self._database.transaction() as connection:
            updated = await connection.fetchval(
                "UPDATE allocations SET state = 'running', running_at = now() WHERE id = $1 AND state = 'starting' "
                "RETURNING id",
                row["id"],
            )
            if not updated:
                return False
            data = {"allocation_id": row["id"], "gpus": row["gpus"]}
            sentence = f"It runs on {row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}."
            await move(
                connection,
                row["job_id"],
                [JobState.STARTING],
                JobState.RUNNING,
                reason="running",
                detail=sentence,
                data=data,
            )
        return True

    async def _stop(self, row: Any, reason: EndReason) -> bool:
        async with self._database.transaction() as connection:
            return await stop_gang(connection, row, reason, detail=STOP_SENTENCES[reason])

    async def _end(self, row: Any) -> bool:
        """End a gang all of whose shares have ended; look again under the job's lock: its user may have spoken."""
        async with self._database.transaction() as connection:
            await connection.fetchval("SELECT id FROM jobs WHERE id = $1 FOR UPDATE", row["job_id"])
            row = await connection.fetchrow(f"{LIVE} AND a.id = $1", row["id"])
            if row is None:
                return False
            ids = " AND a.id = $1"
            reports = _reports(
                await connection.fetch(REPORTS + ids, row["id"]), await connection.fetch(LOST_SHARES + ids, row["id"])
            )
            failed_starts = await connection.fetchval(FAILED_STARTS, row["job_id"])
            end = fate_of(self._gang(row, reports, failed_starts))
            if not isinstance(end, End):
                return False
            attained_gpu_s = await connection.fetchval(END, row["id"], end.reason.value)
            await connection.execute("DELETE FROM device_claims WHERE allocation_id = $1", row["id"])
            await move(
                connection,
                row["job_id"],
                HOLDING if end.job_state is not JobState.HELD else await _pass_through(connection, row["job_id"]),
                end.job_state,
                reason=end.reason.value,
                detail=end.detail,
                exit_code=end.exit_code,
                restarts=int(end.counts_as_restart),
                preemptions=int(end.counts_as_preemption),
                attained_gpu_s=attained_gpu_s,
                data={"allocation_id": row["id"]},
            )
        log.info("gang.ended", allocation=row["id"], reason=end.reason.value, job_state=end.job_state.value)
        return True

    async def _repeat(self, row: Any, reports: dict[tuple[str, str], ShareReport], now_s: float) -> int:
        """Send a command again that has shown no effect: Redis may have lost it. Agents do nothing twice."""
        after_s = self._settings.republish_after_s
        last_s = self._repeated_at_s.get(row["id"], -after_s)
        stopping = row["state"] == GangState.STOPPING
        if (row["stopping_s"] if stopping else row["age_s"]) < after_s or now_s - last_s < after_s:
            return 0
        heard = (RankState.STOPPING, RankState.EXITED) if stopping else tuple(RankState)
        silent = [
            share
            for share in row["shares"]
            if (report := reports.get((row["id"], share["node_id"]), ShareReport())).state not in heard
            and not report.lost
        ]
        if not silent:
            return 0
        self._repeated_at_s[row["id"]] = now_s
        async with self._database.transaction() as connection:
            if stopping:
                commands = stop_commands(row["id"], silent, row["grace_s"], row["stop_reason"])
            else:
                names = {share["node_id"] for share in silent}
                commands = await _start_again(connection, row, names)
            await send(connection, commands)
        log.warning("command.repeated", allocation=row["id"], nodes=",".join(share["node_id"] for share in silent))
        return len(silent)

    async def _set_again(
        self,
        row: Any,
        reports: dict[tuple[str, str], ShareReport],
        settings: dict[str, ControlsStatus],
        now_s: float,
    ) -> int:
        """Say again what a running gang is set to, where its nodes have not heard of it for a while."""
        if not row["settings_revision"] or row["state"] == GangState.STOPPING:
            return 0
        running = {
            share["node_id"]
            for share in row["shares"]
            if (report := reports.get((row["id"], share["node_id"]))) is not None and report.state is RankState.RUNNING
        }
        deaf = deaf_shares(row, settings, running)
        if not deaf:
            self._deaf_since_s.pop(row["id"], None)
        elif now_s - self._deaf_since_s.setdefault(row["id"], now_s) >= self._settings.republish_after_s:
            self._deaf_since_s[row["id"]] = now_s
            wanted = {name: row[name] for name in COLUMNS.values()}
            commands = set_commands(row["id"], deaf, row["settings_revision"], wanted, row["slice_s"])
            async with self._database.transaction() as connection:
                await send(connection, commands)
            log.warning("settings.repeated", allocation=row["id"], nodes=",".join(each["node_id"] for each in deaf))
            return len(deaf)
        return 0


STOP_SENTENCES: dict[EndReason, str] = {
    EndReason.CANCELLED: "It is being cancelled.",
    EndReason.HELD: "It is being put on hold.",
    EndReason.FAILED: "A part of it failed; the rest is being stopped.",
    EndReason.NODE_LOST: "A node it runs on was lost; the rest is being stopped.",
    EndReason.START_FAILED: "It did not start everywhere; it is being stopped.",
}


async def lose_nodes(connection: Any, node_ids: list[str]) -> None:
    """Give nodes up, with the gangs they hold devices for; their rows are locked."""
    await connection.execute("UPDATE nodes SET state = 'lost' WHERE id = ANY($1::text[])", node_ids)
    await connection.execute(LOSE_SHARES, node_ids)
    # A node may run what it holds devices for: should it come back, it is told of none of these gangs.
    await connection.execute("DELETE FROM device_claims WHERE node_id = ANY($1::text[])", node_ids)


async def stop_gang(connection: Any, row: Any, reason: EndReason, *, detail: str, code: str | None = None) -> bool:
    """Begin to stop a gang: its allocation, its job, and a command to each node; return whether it was running.

    Args:
        connection: In a transaction.
        row: With ``id``, ``job_id``, ``shares`` and ``grace_s`` of the allocation.
        reason: Why, as its end will say.
        detail: For the user.
        code: The job's reason code in the meantime, where it is not ``reason``.
    """
    stopped = await connection.fetchval(
        "UPDATE allocations SET state = 'stopping', stop_requested_at = now(), stop_reason = $2 "
        "WHERE id = $1 AND state IN ('starting', 'running') RETURNING id",
        row["id"],
        reason.value,
    )
    if not stopped:
        return False
    await move(
        connection,
        row["job_id"],
        [JobState.STARTING, JobState.RUNNING],
        JobState.PREEMPTING,
        reason=code or reason.value,
        detail=detail,
        data={"allocation_id": row["id"]},
    )
    names = [share["node_id"] for share in row["shares"]]
    untold = {each["node_id"] for each in await connection.fetch(UNTOLD, row["id"], names)}
    if untold:
        await connection.execute(
            "DELETE FROM device_claims WHERE allocation_id = $1 AND node_id = ANY($2::text[])", row["id"], list(untold)
        )
    told = [share for share in row["shares"] if share["node_id"] not in untold]
    await send(connection, stop_commands(row["id"], told, row["grace_s"], code or reason.value))
    return True


async def _pass_through(connection: Any, job_id: str) -> list[JobState]:
    """Return the state from which a job may be put on hold; one that ended without being stopped is marked first."""
    await connection.execute(
        "UPDATE jobs SET state = 'preempting' WHERE id = $1 AND state IN ('starting', 'running')", job_id
    )
    return [JobState.PREEMPTING]


async def _start_again(connection: Any, row: Any, names: set[str]) -> list[Outgoing]:
    spec = await connection.fetchval("SELECT spec FROM jobs WHERE id = $1", row["job_id"])
    address = await connection.fetchval("SELECT address FROM nodes WHERE id = $1", row["shares"][0]["node_id"])
    commands = start_commands(
        allocation_id=row["id"],
        job_id=row["job_id"],
        generation=row["generation"],
        tenant_id=row["tenant_id"],
        spec=spec,
        shares=row["shares"],
        master_addr=address,
        master_port=row["master_port"],
    )
    return [command for command, share in zip(commands, row["shares"], strict=True) if share["node_id"] in names]


def settings_of(rows: list[Any]) -> dict[str, dict[str, ControlsStatus]]:
    """Return what nodes say of gangs' settings, by allocation and node."""
    found: dict[str, dict[str, ControlsStatus]] = {}
    for row in rows:
        found.setdefault(row["allocation_id"], {})[row["node_id"]] = ControlsStatus.model_validate(row["settings"])
    return found


def _reports(statuses: list[Any], lost: list[Any]) -> dict[tuple[str, str], ShareReport]:
    reports = {
        (row["allocation_id"], row["node_id"]): ShareReport(
            state=RankState(row["state"]),
            exit_code=row["exit_code"],
            ended_by=EndedBy(row["ended_by"]) if row["ended_by"] else None,
            detail=row["detail"],
        )
        for row in statuses
    }
    for row in lost:
        reports[row["allocation_id"], row["node_id"]] = ShareReport(lost=True, detail="The node was lost.")
    return reports
