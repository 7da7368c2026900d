"""HTTP endpoints for webhooks."""

from typing import Annotated

from fastapi import APIRouter

from services.admission.webhooks.service import WEBHOOK_ID, Webhooks
from services.contracts import webhooks as contracts
from services.kit.identity import Caller
from services.kit.routes import from_state, named_by

TheWebhooks = Annotated[Webhooks, from_state("webhooks")]
WebhookId = Annotated[str, named_by(WEBHOOK_ID, "webhook")]
router = APIRouter(tags=["webhooks"])


@router.post("/v1/webhooks", status_code=201)
async def create_webhook(caller: Caller, spec: contracts.WebhookSpec, webhooks: TheWebhooks) -> contracts.NewWebhook:
    """Create a webhook.

    It is sent events of the caller's tenant from now on. Only this answer contains its secret, with which messages are
    signed as the Standard Webhooks specification requires. Only an operator may subscribe to `node.lost`.
    """
    return await webhooks.create(caller, spec)


@router.get("/v1/webhooks")
async def list_webhooks(caller: Caller, webhooks: TheWebhooks) -> contracts.WebhookList:
    """List webhooks.

    Users see their tenant's; operators see all.
    """
    return await webhooks.list(caller)


@router.get("/v1/webhooks/{webhook_id}")
async def get_webhook(caller: Caller, webhook_id: WebhookId, webhooks: TheWebhooks) -> contracts.WebhookDetail:
    """Get a webhook and the outcomes of its last messages."""
    return await webhooks.get(caller, webhook_id)


@router.patch("/v1/webhooks/{webhook_id}")
async def change_webhook(
    caller: Caller, webhook_id: WebhookId, change: contracts.WebhookChange, webhooks: TheWebhooks
) -> contracts.Webhook:
    """Enable or disable a webhook.

    Events that occur while it is disabled are not sent later.
    """
    return await webhooks.change(caller, webhook_id, change)


@router.post("/v1/webhooks/{webhook_id}/test")
async def test_webhook(caller: Caller, webhook_id: WebhookId, webhooks: TheWebhooks) -> contracts.WebhookDelivery:
    """Send a test message.

    The message is a `ping`, attempted once; the answer gives its outcome.
    """
    return await webhooks.test(caller, webhook_id)


@router.post("/v1/webhooks/{webhook_id}/rotate", status_code=201)
async def rotate_webhook(
    caller: Caller, webhook_id: WebhookId, rotation: contracts.WebhookRotation, webhooks: TheWebhooks
) -> contracts.NewWebhook:
    """Replace a webhook's secret.

    Until the overlap ends, messages are also signed with the old secret. Only this answer contains the new one.
    """
    return await webhooks.rotate(caller, webhook_id, rotation)


@router.delete("/v1/webhooks/{webhook_id}", status_code=204)
async def delete_webhook(caller: Caller, webhook_id: WebhookId, webhooks: TheWebhooks) -> None:
    """Delete a webhook.

    Waiting messages are not sent.
    """
    await webhooks.delete(caller, webhook_id)
