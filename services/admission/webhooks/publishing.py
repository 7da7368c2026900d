"""Events become deliveries.

Starts and ends of jobs are read from ``job_events``, which is written in the transaction of the change, after a stored
position; events of budgets and nodes from ``webhook_events``. Deliveries are inserted in the transaction that moves the
position and deletes those rows: each event becomes exactly one delivery for each webhook that wants it, whenever this
process dies.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.events import Position
from services.admission.repository.webhooks import LARGEST_MOVE, PAGE, NewDelivery, Receiver, WebhookRepository
from services.contracts import webhooks
from services.contracts.jobs import JobFootprint
from services.core.domain.jobs import JobState
from services.kit.ids import new_id


class Publisher:
    """Turns what has happened since the last time into deliveries."""

    def __init__(self, engine: AsyncEngine, settle_s: float) -> None:
        self._engine, self._settle_s = engine, settle_s

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
            deliveries = [made for row in events for made in _deliveries_of_event(row, receivers)]
            is_last = len(events) < PAGE
            if receivers:
                horizon = await repository.horizon()  # before the page is read, so that it skips nothing
                changes = await repository.changes(position, self._settle_s)
                ready = _ready(changes)
                deliveries += [made for row in ready for made in _deliveries_of_job(row, receivers)]
                reached = Position(ready[-1]["transaction_id"], ready[-1]["sequence"]) if ready else position
                if len(ready) == len(changes) < PAGE and horizon.transaction_id - reached.transaction_id > LARGEST_MOVE:
                    reached = horizon
                if reached != position:
                    await repository.move(reached)
                is_last = is_last and len(ready) < PAGE
            await repository.add(deliveries)
        return len(deliveries), is_last


def _ready(changes: Sequence[RowMapping]) -> Sequence[RowMapping]:
    """Return those before the first end that is too recent; the position cannot pass that one."""
    young = next((index for index, row in enumerate(changes) if row["is_young"]), len(changes))
    return changes[:young]


def _deliveries_of_job(row: RowMapping, receivers: Iterable[Receiver]) -> list[NewDelivery]:
    asked = row["notify"] or ()
    message: webhooks.JobStartedMessage | webhooks.JobEndedMessage
    if row["is_start"]:
        started = {name: row[name] for name in webhooks.JobStarted.model_fields} | {"started_at": row["at"]}
        message = webhooks.JobStartedMessage(timestamp=row["at"], data=webhooks.JobStarted.model_validate(started))
        is_asked = "started" in asked
    else:
        footprint = {name: row[name] for name in JobFootprint.model_fields if row[name] is not None}
        values = {name: row[name] for name in webhooks.JobEnded.model_fields if name != "footprint"}
        ended = webhooks.JobEnded.model_validate({**values, "footprint": footprint})
        message = webhooks.JobEndedMessage(timestamp=row["at"], data=ended)
        is_asked = "ended" in asked or ("failed" in asked and ended.state is JobState.FAILED)
    of = message.type, row["tenant_id"], row["project"], row["at"]
    wanted = [receiver for receiver in receivers if receiver.wants(*of, is_asked=is_asked)]
    return [delivery_of(receiver.id, message) for receiver in wanted]


def _deliveries_of_event(row: RowMapping, receivers: Iterable[Receiver]) -> list[NewDelivery]:
    message: webhooks.WebhookMessage
    if row["type"] == webhooks.WebhookEvent.NODE_LOST:
        message = webhooks.NodeLostMessage(timestamp=row["at"], data=webhooks.NodeLost.model_validate(row["data"]))
    else:
        message = webhooks.BudgetExceededMessage(
            timestamp=row["at"], data=webhooks.BudgetExceeded.model_validate(row["data"])
        )
    wanted = [r for r in receivers if r.wants(row["type"], row["tenant_id"], row["project"], row["at"])]
    return [delivery_of(receiver.id, message) for receiver in wanted]


def delivery_of(webhook_id: str, message: webhooks.WebhookMessage) -> NewDelivery:
    """Return a message as a delivery; its body is stored unchanged, so that every attempt sends the same one."""
    return NewDelivery(new_id("msg"), webhook_id, message.type, message.model_dump_json())
