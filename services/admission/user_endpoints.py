"""HTTP endpoints for users, and for who the caller is."""

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.users import Users
from services.contracts.identity import OwnIdentity, User, UserChange, UserList, UserSpec
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import PageQuery
from services.kit.identity import Admin, Operator, ProjectCaller
from services.kit.problems import not_found
from services.kit.routes import from_state

TheUsers = Annotated[Users, from_state("users")]
router = APIRouter(tags=["access"])


@router.post(
    "/v1/tenants/{tenant_id}/users",
    status_code=201,
    responses={409: {"description": "The tenant has a user of this name: `conflict`."}},
)
async def create_user(caller: Admin, tenant_id: str, spec: UserSpec, users: TheUsers) -> User:
    """Create a user of a tenant.

    Keys may belong to a user, and jobs remember whose key submitted them.
    """
    return await users.create(caller, _known_form(tenant_id, "tenant"), spec)


@router.get("/v1/tenants/{tenant_id}/users")
async def list_users(_: Operator, tenant_id: str, page: Annotated[PageQuery, Query()], users: TheUsers) -> UserList:
    """List a tenant's users."""
    return await users.page(_known_form(tenant_id, "tenant"), page)


@router.get("/v1/tenants/{tenant_id}/users/{name}")
async def get_user(_: Operator, tenant_id: str, name: str, users: TheUsers) -> User:
    """Get a user."""
    return await users.get(_known_form(tenant_id, "tenant"), _known_form(name, "user"))


@router.patch(
    "/v1/tenants/{tenant_id}/users/{name}",
    responses={
        409: {"description": "No admin key would be left, or jobs would run as root for no operator: `conflict`."}
    },
)
async def change_user(caller: Admin, tenant_id: str, name: str, change: UserChange, users: TheUsers) -> User:
    """Change a user's account, or disable or enable a user.

    Keys of a disabled user are refused within seconds. Jobs already accepted go on.
    """
    return await users.change(caller, _known_form(tenant_id, "tenant"), _known_form(name, "user"), change)


@router.get("/v1/whoami")
async def get_own_identity(caller: ProjectCaller, users: TheUsers) -> OwnIdentity:
    """Get the tenant, user, role and project of the key in use."""
    return await users.own(caller)


def _known_form(text: str, what: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise not_found(what)
    return text
