"""What operators ask the scheduler's tables, and the one thing they change: the policy."""

from __future__ import annotations

from typing import Any

from services.contracts.identity import Identity
from services.contracts.nodes import PowerState
from services.db.database import Database
from services.db.lengths import AMOUNT, MEASURED
from services.db.node_power import NODE_POWER
from services.scheduler.learning.learned import KIND
from services.scheduler.power.nodes import BY_OPERATOR, power_down, wake

SET_POLICY = """
UPDATE scheduler_state
   SET memory = CASE WHEN policy = $1 THEN memory ELSE '{}' END, policy_since = now(), last_active_at = NULL,
       policy = $1, parameters = $2, policy_changed_by = $3, version = version + 1
 WHERE id = 1 RETURNING policy, parameters, policy_since, policy_changed_by
"""

AUDIT = "INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ($1, $2, $3, $4, $5)"

JOB = f"""
SELECT j.tenant_id, {KIND} AS kind, coalesce(j.labels ->> 'kind', j.id) AS name,
       coalesce(a.gpus, (j.spec #>> '{{gpus,min}}')::int) AS gpus
  FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended' WHERE j.id = $1
"""

LEARNED = """
SELECT gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, points, time_mape, energy_mape, detail,
       fitted_at, said.family, coalesce(said.batch_known, false) AS batch_known
  FROM setting_profiles f, LATERAL (
       SELECT (array_agg(j.spec ->> 'family' ORDER BY p.measured_at DESC) FILTER (WHERE j.spec ->> 'family' <> ''))[1]
                AS family, bool_or(p.local_batch > 0) AS batch_known
         FROM setting_points p LEFT JOIN jobs j ON j.id = p.job_id
        WHERE (p.kind, p.gpu_model, p.setting) = (f.kind, f.gpu_model, f.setting)) said
 WHERE f.kind = $1 ORDER BY gpu_model, setting
"""

MEASUREMENTS = """
SELECT job_id, allocation_id, gpu_model, setting, gpus, state, detail, settings, position, began_at, ended_at
  FROM setting_measurements WHERE kind = $1 ORDER BY began_at DESC, allocation_id LIMIT 20
"""

IN_FORCE = """
SELECT s.*, a.state <> 'ended' AS current FROM settings_in_force s JOIN allocations a ON a.id = s.allocation_id
 WHERE a.job_id = $1 ORDER BY s.since DESC, s.node_id LIMIT 50
"""


CHANGED = "UPDATE scheduler_state SET version = version + 1 WHERE id = 1 RETURNING id"
"""Makes a plan that is being made at the same time a stale one."""

POWERED = """
SELECT n.state = 'up' AND coalesce(n.lease_until > now(), false) AS heard, coalesce(p.state, 'on') AS state,
       coalesce(p.pinned, false) AS pinned, p.acted_at IS NOT NULL AS acted,
       EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id) AS busy
  FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id WHERE n.id = $1
"""

KNOWN = "INSERT INTO node_power (node_id) VALUES ($1) ON CONFLICT DO NOTHING"

PIN = "UPDATE node_power SET pinned = $2 WHERE node_id = $1 AND pinned <> $2 RETURNING node_id"


class PowerRefusedError(Exception):
    """A node's power cannot be changed as asked; the message says why."""


PREDICTION = f"""
SELECT j.tenant_id, j.state, (j.spec #>> '{{gpus,min}}')::int AS min_gpus, q.predicted_at, q.model_id, q.group_id,
       q.seen AS group_seen, q.examples, q.gpu_s, q.spread_gpu_s, q.low_gpu_s, q.median_gpu_s, q.high_gpu_s,
       CASE WHEN j.state = 'succeeded' THEN {AMOUNT} END AS actual_gpu_s
  FROM jobs j LEFT JOIN job_predictions q ON q.job_id = j.id {MEASURED}
 WHERE j.id = $1
"""

MODELS = """
SELECT id, trained_at, through_at, jobs, groups, is_active AS active, evaluation
  FROM length_models ORDER BY trained_at DESC, id DESC
"""


class Repository:
    """Queries of the scheduler's API."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def active_policy(self) -> Any | None:
        """Return the policy in force, or None before the scheduler's first turn."""
        async with self._database.connection() as connection:
            return await connection.fetchrow(
                "SELECT policy, parameters, policy_since, policy_changed_by FROM scheduler_state WHERE id = 1"
            )

    async def set_policy(self, name: str, parameters: dict[str, Any], caller: Identity) -> Any | None:
        """Put a policy in force from the next round on, and note who did; None before the scheduler's first turn.

        That round is an active one: a limit that falls may have to stop gangs. The memory of
        another policy is forgotten; new parameters of the same one go on from what it remembers.
        """
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(SET_POLICY, name, parameters, caller.key_id)
            if row is not None:
                data = {"parameters": parameters}
                await connection.execute(AUDIT, caller.tenant_id, caller.key_id, "policy.set", name, data)
            return row

    async def plans(self, before: int | None, limit: int) -> list[Any]:
        """Return recorded rounds, newest first, from below ``before``."""
        async with self._database.connection() as connection:
            return await connection.fetch(
                "SELECT * FROM plans WHERE $1::bigint IS NULL OR round < $1 ORDER BY round DESC LIMIT $2", before, limit
            )

    async def plan(self, number: int) -> Any | None:
        """Return one recorded round."""
        async with self._database.connection() as connection:
            return await connection.fetchrow("SELECT * FROM plans WHERE round = $1", number)

    async def node_power(self, node_id: str) -> Any | None:
        """Return a node's power as ``contracts.nodes.NodePower`` has it, with ``node_id``; None without such a node."""
        async with self._database.connection() as connection:
            return await connection.fetchrow(NODE_POWER, node_id)

    async def sleep(self, node_id: str, caller: Identity) -> None:
        """Have an idle node powered down, and note who did; one that is off or going down is left so.

        Raises:
            PowerRefusedError: it is busy, pinned, waking or not heard of.
        """
        async with self._database.transaction() as connection:
            node = await self._powered(connection, node_id)
            if node["state"] in (PowerState.OFF, PowerState.GOING_DOWN):
                return
            for refused, why in (
                (node["pinned"], "It is pinned awake."),
                (node["busy"], "Gangs hold its GPUs; drain it and wait for their end."),
                (node["state"] == PowerState.WAKING, "It is being woken."),
                (not node["heard"], "Nothing is heard from it."),
            ):
                if refused:
                    raise PowerRefusedError(why)
            await power_down(connection, [node_id], *BY_OPERATOR)
            await self._note(connection, "node.sleep", node_id, caller)

    async def wake(self, node_id: str, caller: Identity) -> None:
        """Have a node woken that is off, failed or silent, and note who did; one that is awake or waking is left so.

        Raises:
            PowerRefusedError: it is just being powered down.
        """
        async with self._database.transaction() as connection:
            node = await self._powered(connection, node_id)
            if node["state"] == PowerState.WAKING or (node["state"] == PowerState.ON and node["heard"]):
                return
            if node["state"] == PowerState.GOING_DOWN:
                raise PowerRefusedError("It is being powered down; ask again when it is off, or pin it awake.")
            await connection.execute(KNOWN, node_id)
            await wake(connection, [node_id], *BY_OPERATOR, sources=(PowerState.OFF, PowerState.FAILED, PowerState.ON))
            await self._note(connection, "node.wake", node_id, caller)

    async def pin(self, node_id: str, pinned: bool, caller: Identity) -> None:
        """Keep a node awake, waking it first if need be, or let plans power it down again; note who did."""
        async with self._database.transaction() as connection:
            await self._powered(connection, node_id)
            await connection.execute(KNOWN, node_id)
            if await connection.fetchval(PIN, node_id, pinned):
                await self._note(connection, "node.pin_awake" if pinned else "node.unpin", node_id, caller)

    async def _powered(self, connection: Any, node_id: str) -> Any:
        await connection.execute(CHANGED)
        return await connection.fetchrow(POWERED, node_id)

    async def _note(self, connection: Any, action: str, target: str, caller: Identity) -> None:
        await connection.execute(AUDIT, caller.tenant_id, caller.key_id, action, target, {})

    async def job(self, job_id: str) -> Any | None:
        """Return a job's owner, its kind and its size."""
        async with self._database.connection() as connection:
            return await connection.fetchrow(JOB, job_id)

    async def in_force(self, job_id: str) -> list[Any]:
        """Return what a job's devices were set to."""
        async with self._database.connection() as connection:
            return await connection.fetch(IN_FORCE, job_id)

    async def profile(self, kind: str) -> tuple[list[Any], list[Any]]:
        """Return what was learned of a kind of job, and its last measurements."""
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            return await connection.fetch(LEARNED, kind), await connection.fetch(MEASUREMENTS, kind)

    async def prediction(self, job_id: str) -> Any | None:
        """Return a job with what was foretold of it, if anything was, and what it came to."""
        async with self._database.connection() as connection:
            return await connection.fetchrow(PREDICTION, job_id)

    async def length_models(self) -> list[Any]:
        """Return the versions of the model of job lengths, newest first, without their content."""
        async with self._database.connection() as connection:
            return await connection.fetch(MODELS)
