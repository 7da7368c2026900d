"""Webhooks: who is notified of what, what was delivered, and the messages themselves.

Messages are signed according to the Standard Webhooks specification (https://www.standardwebhooks.com).
"""

from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints

from services.contracts.budgets import BudgetAction, BudgetQuantity
from services.contracts.jobs import JobFootprint
from services.contracts.schema import Flag, Instant, Message, Name, Real, maybe, said
from services.core.domain.jobs import JobState

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"


class WebhookEvent(StrEnum):
    """What a webhook is sent: a job's start and end, a budget that is exceeded, a lost node (operators only)."""

    JOB_STARTED = "job.started"
    JOB_ENDED = "job.ended"
    BUDGET_EXCEEDED = "budget.exceeded"
    NODE_LOST = "node.lost"


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError("must be an address such as https://example.org/hook") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address such as https://example.org/hook")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not contain a user name or a password: messages are signed instead")
    if parts.fragment:
        raise ValueError("must not have a fragment (#...)")
    return url


Address = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,2000}$"), AfterValidator(_address)]
"""An http or https address in ASCII."""


class WebhookSpec(Message):
    """A new webhook of the caller's tenant."""

    url: Address = said("Where messages are posted to: https, and an address that the operator allows.")
    events: Annotated[list[WebhookEvent], AfterValidator(lambda events: sorted(set(events)))] = said(
        "Which events; `node.lost` for operators and admins only.", min_length=1, max_length=20
    )
    project: Name | None = maybe("Only jobs and budgets of this project; null: all of the tenant.")


class Webhook(WebhookSpec):
    """A webhook."""

    id: str
    tenant_id: str
    created_at: Instant
    enabled: bool
    disabled_reason: str | None = maybe("Why nothing is sent; null while it is enabled.")
    failing_since: Instant | None = maybe("Since when no message could be delivered; null if the last one was.")


class NewWebhook(Webhook):
    """A webhook with its secret, which is shown here and never again."""

    secret: str = said("`whsec_` and the signing key in base64.")


class WebhookList(Message):
    """The webhooks of the caller's tenant, oldest first; an operator sees all."""

    items: list[Webhook]


class WebhookChange(Message):
    """Whether messages are sent. Events that happen while a webhook is disabled are not sent later."""

    enabled: Flag


class WebhookRotation(Message):
    """How a secret is replaced."""

    overlap_s: Real = said(
        "How long messages are signed with the old secret as well.", default=86_400, ge=0, le=30 * 86_400
    )


class DeliveryState(StrEnum):
    """What became of a message: it waits (for its first or its next attempt), was accepted, or was given up."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class WebhookDelivery(Message):
    """One message to one webhook."""

    id: str = said("The header `webhook-id`, the same in every attempt.")
    event: str = said("`type` of the message.")
    state: DeliveryState
    created_at: Instant
    attempts: int
    attempted_at: Instant | None = maybe("When the last attempt began.")
    next_attempt_at: Instant | None = maybe("Null once it has ended.")
    status: int | None = maybe("HTTP status of the last answer; null if there was none.")
    error: str | None = maybe("Why the last attempt failed.")


class WebhookDetail(Webhook):
    """A webhook and what was sent last."""

    deliveries: list[WebhookDelivery] = said("The last 20 messages, newest first.")


class JobStarted(Message):
    """A job whose processes run; sent again when it runs again after a preemption or a restart."""

    job_id: str
    tenant_id: str
    name: str
    project: str
    submitted_at: Instant
    started_at: Instant


class JobEnded(Message):
    """A job that has ended."""

    job_id: str
    tenant_id: str
    name: str
    project: str
    state: JobState = said("`succeeded`, `failed` or `cancelled`.")
    reason: str | None
    detail: str | None
    exit_code: int | None
    submitted_at: Instant
    started_at: Instant | None
    ended_at: Instant
    footprint: JobFootprint = said("As the ledger had it when the message was made, some seconds after the end.")


class BudgetExceeded(Message):
    """A budget that is exceeded; reported once a month, and again if it was raised."""

    budget_id: str
    tenant_id: str
    project: str | None = said("Null: all projects of the tenant together.")
    quantity: BudgetQuantity
    amount: float
    used: float
    month: str
    action: BudgetAction
    detail: str


class NodeLost(Message):
    """A node that sent no heartbeat before its lease ended; its jobs are queued again."""

    node_id: str
    zone: str
    gpus: int
    last_heartbeat_at: Instant | None
    job_ids: list[str] = said("The jobs that held its devices.")


class Ping(Message):
    """A test that somebody asked for."""

    webhook_id: str


class JobStartedMessage(Message):
    """The body of `job.started`."""

    type: Literal["job.started"] = "job.started"
    timestamp: Instant
    data: JobStarted


class JobEndedMessage(Message):
    """The body of `job.ended`."""

    type: Literal["job.ended"] = "job.ended"
    timestamp: Instant
    data: JobEnded


class BudgetExceededMessage(Message):
    """The body of `budget.exceeded`."""

    type: Literal["budget.exceeded"] = "budget.exceeded"
    timestamp: Instant
    data: BudgetExceeded


class NodeLostMessage(Message):
    """The body of `node.lost`."""

    type: Literal["node.lost"] = "node.lost"
    timestamp: Instant
    data: NodeLost


class PingMessage(Message):
    """The body of `ping`, which `POST /v1/webhooks/{webhook_id}/test` sends."""

    type: Literal["ping"] = "ping"
    timestamp: Instant
    data: Ping


WebhookMessage = JobStartedMessage | JobEndedMessage | BudgetExceededMessage | NodeLostMessage | PingMessage
