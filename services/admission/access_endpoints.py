"""HTTP of tenants, keys and the audit log."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.access import KEY_ID, Access
from services.contracts.identity import (
    ApiKey,
    AuditList,
    KeyChange,
    KeyList,
    KeyLookup,
    KeyRotation,
    KeySpec,
    NewApiKey,
    ResolvedKey,
    Tenant,
    TenantChange,
    TenantList,
    TenantSpec,
)
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import AuditQuery, PageQuery
from services.kit.identity import Admin, Operator
from services.kit.problems import not_found

Page = Annotated[PageQuery, Query()]


def access_routes(access: Access) -> APIRouter:
    """Return the routes that are about who may do what."""
    router = APIRouter()

    @router.post("/internal/keys/resolve")
    async def resolve(lookup: KeyLookup) -> ResolvedKey:
        return await access.resolve(bytes.fromhex(lookup.key_sha256))

    @router.post("/v1/tenants", status_code=201)
    async def create_tenant(caller: Admin, spec: TenantSpec) -> Tenant:
        return await access.create_tenant(caller, spec)

    @router.get("/v1/tenants")
    async def list_tenants(_: Operator, page: Page) -> TenantList:
        return await access.tenants(page)

    @router.get("/v1/tenants/{tenant_id}")
    async def get_tenant(_: Operator, tenant_id: str) -> Tenant:
        return await access.tenant(_known_form(tenant_id, NAME_PATTERN, "tenant"))

    @router.patch("/v1/tenants/{tenant_id}")
    async def change_tenant(caller: Admin, tenant_id: str, change: TenantChange) -> Tenant:
        return await access.change_tenant(caller, _known_form(tenant_id, NAME_PATTERN, "tenant"), change)

    @router.post("/v1/keys", status_code=201)
    async def create_key(caller: Admin, spec: KeySpec) -> NewApiKey:
        return await access.create_key(caller, spec)

    @router.get("/v1/keys")
    async def list_keys(_: Admin, page: Page) -> KeyList:
        return await access.keys(page)

    @router.post("/v1/keys/{key_id}/rotate", status_code=201)
    async def rotate_key(caller: Admin, key_id: str, rotation: KeyRotation) -> NewApiKey:
        return await access.rotate_key(caller, _known_form(key_id, KEY_ID, "key"), rotation)

    @router.patch("/v1/keys/{key_id}")
    async def change_key(caller: Admin, key_id: str, change: KeyChange) -> ApiKey:
        return await access.change_key(caller, _known_form(key_id, KEY_ID, "key"), change)

    @router.delete("/v1/keys/{key_id}", status_code=204)
    async def revoke_key(caller: Admin, key_id: str) -> None:
        await access.revoke_key(caller, _known_form(key_id, KEY_ID, "key"))

    @router.get("/v1/audit")
    async def read_audit(_: Operator, page: Annotated[AuditQuery, Query()]) -> AuditList:
        return await access.audit(page)

    return router


def _known_form(text: str, pattern: str, what: str) -> str:
    if not re.fullmatch(pattern, text):
        raise not_found(what)
    return text
