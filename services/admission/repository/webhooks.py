"""Webhooks, the events that they are sent, and their deliveries."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import RowMapping, delete, exists, func, insert, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.admission.repository import Repository
from services.admission.repository.events import LAST, Position
from services.contracts.webhooks import Webhook, WebhookDelivery, WebhookEvent, WebhookSpec
from services.db.tables import webhook_deliveries, webhook_events, webhooks

SHOWN = 20
PAGE = 500
OF_JOBS = frozenset({WebhookEvent.JOB_STARTED, WebhookEvent.JOB_ENDED})
LARGEST_MOVE = 1_000
"""Transactions that the position may fall behind while no job of interest ends, so that it is not written always."""

_HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"

_CHANGES = text(f"""
WITH horizon AS ({_HORIZON} AS xid)
SELECT e.transaction_id, e.sequence, e.at,
    e.type <> 'job.running' AND e.at > now() - make_interval(secs => :settle_s) AS is_young,
    j.id AS job_id, j.tenant_id, j.name, j.project, j.state, j.reason, j.detail, j.exit_code, j.submitted_at,
    j.started_at, coalesce(j.ended_at, e.at) AS ended_at,
    e.type = 'job.running' AS is_start, j.spec->'notify' AS notify,
    f.energy_j, f.gpu_energy_j, f.carbon_gco2, f.gpu_s, f.estimated_energy_j
FROM horizon, job_events e JOIN jobs j ON j.id = e.job_id LEFT JOIN footprints f ON f.job_id = e.job_id
WHERE (e.transaction_id, e.sequence) > (:xid, :sequence) AND e.transaction_id < horizon.xid
    AND e.type IN ('job.running', 'job.succeeded', 'job.failed', 'job.cancelled')
    AND e.tenant_id IN (SELECT tenant_id FROM webhooks WHERE disabled_at IS NULL AND events && :events)
    AND (e.type <> 'job.running' OR j.spec->'notify' ? 'started'
        OR e.tenant_id IN (SELECT tenant_id FROM webhooks WHERE disabled_at IS NULL AND 'job.started' = ANY(events)))
ORDER BY e.transaction_id, e.sequence LIMIT :page
""")

_MOVE = text("UPDATE webhook_position SET transaction_id = :xid, sequence = :sequence")

_BEGIN = text(f"""
UPDATE webhook_position SET transaction_id = ({_HORIZON}) - 1, sequence = {LAST}
WHERE NOT EXISTS (SELECT FROM webhooks WHERE disabled_at IS NULL)
""")

_DUE = text("""
SELECT id FROM webhooks w WHERE disabled_at IS NULL AND coalesce(paused_until <= now(), true) AND EXISTS (
    SELECT FROM webhook_deliveries d WHERE d.webhook_id = w.id AND d.state = 'pending' AND d.next_attempt_at <= now())
ORDER BY id
""")

_CLAIM = text("""
WITH hook AS (
    SELECT * FROM webhooks WHERE id = :id AND disabled_at IS NULL AND coalesce(paused_until <= now(), true)
), chosen AS (
    SELECT d.id FROM webhook_deliveries d
    WHERE d.webhook_id = (SELECT id FROM hook) AND d.state = 'pending' AND d.next_attempt_at <= now()
    ORDER BY d.next_attempt_at, d.id LIMIT (SELECT CASE WHEN failures > 0 THEN 1 ELSE :batch END FROM hook)
    FOR UPDATE SKIP LOCKED
)
UPDATE webhook_deliveries d
SET attempts = attempts + 1, attempted_at = now(), next_attempt_at = now() + make_interval(secs => :lease_s)
FROM chosen, hook WHERE d.id = chosen.id
RETURNING d.id, d.body, d.attempts, extract(epoch FROM now() - d.created_at)::float8 AS age_s,
    hook.id AS webhook_id, hook.url, hook.secret_revision, hook.secret_sha256,
    coalesce(hook.previous_secret_until > now(), false) AS overlaps
""")

_FAILED = text("""
UPDATE webhooks SET failures = failures + 1, failing_since = coalesce(failing_since, now()),
    paused_until = greatest(paused_until, now() + make_interval(
        secs => greatest(cast(:wait_s AS float8), least(cast(:longest_s AS float8), power(2, least(failures, 20))))))
WHERE id = :id AND disabled_at IS NULL
RETURNING failing_since < now() - make_interval(secs => :disable_after_s) AS is_hopeless
""")


class Attempt(NamedTuple):
    """A delivery that this process is to attempt now."""

    id: str  #: The delivery's id
    body: str
    attempts: int  #: How many attempts have been made, including this one
    age_s: float  #: Seconds since the message was created
    webhook_id: str
    url: str
    secret_revision: int
    secret_sha256: bytes
    overlaps: bool  #: Whether the message is also signed with the previous secret


class NewDelivery(NamedTuple):
    """A message for one webhook."""

    id: str
    webhook_id: str
    type: str
    body: str


class Receiver(NamedTuple):
    """What determines whether a webhook is sent an event."""

    id: str
    tenant_id: str
    events: Sequence[str]
    project: str | None
    enabled_at: datetime

    def wants(
        self, event: str, tenant_id: str | None, project: str | None, at: datetime, *, is_asked: bool = False
    ) -> bool:
        """Return whether an event is for this webhook.

        Args:
            tenant_id: To whom; None for events of the cluster.
            project: In which project.
            is_asked: Whether the job asks that webhooks for other messages about jobs are sent this one too.
        """
        return (
            (event in self.events or (is_asked and not OF_JOBS.isdisjoint(self.events)))
            and tenant_id in (None, self.tenant_id)
            and (self.project is None or self.project == project)
            and at >= self.enabled_at
        )


async def write_event(
    connection: AsyncConnection, event: WebhookEvent, tenant_id: str, project: str | None, data: dict[str, Any]
) -> None:
    """Record an event, in the transaction of the change that it reports."""
    values = {"type": event.value, "tenant_id": tenant_id, "project": project, "data": data}
    await connection.execute(insert(webhook_events).values(**values))


class WebhookRepository(Repository):
    """Webhooks, events and deliveries."""

    async def insert(self, webhook_id: str, tenant_id: str, spec: WebhookSpec, secret_sha256: bytes) -> Webhook:
        values = {**spec.model_dump(mode="json"), "id": webhook_id, "tenant_id": tenant_id}
        query = insert(webhooks).values(**values, secret_sha256=secret_sha256).returning(webhooks)
        (made,) = await self._all(query, _webhook)
        return made

    async def all(self, tenant_id: str | None) -> list[Webhook]:
        """Return the webhooks of a tenant (None: of all), oldest first."""
        query = select(webhooks).order_by(webhooks.c.id)
        if tenant_id is not None:
            query = query.where(webhooks.c.tenant_id == tenant_id)
        return await self._readable(query, _webhook, "webhook")

    async def count(self, tenant_id: str) -> int:
        """Return how many webhooks a tenant has; the tenant's row is locked, so that none is added meanwhile."""
        await self._connection.execute(text("SELECT id FROM tenants WHERE id = :id FOR UPDATE"), {"id": tenant_id})
        query = select(func.count()).select_from(webhooks).where(webhooks.c.tenant_id == tenant_id)
        return await self._value(query)

    async def find(self, webhook_id: str, tenant_id: str | None, *, lock: bool = False) -> Webhook | None:
        """Return a webhook if it exists and belongs to ``tenant_id`` (None: to any tenant)."""
        query = select(webhooks).where(webhooks.c.id == webhook_id)
        if tenant_id is not None:
            query = query.where(webhooks.c.tenant_id == tenant_id)
        return await self._one(query.with_for_update() if lock else query, _webhook)

    async def is_any(self) -> bool:
        """Return whether there is a webhook, or an event that the publisher has not taken."""
        return await self._value(select(or_(exists(webhooks.select()), exists(webhook_events.select()))))

    async def waiting(self) -> int:
        """Return how many messages have not been delivered yet."""
        query = select(func.count()).select_from(webhook_deliveries).where(webhook_deliveries.c.state == "pending")
        return await self._value(query)

    async def deliveries(self, webhook_id: str) -> list[WebhookDelivery]:
        """Return the last messages of a webhook, newest first."""
        query = select(webhook_deliveries).where(webhook_deliveries.c.webhook_id == webhook_id)
        query = query.order_by(webhook_deliveries.c.id.desc()).limit(SHOWN)
        return await self._readable(query, _delivery, "delivery")

    async def delivery(self, delivery_id: str) -> WebhookDelivery | None:
        """Return a message; None if its webhook was deleted meanwhile."""
        query = select(webhook_deliveries).where(webhook_deliveries.c.id == delivery_id)
        return await self._one(query, _delivery)

    async def delete(self, webhook_id: str) -> None:
        await self._connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))

    async def revision(self, webhook_id: str) -> int:
        """Return the revision of a webhook's secret."""
        query = select(webhooks.c.secret_revision).where(webhooks.c.id == webhook_id)
        return await self._value(query)

    async def rotate(self, webhook_id: str, revision: int, secret_sha256: bytes, overlap_s: float) -> None:
        """Give a webhook a new secret; for ``overlap_s``, messages are also signed with the previous one."""
        until = func.now() + timedelta(seconds=overlap_s)
        values = {"secret_revision": revision, "secret_sha256": secret_sha256, "previous_secret_until": until}
        await self._connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**values))

    async def begin(self) -> None:
        """Skip the job ends so far if no webhook is enabled; call it before one is."""
        await self._connection.execute(text("SELECT id FROM webhook_position FOR UPDATE"))
        await self._connection.execute(_BEGIN)

    async def enable(self, webhook_id: str) -> None:
        """Enable a webhook: send it what happens from now on."""
        cleared = {"disabled_at": None, "disabled_reason": None, "failing_since": None, "paused_until": None}
        query = update(webhooks).where(webhooks.c.id == webhook_id)
        await self._connection.execute(query.values(**cleared, failures=0, enabled_at=func.now()))

    async def disable(self, webhook_id: str, reason: str) -> None:
        """Send a webhook nothing more, and give up its waiting messages."""
        query = update(webhooks).where(webhooks.c.id == webhook_id)
        await self._connection.execute(query.values(disabled_at=func.now(), disabled_reason=reason))
        waiting = update(webhook_deliveries).where(
            webhook_deliveries.c.webhook_id == webhook_id, webhook_deliveries.c.state == "pending"
        )
        ended = {"state": "failed", "ended_at": func.now(), "next_attempt_at": None}
        await self._connection.execute(waiting.values(**ended, error="the webhook was disabled"))

    async def lock_position(self) -> Position | None:
        """Return, locked, the position up to which job ends have become deliveries; None if another process has it."""
        query = text("SELECT transaction_id, sequence FROM webhook_position FOR UPDATE SKIP LOCKED")
        return await self._one(query, lambda row: Position(**row))

    async def receivers(self) -> list[Receiver]:
        query = select(webhooks).where(webhooks.c.disabled_at.is_(None)).order_by(webhooks.c.id)
        return await self._all(query, lambda row: Receiver(**{name: row[name] for name in Receiver._fields}))

    async def take_events(self) -> Sequence[RowMapping]:
        """Delete the oldest recorded events and return them."""
        chosen = select(webhook_events.c.id).order_by(webhook_events.c.id).limit(PAGE).with_for_update(skip_locked=True)
        query = delete(webhook_events).where(webhook_events.c.id.in_(chosen)).returning(webhook_events)
        found = (await self._connection.execute(query)).mappings().all()
        return sorted(found, key=lambda row: row["id"])

    async def changes(self, after: Position, settle_s: float) -> Sequence[RowMapping]:
        """Return a page of starts and ends of jobs after a position, in order, with the jobs and their footprints."""
        values = {"xid": after.transaction_id, "sequence": after.sequence, "settle_s": settle_s, "page": PAGE}
        return (await self._connection.execute(_CHANGES, {**values, "events": list(OF_JOBS)})).mappings().all()

    async def move(self, position: Position) -> None:
        """Store the position up to which job ends have become deliveries."""
        await self._connection.execute(_MOVE, {"xid": position.transaction_id, "sequence": position.sequence})

    async def horizon(self) -> Position:
        """Return the position after everything that can be read now."""
        return Position((await self._connection.execute(text(_HORIZON))).scalar_one() - 1, LAST)

    async def add(self, deliveries: Sequence[NewDelivery]) -> None:
        """Store messages that are due immediately."""
        if deliveries:
            await self._connection.execute(insert(webhook_deliveries), [each._asdict() for each in deliveries])

    async def due(self) -> list[str]:
        """Return the webhooks that have messages to send now."""
        return [row.id for row in await self._connection.execute(_DUE)]

    async def claim(self, webhook_id: str, *, batch: int, lease_s: float) -> list[Attempt]:
        """Return the messages of a webhook to attempt now: one while it is failing, else up to ``batch``.

        They are due again after ``lease_s`` unless their outcome has been stored by then.
        """
        query = _CLAIM.bindparams(id=webhook_id, batch=batch, lease_s=lease_s)
        return await self._all(query, lambda row: Attempt(**row))

    async def claim_new(self, delivery: NewDelivery, lease_s: float) -> Attempt:
        """Store a message that this process attempts immediately."""
        next_at = func.now() + timedelta(seconds=lease_s)
        attempt = {"attempts": 1, "attempted_at": func.now(), "next_attempt_at": next_at}
        await self._connection.execute(insert(webhook_deliveries).values(**delivery._asdict(), **attempt))
        found = select(
            webhooks.c.url,
            webhooks.c.secret_revision,
            webhooks.c.secret_sha256,
            func.coalesce(webhooks.c.previous_secret_until > func.now(), False).label("overlaps"),
        ).where(webhooks.c.id == delivery.webhook_id)
        row = (await self._connection.execute(found)).mappings().one()
        return Attempt(delivery.id, delivery.body, 1, 0.0, delivery.webhook_id, **row)

    async def end(self, attempt: Attempt, state: str, status: int | None, error: str | None) -> None:
        """Store that a message was accepted or given up, unless a later attempt has begun."""
        await self._note(attempt, state=state, status=status, error=error, ended_at=func.now(), next_attempt_at=None)

    async def postpone(self, attempt: Attempt, delay_s: float, status: int | None, error: str | None) -> None:
        """Store that an attempt failed, and when the next one begins."""
        next_at = func.now() + timedelta(seconds=delay_s)
        await self._note(attempt, status=status, error=error, next_attempt_at=next_at)

    async def _note(self, attempt: Attempt, **values: Any) -> None:
        query = update(webhook_deliveries).where(
            webhook_deliveries.c.id == attempt.id,
            webhook_deliveries.c.state == "pending",
            webhook_deliveries.c.attempts == attempt.attempts,
        )
        await self._connection.execute(query.values(**values))

    async def succeeded(self, webhook_id: str) -> None:
        """Store that a webhook accepted a message."""
        cleared = {"failing_since": None, "paused_until": None}
        query = update(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.failing_since.is_not(None))
        await self._connection.execute(query.values(**cleared, failures=0))

    async def failed(self, webhook_id: str, *, wait_s: float, longest_s: float, disable_after_s: float) -> bool:
        """Store that an attempt failed, and pause the webhook: 1, 2, 4, ... s up to ``longest_s``, at least ``wait_s``.

        Return whether it is enabled and has only failed for ``disable_after_s``.
        """
        values = {"wait_s": wait_s, "longest_s": longest_s, "disable_after_s": disable_after_s}
        row = (await self._connection.execute(_FAILED, {"id": webhook_id, **values})).one_or_none()
        return row is not None and row.is_hopeless

    async def forget(self, retention_s: float) -> int:
        """Delete messages that ended that long ago; return how many."""
        before = func.now() - timedelta(seconds=retention_s)
        old = select(webhook_deliveries.c.id).where(webhook_deliveries.c.ended_at < before)
        query = delete(webhook_deliveries).where(webhook_deliveries.c.id.in_(old.with_for_update(skip_locked=True)))
        return (await self._connection.execute(query)).rowcount


def _webhook(row: RowMapping) -> Webhook:
    return Webhook.as_stored({**row, "enabled": row["disabled_at"] is None})


def _delivery(row: RowMapping) -> WebhookDelivery:
    return WebhookDelivery.as_stored({**row, "event": row["type"]})
