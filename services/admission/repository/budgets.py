"""Budgets, what has been spent of them, and the jobs that they hold."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, delete, select, text, update
from sqlalchemy.dialects.postgresql import insert

from services.admission.repository import Repository
from services.admission.steering import BUDGET_EXCEEDED
from services.contracts.budgets import Budget, BudgetSpec
from services.contracts.identity import KeyUse
from services.db.tables import budgets
from services.kit.ids import new_id

# A line belongs to the month in which it begins, as in reports.
_SPENT = text("""
SELECT j.tenant_id, j.project, sum(l.gpu_s) / 3600 AS gpu_h, sum(l.energy_j) / 3.6e6 AS kwh, sum(l.carbon_gco2) AS gco2
FROM booked_energy l JOIN jobs j ON j.id = l.job_id
WHERE l.start_at >= :start_at AND j.tenant_id IN (SELECT tenant_id FROM budgets) GROUP BY 1, 2
""")

_USED = text("""
SELECT k.id, u.model, sum(u.input_tokens)::bigint AS input_tokens, sum(u.output_tokens)::bigint AS output_tokens,
       sum(u.carbon_gco2) AS gco2
FROM api_keys k LEFT JOIN key_usages u ON u.key_id = ANY (k.replaced || k.id) AND u.start_at >= :start_at
WHERE k.limits ?| ARRAY['month_tokens', 'month_gco2', 'month_cost']
  AND (k.revoked_at IS NULL OR k.revoked_at > now() - interval '2 days') -- lines of its batches may still be answered
GROUP BY 1, 2 ORDER BY 1
""")

_NOTE_USES = text("""
WITH counted AS (
    SELECT k.id, w.used::jsonb AS used
    FROM api_keys k JOIN unnest(CAST(:ids AS text[]), CAST(:uses AS text[])) AS w (id, used) ON w.id = k.id
    WHERE k.used IS DISTINCT FROM w.used::jsonb FOR NO KEY UPDATE OF k SKIP LOCKED
)
UPDATE api_keys k SET used = c.used FROM counted c WHERE k.id = c.id
""")

_OF_JOB = "b.tenant_id = j.tenant_id AND b.project IN ('', j.project) AND b.exceeded"

# Jobs that others have locked wait for the next count: they are locked in other orders there, by plans of many jobs.
# Instances of model servers are left alone: their pool would start others in their place.
_HOLD = text(f"""
WITH chosen AS (
    SELECT DISTINCT ON (j.id) j.id, b.id AS budget_id, b.detail FROM jobs j JOIN budgets b ON {_OF_JOB}
    WHERE j.state = 'queued' AND NOT j.cancel_requested AND b.action = 'hold' AND j.spec -> 'service' IS NULL
    ORDER BY j.id, b.id
), free AS (
    SELECT id FROM jobs WHERE id IN (SELECT id FROM chosen) AND state = 'queued' FOR UPDATE SKIP LOCKED
), held AS (
    UPDATE jobs j
    SET state = 'held', reason = '{BUDGET_EXCEEDED}', detail = c.detail, queued_at = NULL, expected_start_at = NULL
    FROM chosen c JOIN free USING (id) WHERE j.id = c.id RETURNING j.id, j.tenant_id, c.budget_id, c.detail
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.held',
    jsonb_build_object('state', 'held', 'reason', '{BUDGET_EXCEEDED}', 'detail', detail, 'budget', budget_id)
FROM held RETURNING job_id
""")

_RELEASE = text(f"""
WITH free AS (
    SELECT id FROM jobs j WHERE j.state = 'held' AND j.reason = '{BUDGET_EXCEEDED}' AND NOT EXISTS (
        SELECT FROM budgets b WHERE {_OF_JOB} AND b.action = 'hold')
    FOR UPDATE SKIP LOCKED
), released AS (
    UPDATE jobs j SET state = 'queued', reason = NULL, detail = NULL, queued_at = now()
    FROM free WHERE j.id = free.id RETURNING j.id, j.tenant_id
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.queued', jsonb_build_object('state', 'queued', 'reason', 'budget_available') FROM released
RETURNING job_id
""")

_WARN = text(f"""
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT j.id, j.tenant_id, 'job.budget_warning',
    jsonb_build_object('detail', b.detail, 'budget', b.id, 'month', b.month)
FROM jobs j JOIN budgets b ON {_OF_JOB} AND b.action = 'warn'
WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled') AND NOT EXISTS (
    SELECT FROM job_events e WHERE e.job_id = j.id AND e.type = 'job.budget_warning'
        AND e.data ->> 'budget' = b.id AND e.data ->> 'month' = b.month)
RETURNING job_id
""")


class BudgetRepository(Repository):
    """Budgets, what is used of them, and jobs that they hold."""

    async def put(self, spec: BudgetSpec) -> Budget:
        """Store a budget in place of the one of the same tenant, project and quantity."""
        values: dict[str, Any] = {**spec.model_dump(), "project": spec.project or ""}
        changed = {"amount": spec.amount, "action": spec.action}
        query = (
            insert(budgets)
            .values(id=new_id("budget"), **values)
            .on_conflict_do_update(index_elements=["tenant_id", "project", "quantity"], set_=changed)
            .returning(budgets)
        )
        (made,) = await self._all(query, _budget)
        return made

    async def all(self, tenant_id: str | None = None, *, lock: bool = False) -> list[Budget]:
        """Return the budgets of a tenant (None: of all); with ``lock``, no other transaction can change them."""
        query = select(budgets).order_by(budgets.c.tenant_id, budgets.c.project, budgets.c.quantity)
        if tenant_id is not None:
            query = query.where(budgets.c.tenant_id == tenant_id)
        return await self._readable(query.with_for_update() if lock else query, _budget, "budget")

    async def remove(self, budget_id: str) -> bool:
        """Delete a budget; return whether there was one."""
        query = delete(budgets).where(budgets.c.id == budget_id).returning(budgets.c.id)
        return await self._value(query) is not None

    async def spent(self, start_at: datetime) -> Sequence[RowMapping]:
        """Return what projects of tenants with budgets used since ``start_at``: ``gpu_h``, ``kwh`` and ``gco2``."""
        return (await self._connection.execute(_SPENT, {"start_at": start_at})).mappings().all()

    async def used_by_keys(self, start_at: datetime) -> Sequence[RowMapping]:
        """Return what keys with budgets used since ``start_at``, by key and model; one row without for an idle key."""
        return (await self._connection.execute(_USED, {"start_at": start_at})).mappings().all()

    async def note_uses(self, used: Mapping[str, KeyUse]) -> None:
        """Store how much keys have used; one that somebody changes just now has its turn at the next count."""
        uses = [use.model_dump_json() for use in used.values()]
        await self._connection.execute(_NOTE_USES, {"ids": [*used], "uses": uses})

    async def note(self, budget_id: str, *, month: str, used: float, exceeded: bool, detail: str) -> None:
        query = update(budgets).where(budgets.c.id == budget_id)
        await self._connection.execute(query.values(month=month, used=used, exceeded=exceeded, detail=detail))

    async def warn(self) -> int:
        """Warn jobs according to the stored state of the budgets; return how many."""
        return len((await self._connection.execute(_WARN)).all())

    async def enforce(self) -> tuple[int, int]:
        """Hold and release jobs according to the stored state of the budgets; return how many of each."""
        held, released = [len((await self._connection.execute(query)).all()) for query in (_HOLD, _RELEASE)]
        return held, released


def _budget(row: RowMapping) -> Budget:
    return Budget.as_stored({**row, "project": row["project"] or None})
