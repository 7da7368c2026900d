"""HTTP of webhooks."""

from __future__ import annotations

from fastapi import APIRouter

from services.admission.webhooks.service import Webhooks
from services.contracts.webhooks import (
    NewWebhook,
    Webhook,
    WebhookChange,
    WebhookDelivery,
    WebhookDetail,
    WebhookList,
    WebhookRotation,
    WebhookSpec,
)
from services.kit.identity import Caller


def webhook_routes(webhooks: Webhooks) -> APIRouter:
    """Return the routes that are about webhooks."""
    router = APIRouter()

    @router.post("/v1/webhooks", status_code=201)
    async def create_webhook(caller: Caller, spec: WebhookSpec) -> NewWebhook:
        return await webhooks.create(caller, spec)

    @router.get("/v1/webhooks")
    async def list_webhooks(caller: Caller) -> WebhookList:
        return await webhooks.list(caller)

    @router.get("/v1/webhooks/{webhook_id}")
    async def get_webhook(caller: Caller, webhook_id: str) -> WebhookDetail:
        return await webhooks.get(caller, webhook_id)

    @router.patch("/v1/webhooks/{webhook_id}")
    async def change_webhook(caller: Caller, webhook_id: str, change: WebhookChange) -> Webhook:
        return await webhooks.change(caller, webhook_id, change)

    @router.post("/v1/webhooks/{webhook_id}/test")
    async def test_webhook(caller: Caller, webhook_id: str) -> WebhookDelivery:
        return await webhooks.test(caller, webhook_id)

    @router.post("/v1/webhooks/{webhook_id}/rotate", status_code=201)
    async def rotate_webhook(caller: Caller, webhook_id: str, rotation: WebhookRotation) -> NewWebhook:
        return await webhooks.rotate(caller, webhook_id, rotation)

    @router.delete("/v1/webhooks/{webhook_id}", status_code=204)
    async def delete_webhook(caller: Caller, webhook_id: str) -> None:
        await webhooks.delete(caller, webhook_id)

    return router
