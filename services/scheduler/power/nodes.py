"""Nodes powered down and woken: what was decided is committed first, the hook runs after it, and again after a crash.

A node is ``on``, ``going_down`` (it gets no starts; the hook runs, and its lease runs out), ``off`` (plans may start
gangs on it), ``waking`` (the hook runs, and its agent is waited for) or ``failed``. All but the hooks' own work happens
in short transactions; ``NodePower.look`` reads what came of it, and a second scheduler would go on from the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import asyncpg

from services.contracts.nodes import PowerState
from services.contracts.streams import command_stream
from services.core.cycle.plan import Reason
from services.db.database import Database
from services.db.driver import CONNECTION_ERRORS
from services.kit.logging import Log
from services.kit.tasks import end_tasks
from services.scheduler.ingest.reports import lose_nodes
from services.scheduler.power.hooks import HookError, PowerHook, Target
from services.scheduler.reasons import SENTENCES
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

LOOK_EVERY_S = 1.0
LONGEST_BACKOFF_S = 300.0
STAYS_ON_S = 3_600.0
"""A node that could not be powered down is not told so again for this long."""

FRESH = "since = now(), attempts = 0, acted_at = NULL, done_at = NULL, next_attempt_at = NULL"

WOKEN = (Reason.NEEDED.value, SENTENCES[Reason.NEEDED])
"""Why a start wakes nodes: code and sentence."""
BY_OPERATOR = ("operator", "An operator asked for it.")

GO_DOWN = f"""
INSERT INTO node_power AS p (node_id, state, reason, detail)
SELECT n.id, 'going_down', $2, $3 FROM nodes n
 WHERE n.id = ANY($1::text[]) AND n.state = 'up' AND n.lease_until > now()
   AND NOT EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id)
ON CONFLICT (node_id) DO UPDATE SET state = 'going_down', reason = $2, detail = $3, off_at = NULL, {FRESH}
 WHERE p.state = 'on' AND NOT p.pinned
RETURNING node_id
"""

WAKE = f"""
UPDATE node_power SET state = 'waking', reason = $2, detail = $3, {FRESH}
 WHERE node_id = ANY($1::text[]) AND state = ANY($4::text[]) RETURNING node_id
"""

CHANGING = """
SELECT p.*, n.heartbeat_at, n.registered_at, now() AS at,
       coalesce(n.lease_until > now(), false) AS leased,
       coalesce(n.lease_until > now() AND n.heartbeat_at > p.since, false) AS heard,
       extract(epoch FROM now() - p.done_at)::float8 AS done_for_s
  FROM node_power p JOIN nodes n ON n.id = p.node_id WHERE p.state <> 'on'
"""

DUE = """
SELECT node_id, state, acted_at IS NOT NULL AS begun FROM node_power
 WHERE state IN ('going_down', 'waking') AND done_at IS NULL AND coalesce(next_attempt_at <= now(), true)
   AND coalesce(state = 'going_down' OR off_at + make_interval(secs => $1) <= now(), true)
 ORDER BY since, node_id
"""

BOOTING = "SELECT count(*) FROM node_power WHERE state = 'waking' AND acted_at IS NOT NULL"

# A node goes down only with nothing left to do: no device held, no command that it has not had.
BEGIN = """
UPDATE node_power p SET attempts = p.attempts + 1, acted_at = coalesce(p.acted_at, now()), next_attempt_at = NULL
  FROM nodes n
 WHERE n.id = p.node_id AND p.node_id = $1 AND p.state = $2 AND p.done_at IS NULL
   AND (p.state = 'waking' OR (p.acted_at IS NOT NULL OR NOT p.pinned)
        AND NOT EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id)
        AND NOT EXISTS (SELECT FROM outbox o WHERE o.stream = $3))
RETURNING n.address, p.attempts, p.off_at, p.acted_at
"""

PERIOD = """
INSERT INTO node_power_periods (node_id, state, start_at, end_at, power_w)
SELECT $1, $2, $3, $4, $5 WHERE $4::timestamptz > $3::timestamptz
"""


class Step(Enum):
    """What is to be done about a node that is not simply on."""

    AWAKE = "awake"
    STAY = "stay"
    DOWN = "down"
    WAKE = "wake"
    RETRY = "retry"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long, and how often, a node is told.

    Attributes:
        down_s: Until a node that is still heard is taken to stay on.
        wake_s: Until a node that is not heard is told again.
        attempts: How often it is told.
    """

    down_s: float
    wake_s: float
    attempts: int


def next_step(row: Any, patience: Patience) -> Step | None:
    """Return what becomes of a node, None while it is waited for; pure.

    Args:
        row: ``state``, ``pinned``, ``attempts``, ``acted_at``, ``done_for_s`` (seconds since its hook succeeded, or
            None), ``leased``, and ``heard``: whether it has spoken since its state last changed.
        patience: How long that may take.
    """
    state, done_for_s = PowerState(row["state"]), row["done_for_s"]
    if state is PowerState.GOING_DOWN:
        if row["pinned"] and row["acted_at"] is None:
            return Step.STAY
        if done_for_s is None:
            return None
        if not row["leased"]:
            return Step.DOWN
        return Step.STAY if done_for_s > patience.down_s else None
    if row["heard"]:
        return Step.AWAKE
    if state is PowerState.OFF:
        return Step.WAKE if row["pinned"] else None
    if state is PowerState.WAKING and done_for_s is not None and done_for_s > patience.wake_s:
        return Step.RETRY if row["attempts"] < patience.attempts else Step.FAIL
    return None


async def power_down(connection: Any, node_ids: Collection[str], reason: str, detail: str) -> list[str]:
    """Take nodes out of the plans, to be powered down; return those that were on, idle, heard of and not pinned."""
    rows = await connection.fetch(GO_DOWN, sorted(node_ids), reason, detail) if node_ids else []
    return [row["node_id"] for row in rows]


async def wake(
    connection: Any,
    node_ids: Collection[str],
    reason: str,
    detail: str,
    sources: Collection[PowerState] = (PowerState.OFF,),
) -> list[str]:
    """Have nodes woken; return those that were in one of ``sources``."""
    states = [state.value for state in sources]
    rows = await connection.fetch(WAKE, sorted(node_ids), reason, detail, states) if node_ids else []
    return [row["node_id"] for row in rows]


class NodePower:
    """Runs the hooks of one leading scheduler; knows nothing but which of them run in this process now."""

    def __init__(self, database: Database, hook: PowerHook, settings: SchedulerSettings) -> None:
        self.hook = hook
        self._database = database
        self._settings = settings
        self._patience = Patience(
            settings.node_down_timeout_s, settings.node_wake_timeout_s, settings.node_power_attempts
        )
        self._due = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}

    def act(self) -> None:
        """Say that something was committed."""
        self._due.set()

    async def look(self) -> int:
        """Fold what came of hooks and what is heard of nodes; return how many changed."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(CHANGING)
        changed = 0
        for row in rows:
            if next_step(row, self._patience) is not None:
                async with self._database.transaction() as connection:
                    await connection.fetchval("SELECT id FROM nodes WHERE id = $1 FOR UPDATE", row["node_id"])
                    again = await connection.fetchrow(f"{CHANGING} AND p.node_id = $1 FOR UPDATE OF p", row["node_id"])
                    step = again and next_step(again, self._patience)
                    if step is not None:
                        await self._take(connection, again, step)
                        changed += 1
        if changed:
            self.act()
        return changed

    async def run(self) -> None:
        """Run the hooks that are due, until cancelled."""
        try:
            while True:
                self._due.clear()
                try:
                    await self._begin_due()
                except (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS) as error:
                    log.warning("node_power.waiting", error=str(error) or type(error).__name__)
                except Exception:  # a fault over one node must not leave the others asleep for ever
                    log.exception("node_power.failed")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._due.wait(), LOOK_EVERY_S)
        finally:
            await end_tasks(list(self._running.values()))

    async def _take(self, connection: Any, row: Any, step: Step) -> None:
        node_id = row["node_id"]
        match step:
            case Step.AWAKE:
                await self._awake(connection, row)
            case Step.STAY:
                await _stay(connection, row, "" if row["pinned"] else "It was told to go down, but is still heard.")
            case Step.DOWN:
                await connection.execute(
                    f"UPDATE node_power SET state = 'off', off_at = greatest(done_at, $2), {FRESH} WHERE node_id = $1",
                    node_id,
                    row["heartbeat_at"],
                )
                log.info("node.off", node=node_id)
            case Step.WAKE:
                await wake(connection, [node_id], BY_OPERATOR[0], "It is pinned awake.")
            case Step.RETRY:
                await connection.execute("UPDATE node_power SET done_at = NULL WHERE node_id = $1", node_id)
                log.warning("node.not_awake", node=node_id, attempts=row["attempts"])
            case Step.FAIL:
                said = f"It was told {row['attempts']} times to wake and was not heard."
                await self._fail(connection, row, said)

    async def _awake(self, connection: Any, row: Any) -> None:
        node_id, settings = row["node_id"], self._settings
        at, began = row["registered_at"], row["acted_at"] or row["off_at"]
        heard_at = at if began is not None and at > began else row["heartbeat_at"]
        if row["off_at"] is not None:
            await connection.execute(PERIOD, node_id, "off", row["off_at"], heard_at, settings.node_standby_w)
        if row["state"] == PowerState.WAKING and row["acted_at"] is not None:
            await connection.execute(PERIOD, node_id, "waking", row["acted_at"], heard_at, settings.node_boot_w)
        await connection.execute(
            f"UPDATE node_power SET state = 'on', reason = '', detail = '', off_at = NULL, {FRESH} WHERE node_id = $1",
            node_id,
        )
        log.info("node.awake", node=node_id, was=row["state"])

    async def _fail(self, connection: Any, row: Any, detail: str) -> None:
        node_id = row["node_id"]
        if row["state"] == PowerState.WAKING and row["acted_at"] is not None:
            power_w = self._settings.node_boot_w
            await connection.execute(PERIOD, node_id, "waking", row["acted_at"], row["at"], power_w)
        await connection.execute(
            f"UPDATE node_power SET state = 'failed', detail = $2, off_at = NULL, {FRESH} WHERE node_id = $1",
            node_id,
            detail,
        )
        await lose_nodes(connection, [node_id])
        log.error("node.power_failed", node=node_id, was=row["state"], detail=detail)

    async def _begin_due(self) -> None:
        async with self._database.connection() as connection:
            due = await connection.fetch(DUE, self._settings.node_min_off_s)
            booting = await connection.fetchval(BOOTING) if due else 0
        for row in due:
            node_id, state = row["node_id"], PowerState(row["state"])
            if node_id in self._running:
                continue
            if state is PowerState.WAKING and not row["begun"]:
                if booting >= self._settings.node_max_wakes:
                    continue
                booting += 1
            begun = await self._begin(node_id, state)
            if begun is not None:
                task = asyncio.create_task(self._carry_out(begun, state), name=f"power {node_id}")
                self._running[node_id] = task
                task.add_done_callback(lambda _, node_id=node_id: self._running.pop(node_id, None))

    async def _begin(self, node_id: str, state: PowerState) -> Target | None:
        """Note an attempt before it is made, so that those that end in a crash count too."""
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(BEGIN, node_id, state.value, command_stream(node_id))
            if row is None:
                return None
            if state is PowerState.WAKING and row["off_at"] is not None:
                power_w = self._settings.node_standby_w
                await connection.execute(PERIOD, node_id, "off", row["off_at"], row["acted_at"], power_w)
                await connection.execute("UPDATE node_power SET off_at = NULL WHERE node_id = $1", node_id)
        return Target(node_id, row["address"])

    async def _carry_out(self, target: Target, state: PowerState) -> None:
        error = ""
        try:
            await self.hook.set_power(target, on=state is PowerState.WAKING)
        except HookError as refusal:
            error = str(refusal)
        except Exception as fault:  # a hook's own bug must not be tried for ever
            log.exception("node_power.hook_broke", node=target.node_id)
            error = f"the hook broke: {type(fault).__name__}"
        while True:
            try:
                await self._finish(target.node_id, state, error)
                return
            except (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS) as trouble:
                log.warning("node_power.waiting", error=str(trouble) or type(trouble).__name__)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _finish(self, node_id: str, state: PowerState, error: str) -> None:
        async with self._database.transaction() as connection:
            await connection.fetchval("SELECT id FROM nodes WHERE id = $1 FOR UPDATE", node_id)
            row = await connection.fetchrow(f"{CHANGING} AND p.node_id = $1 FOR UPDATE OF p", node_id)
            if row is None or row["state"] != state:
                return
            if not error:
                await connection.execute("UPDATE node_power SET done_at = now() WHERE node_id = $1", node_id)
                return
            log.warning("node_power.hook_failed", node=node_id, state=state.value, error=error)
            if row["attempts"] < self._settings.node_power_attempts:
                pause_s = min(self._settings.node_power_backoff_s * 2.0 ** (row["attempts"] - 1), LONGEST_BACKOFF_S)
                await connection.execute(
                    "UPDATE node_power SET detail = $2, next_attempt_at = now() + make_interval(secs => $3) "
                    "WHERE node_id = $1",
                    node_id,
                    error,
                    pause_s,
                )
            elif state is PowerState.GOING_DOWN and row["leased"]:
                await _stay(connection, row, error)
            else:
                await self._fail(connection, row, error)


async def _stay(connection: Any, row: Any, detail: str) -> None:
    stays_s = STAYS_ON_S if detail else 0.0
    await connection.execute(
        f"UPDATE node_power SET state = 'on', detail = $2, stays_on_until = now() + make_interval(secs => $3), {FRESH} "
        "WHERE node_id = $1",
        row["node_id"],
        detail,
        stays_s,
    )
    if detail:
        log.warning("node.stays_on", node=row["node_id"], detail=detail)
