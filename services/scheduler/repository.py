"""What operators ask the scheduler's tables, and the one thing they change: the policy."""

from __future__ import annotations

from typing import Any

from services.contracts.identity import Identity
from services.db.pool import Pool

SET_POLICY = """
UPDATE scheduler_state
   SET memory = CASE WHEN policy = $1 THEN memory ELSE '{}' END, policy_since = now(), last_active_at = NULL,
       policy = $1, parameters = $2, policy_changed_by = $3, version = version + 1
 WHERE id = 1 RETURNING policy, parameters, policy_since, policy_changed_by
"""

AUDIT = "INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ($1, $2, $3, $4, $5)"

JOB = """
SELECT j.tenant_id, coalesce(j.labels ->> 'kind', j.id) AS kind,
       coalesce(a.gpus, (j.spec #>> '{gpus,min}')::int) AS gpus
  FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended' WHERE j.id = $1
"""

LEARNED = """
SELECT gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, points, time_mape, energy_mape, detail,
       fitted_at
  FROM setting_profiles WHERE kind = $1 ORDER BY gpu_model, setting
"""

MEASUREMENTS = """
SELECT job_id, allocation_id, gpu_model, setting, gpus, state, detail, settings, position, began_at, ended_at
  FROM setting_measurements WHERE kind = $1 ORDER BY began_at DESC, allocation_id LIMIT 20
"""


class Repository:
    """Queries of the scheduler's API."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def active_policy(self) -> Any | None:
        """Return the policy in force, or None before the scheduler's first turn."""
        async with self._pool.connection() as connection:
            return await connection.fetchrow(
                "SELECT policy, parameters, policy_since, policy_changed_by FROM scheduler_state WHERE id = 1"
            )

    async def set_policy(self, name: str, parameters: dict[str, Any], caller: Identity) -> Any | None:
        """Put a policy in force from the next round on, and note who did; None before the scheduler's first turn.

        That round is an active one: a limit that falls may have to stop gangs. The memory of
        another policy is forgotten; new parameters of the same one go on from what it remembers.
        """
        async with self._pool.transaction() as connection:
            row = await connection.fetchrow(SET_POLICY, name, parameters, caller.key_id)
            if row is not None:
                data = {"parameters": parameters}
                await connection.execute(AUDIT, caller.tenant_id, caller.key_id, "policy.set", name, data)
            return row

    async def plans(self, before: int | None, limit: int) -> list[Any]:
        """Return recorded rounds, newest first, from below ``before``."""
        async with self._pool.connection() as connection:
            return await connection.fetch(
                "SELECT * FROM plans WHERE $1::bigint IS NULL OR round < $1 ORDER BY round DESC LIMIT $2", before, limit
            )

    async def plan(self, number: int) -> Any | None:
        """Return one recorded round."""
        async with self._pool.connection() as connection:
            return await connection.fetchrow("SELECT * FROM plans WHERE round = $1", number)

    async def job(self, job_id: str) -> Any | None:
        """Return a job's owner, its kind and its size."""
        async with self._pool.connection() as connection:
            return await connection.fetchrow(JOB, job_id)

    async def profile(self, kind: str) -> tuple[list[Any], list[Any]]:
        """Return what was learned of a kind of job, and its last measurements."""
        async with self._pool.transaction("repeatable_read", readonly=True) as connection:
            return await connection.fetch(LEARNED, kind), await connection.fetch(MEASUREMENTS, kind)
