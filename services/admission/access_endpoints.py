"""HTTP endpoints for tenants, keys and the audit log."""

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.access import KEY_ID, Access
from services.contracts import identity
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import AuditQuery, PageQuery
from services.kit.identity import Admin, Operator
from services.kit.problems import not_found
from services.kit.routes import from_state

Page = Annotated[PageQuery, Query()]


TheAccess = Annotated[Access, from_state("access")]
router = APIRouter(tags=["access"])


@router.post("/internal/keys/resolve")
async def resolve(lookup: identity.KeyLookup, access: TheAccess) -> identity.ResolvedKey:
    return await access.resolve(lookup.key_id or bytes.fromhex(lookup.key_sha256 or ""))


@router.post(
    "/v1/tenants", status_code=201, responses={409: {"description": "A tenant with this id exists: `conflict`."}}
)
async def create_tenant(caller: Admin, spec: identity.TenantSpec, access: TheAccess) -> identity.Tenant:
    """Create a tenant."""
    return await access.create_tenant(caller, spec)


@router.get("/v1/tenants")
async def list_tenants(_: Operator, page: Page, access: TheAccess) -> identity.TenantList:
    """List tenants."""
    return await access.tenants(page)


@router.get("/v1/tenants/{tenant_id}")
async def get_tenant(_: Operator, tenant_id: str, access: TheAccess) -> identity.Tenant:
    """Get a tenant."""
    return await access.tenant(_known_form(tenant_id, NAME_PATTERN, "tenant"))


@router.patch("/v1/tenants/{tenant_id}")
async def change_tenant(
    caller: Admin, tenant_id: str, change: identity.TenantChange, access: TheAccess
) -> identity.Tenant:
    """Change a tenant's limits."""
    return await access.change_tenant(caller, _known_form(tenant_id, NAME_PATTERN, "tenant"), change)


@router.post("/v1/keys", status_code=201)
async def create_key(caller: Admin, spec: identity.KeySpec, access: TheAccess) -> identity.NewApiKey:
    """Create an API key.

    Only this answer contains the secret.
    """
    return await access.create_key(caller, spec)


@router.get("/v1/keys")
async def list_keys(_: Admin, page: Page, access: TheAccess) -> identity.KeyList:
    """List API keys."""
    return await access.keys(page)


@router.post(
    "/v1/keys/{key_id}/rotate",
    status_code=201,
    responses={409: {"description": "The key no longer works: `conflict`."}},
)
async def rotate_key(
    caller: Admin, key_id: str, rotation: identity.KeyRotation, access: TheAccess
) -> identity.NewApiKey:
    """Replace an API key with a new one.

    The new key has the tenant, user, role, project, label and limits of the old one, whose use of budgets counts as its
    own. Only this answer contains its secret.
    """
    return await access.rotate_key(caller, _known_form(key_id, KEY_ID, "key"), rotation)


@router.patch(
    "/v1/keys/{key_id}",
    responses={409: {"description": "The key no longer works, or no other admin key would last: `conflict`."}},
)
async def change_key(caller: Admin, key_id: str, change: identity.KeyChange, access: TheAccess) -> identity.ApiKey:
    """Change when an API key stops working, or what it may do with models."""
    return await access.change_key(caller, _known_form(key_id, KEY_ID, "key"), change)


@router.delete(
    "/v1/keys/{key_id}", status_code=204, responses={409: {"description": "It is the last admin key: `conflict`."}}
)
async def revoke_key(caller: Admin, key_id: str, access: TheAccess) -> None:
    """Revoke an API key."""
    await access.revoke_key(caller, _known_form(key_id, KEY_ID, "key"))


@router.get("/v1/audit")
async def list_audit_entries(
    _: Operator, page: Annotated[AuditQuery, Query()], access: TheAccess
) -> identity.AuditList:
    """List what operators and admins did, newest first."""
    return await access.audit(page)


def _known_form(text: str, pattern: str, what: str) -> str:
    if not re.fullmatch(pattern, text):
        raise not_found(what)
    return text
