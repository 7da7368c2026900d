"""Use cases on webhooks, and the publisher that makes deliveries of events."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.admission.repository.access import write_audit
from services.admission.repository.events import Position
from services.admission.repository.webhooks import LARGEST_MOVE, PAGE, NewDelivery, Receiver, WebhookRepository
from services.admission.webhooks.addresses import AddressRules, fault_of
from services.admission.webhooks.sending import Sender, Signer, fingerprint
from services.contracts import webhooks
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.jobs import JobFootprint
from services.contracts.problems import FieldError
from services.core.domain.jobs import JobState
from services.kit.ids import new_id, utc_now
from services.kit.problems import ProblemError, found
from services.kit.readable import readable


class Publisher:
    """Turns what has happened since the last time into deliveries.

    Starts and ends of jobs are read from ``job_events``, which is written in the transaction of the change, after a
    stored position; events of budgets and nodes from ``webhook_events``. Deliveries are inserted in the transaction
    that moves the position and deletes those rows: each event becomes exactly one delivery for each webhook that wants
    it, whenever this process dies.
    """

    def __init__(self, engine: AsyncEngine, settle_s: float) -> None:
        self._engine, self._settle_s = engine, settle_s

    async def has_work(self) -> bool:
        """Return whether there is a webhook, or an event that `publish` has not taken."""
        async with self._engine.connect() as connection:
            return await WebhookRepository(connection).is_any()

    async def publish(self) -> int:
        """Make the deliveries of all events that are ready, and return how many.

        The end of a job is ready after ``settle_s``: until then its nodes may still report energy.
        """
        made = 0
        while True:
            added, is_last = await self._publish_page()
            made += added
            if is_last:
                return made

    async def _publish_page(self) -> tuple[int, bool]:
        async with self._engine.begin() as connection:
            repository = WebhookRepository(connection)
            position = await repository.lock_position()
            if position is None:
                return 0, True
            receivers = await repository.receivers()
            events = await repository.take_events()
            made = readable(events, partial(_deliveries_of_event, receivers=receivers), "event")
            is_last = len(events) < PAGE
            if receivers:
                horizon = await repository.horizon()  # before the page is read, so that it skips nothing
                changes = await repository.changes(position, self._settle_s)
                ready = _ready(changes)
                made += readable(ready, partial(_deliveries_of_job, receivers=receivers), "job", itemgetter("job_id"))
                reached = Position(ready[-1]["transaction_id"], ready[-1]["sequence"]) if ready else position
                if len(ready) == len(changes) < PAGE and horizon.transaction_id - reached.transaction_id > LARGEST_MOVE:
                    reached = horizon
                if reached != position:
                    await repository.move(reached)
                is_last = is_last and len(ready) < PAGE
            await repository.add(deliveries := [delivery for each in made for delivery in each])
        return len(deliveries), is_last


def _ready(changes: Sequence[RowMapping]) -> Sequence[RowMapping]:
    """Return those before the first end that is too recent; the position cannot pass that one."""
    young = next((index for index, row in enumerate(changes) if row["is_young"]), len(changes))
    return changes[:young]


def _deliveries_of_job(row: RowMapping, receivers: Iterable[Receiver]) -> list[NewDelivery]:
    asked = row["notify"] or ()
    message: webhooks.WebhookMessage
    if row["is_start"]:
        started = webhooks.JobStarted.as_stored({**row, "started_at": row["at"]})
        message, is_asked = webhooks.JobStartedMessage(timestamp=row["at"], data=started), "started" in asked
    else:
        footprint = {name: row[name] for name in JobFootprint.model_fields if row[name] is not None}
        ended = webhooks.JobEnded.as_stored({**row, "footprint": footprint})
        message = webhooks.JobEndedMessage(timestamp=row["at"], data=ended)
        is_asked = "ended" in asked or ("failed" in asked and ended.state is JobState.FAILED)
    return _deliveries(message, row, receivers, is_asked=is_asked)


def _deliveries_of_event(row: RowMapping, receivers: Iterable[Receiver]) -> list[NewDelivery]:
    message: webhooks.WebhookMessage
    if row["type"] == webhooks.WebhookEvent.NODE_LOST:
        message = webhooks.NodeLostMessage(timestamp=row["at"], data=webhooks.NodeLost.as_stored(row["data"]))
    else:
        excess = webhooks.BudgetExceeded.as_stored(row["data"])
        message = webhooks.BudgetExceededMessage(timestamp=row["at"], data=excess)
    return _deliveries(message, row, receivers)


def _deliveries(
    message: webhooks.WebhookMessage, row: RowMapping, receivers: Iterable[Receiver], *, is_asked: bool = False
) -> list[NewDelivery]:
    about = message.type, row["tenant_id"], row["project"], row["at"]
    return [delivery_of(each.id, message) for each in receivers if each.wants(*about, is_asked=is_asked)]


def delivery_of(webhook_id: str, message: webhooks.WebhookMessage) -> NewDelivery:
    """Return a message as a delivery; its body is stored unchanged, so that every attempt sends the same one."""
    return NewDelivery(new_id("msg"), webhook_id, message.type, message.model_dump_json())


WEBHOOK_ID = r"webhook_[0-9a-z]{26}"


class Webhooks:
    """Manages webhooks, and sends test messages."""

    def __init__(
        self,
        engine: AsyncEngine,
        signer: Signer,
        addresses: AddressRules,
        sender: Sender,
        on_made: Callable[[], None],
        *,
        max_per_tenant: int,
    ) -> None:
        """Take among others whom to tell once a webhook is made, for loops that waited for the first."""
        self._engine, self._signer, self._addresses = engine, signer, addresses
        self._sender, self._on_made, self._max_per_tenant = sender, on_made, max_per_tenant

    async def create(self, caller: Identity, spec: webhooks.WebhookSpec) -> webhooks.NewWebhook:
        """Create a webhook of the caller's tenant; only this answer contains its secret.

        Raises:
            ProblemError: 403 for cluster events or for one webhook too many; 422 for an address that is refused.
        """
        if webhooks.WebhookEvent.NODE_LOST in spec.events:
            if not caller.is_operator:
                raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator may have node.lost sent.")
            if spec.project is not None:
                raise _invalid("/project", "must be left out: node.lost belongs to no project")
        if fault := await fault_of(spec.url, self._addresses):
            raise _invalid("/url", fault)
        webhook_id = new_id("webhook")
        secret = self._signer.secret(webhook_id, 1)
        async with self._engine.begin() as connection:
            repository = WebhookRepository(connection)
            if await repository.count(caller.tenant_id) >= self._max_per_tenant:
                detail = f"A tenant may have {self._max_per_tenant} webhooks; delete one first."
                raise ProblemError(403, ProblemCode.QUOTA_EXCEEDED, detail)
            await repository.begin()
            made = await repository.insert(webhook_id, caller.tenant_id, spec, fingerprint(secret))
            await write_audit(connection, caller, "webhook.created", webhook_id, url=spec.url, events=spec.events)
        self._on_made()
        return webhooks.NewWebhook.of(made, secret=secret)

    async def list(self, caller: Identity) -> webhooks.WebhookList:
        """Return the webhooks of the caller's tenant; an operator sees all."""
        async with self._engine.connect() as connection:
            return webhooks.WebhookList(items=await WebhookRepository(connection).all(caller.only_tenant))

    async def get(self, caller: Identity, webhook_id: str) -> webhooks.WebhookDetail:
        """Return a webhook and its last messages."""
        async with self._engine.connect() as connection:
            repository = WebhookRepository(connection)
            known = found(await repository.find(webhook_id, caller.only_tenant), "webhook")
            return webhooks.WebhookDetail.of(known, deliveries=await repository.deliveries(webhook_id))

    async def change(self, caller: Identity, webhook_id: str, change: webhooks.WebhookChange) -> webhooks.Webhook:
        """Enable or disable a webhook; the rest of a webhook never changes."""
        async with self._engine.begin() as connection:
            repository = WebhookRepository(connection)
            if change.enabled:
                await repository.begin()  # before the webhook's row is locked, as by the process that makes deliveries
            known = await self._lock(connection, caller, webhook_id)
            if known.enabled == change.enabled:
                return known
            if change.enabled:
                await repository.enable(webhook_id)
                await write_audit(connection, caller, "webhook.enabled", webhook_id, url=known.url)
            else:
                await repository.disable(webhook_id, "disabled by hand")
                await write_audit(connection, caller, "webhook.disabled", webhook_id, url=known.url, reason="by hand")
            return await self._lock(connection, caller, webhook_id)

    async def test(self, caller: Identity, webhook_id: str) -> webhooks.WebhookDelivery:
        """Send a test message once, and return its outcome."""
        ping = webhooks.PingMessage(timestamp=utc_now(), data=webhooks.Ping(webhook_id=webhook_id))
        delivery = delivery_of(webhook_id, ping)
        async with self._engine.begin() as connection:
            await self._lock(connection, caller, webhook_id)
            attempt = await WebhookRepository(connection).claim_new(delivery, self._sender.lease_s)
        await self._sender.send_once(attempt)
        async with self._engine.connect() as connection:
            return found(await WebhookRepository(connection).delivery(delivery.id), "webhook")

    async def rotate(
        self, caller: Identity, webhook_id: str, rotation: webhooks.WebhookRotation
    ) -> webhooks.NewWebhook:
        """Give a webhook a new secret; messages are also signed with the old one until the overlap ends."""
        async with self._engine.begin() as connection:
            known = await self._lock(connection, caller, webhook_id)
            repository = WebhookRepository(connection)
            revision = await repository.revision(webhook_id) + 1
            secret = self._signer.secret(webhook_id, revision)
            await repository.rotate(webhook_id, revision, fingerprint(secret), rotation.overlap_s)
            await write_audit(connection, caller, "webhook.rotated", webhook_id, overlap_s=rotation.overlap_s)
        return webhooks.NewWebhook.of(known, secret=secret)

    async def delete(self, caller: Identity, webhook_id: str) -> None:
        """Delete a webhook with its waiting messages."""
        async with self._engine.begin() as connection:
            known = await self._lock(connection, caller, webhook_id)
            await WebhookRepository(connection).delete(webhook_id)
            await write_audit(connection, caller, "webhook.deleted", webhook_id, url=known.url)

    @staticmethod
    async def _lock(connection: AsyncConnection, caller: Identity, webhook_id: str) -> webhooks.Webhook:
        """Return a webhook that the caller may change; ``ProblemError``: 404, or 403 for one of cluster events."""
        known = found(await WebhookRepository(connection).find(webhook_id, caller.only_tenant, lock=True), "webhook")
        if webhooks.WebhookEvent.NODE_LOST in known.events and not caller.is_operator:
            raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator may change a webhook with node.lost.")
        return known


def _invalid(pointer: str, detail: str) -> ProblemError:
    error = FieldError(pointer=pointer, detail=detail)
    return ProblemError(422, ProblemCode.INVALID_REQUEST, f"{pointer[1:]}: {detail}", errors=[error])
