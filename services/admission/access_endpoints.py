"""HTTP endpoints for tenants, users, keys, budgets and the audit log."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.access import KEY_ID, Access
from services.admission.budgets import BUDGET_ID, Budgets
from services.contracts import identity
from services.contracts.budgets import Budget, BudgetList, BudgetSpec
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import AuditQuery, PageQuery
from services.kit.identity import Admin, Operator, ProjectCaller
from services.kit.routes import from_state, named_by

Page = Annotated[PageQuery, Query()]
TenantId = Annotated[str, named_by(NAME_PATTERN, "tenant")]
UserName = Annotated[str, named_by(NAME_PATTERN, "user")]
KeyId = Annotated[str, named_by(KEY_ID, "key")]
BudgetId = Annotated[str, named_by(BUDGET_ID, "budget")]


TheAccess = Annotated[Access, from_state("access")]
TheBudgets = Annotated[Budgets, from_state("budgets")]
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
async def get_tenant(_: Operator, tenant_id: TenantId, access: TheAccess) -> identity.Tenant:
    """Get a tenant."""
    return await access.tenant(tenant_id)


@router.patch("/v1/tenants/{tenant_id}")
async def change_tenant(
    caller: Admin, tenant_id: TenantId, change: identity.TenantChange, access: TheAccess
) -> identity.Tenant:
    """Change a tenant's limits."""
    return await access.change_tenant(caller, tenant_id, change)


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
    caller: Admin, key_id: KeyId, rotation: identity.KeyRotation, access: TheAccess
) -> identity.NewApiKey:
    """Replace an API key with a new one.

    The new key has the tenant, user, role, project, label and limits of the old one, whose use of budgets counts as its
    own. Only this answer contains its secret.
    """
    return await access.rotate_key(caller, key_id, rotation)


@router.patch(
    "/v1/keys/{key_id}",
    responses={409: {"description": "The key no longer works, or no other admin key would last: `conflict`."}},
)
async def change_key(caller: Admin, key_id: KeyId, change: identity.KeyChange, access: TheAccess) -> identity.ApiKey:
    """Change when an API key stops working, or what it may do with models."""
    return await access.change_key(caller, key_id, change)


@router.delete(
    "/v1/keys/{key_id}", status_code=204, responses={409: {"description": "It is the last admin key: `conflict`."}}
)
async def revoke_key(caller: Admin, key_id: KeyId, access: TheAccess) -> None:
    """Revoke an API key."""
    await access.revoke_key(caller, key_id)


@router.get("/v1/audit")
async def list_audit_entries(
    _: Operator, page: Annotated[AuditQuery, Query()], access: TheAccess
) -> identity.AuditList:
    """List what operators and admins did, newest first."""
    return await access.audit(page)


@router.post(
    "/v1/tenants/{tenant_id}/users",
    status_code=201,
    responses={409: {"description": "The tenant has a user of this name: `conflict`."}},
)
async def create_user(caller: Admin, tenant_id: TenantId, spec: identity.UserSpec, access: TheAccess) -> identity.User:
    """Create a user of a tenant.

    Keys may belong to a user, and jobs remember whose key submitted them.
    """
    return await access.create_user(caller, tenant_id, spec)


@router.get("/v1/tenants/{tenant_id}/users")
async def list_users(_: Operator, tenant_id: TenantId, page: Page, access: TheAccess) -> identity.UserList:
    """List a tenant's users."""
    return await access.users(tenant_id, page)


@router.get("/v1/tenants/{tenant_id}/users/{name}")
async def get_user(_: Operator, tenant_id: TenantId, name: UserName, access: TheAccess) -> identity.User:
    """Get a user."""
    return await access.user(tenant_id, name)


@router.patch(
    "/v1/tenants/{tenant_id}/users/{name}",
    responses={
        409: {"description": "No admin key would be left, or jobs would run as root for no operator: `conflict`."}
    },
)
async def change_user(
    caller: Admin, tenant_id: TenantId, name: UserName, change: identity.UserChange, access: TheAccess
) -> identity.User:
    """Change a user's account, or disable or enable a user.

    Keys of a disabled user are refused within seconds. Jobs already accepted go on.
    """
    return await access.change_user(caller, tenant_id, name, change)


@router.get("/v1/whoami")
async def get_own_identity(caller: ProjectCaller, access: TheAccess) -> identity.OwnIdentity:
    """Get the tenant, user, role and project of the key in use."""
    return await access.own(caller)


@router.put("/v1/budgets")
async def set_budget(caller: Admin, spec: BudgetSpec, budgets: TheBudgets) -> Budget:
    """Set a project's budget.

    It replaces the budget of the same tenant, project and quantity.
    """
    return await budgets.put(caller, spec)


@router.get("/v1/budgets")
async def list_budgets(caller: ProjectCaller, budgets: TheBudgets) -> BudgetList:
    """List budgets and how much of them is used this month.

    Users see their tenant's; operators see all.
    """
    return await budgets.list(caller)


@router.delete("/v1/budgets/{budget_id}", status_code=204)
async def remove_budget(caller: Admin, budget_id: BudgetId, budgets: TheBudgets) -> None:
    """Remove a budget.

    Jobs that only it held are queued again.
    """
    await budgets.remove(caller, budget_id)
