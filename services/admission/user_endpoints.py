"""HTTP of users, and of who the caller is."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.users import Users
from services.contracts.identity import OwnIdentity, User, UserChange, UserList, UserSpec
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import PageQuery
from services.kit.identity import Admin, Operator, ProjectCaller
from services.kit.problems import not_found


def user_routes(users: Users) -> APIRouter:
    """Return the routes that are about users."""
    router = APIRouter()

    @router.post("/v1/tenants/{tenant_id}/users", status_code=201)
    async def create_user(caller: Admin, tenant_id: str, spec: UserSpec) -> User:
        return await users.create(caller, _known_form(tenant_id, "tenant"), spec)

    @router.get("/v1/tenants/{tenant_id}/users")
    async def list_users(_: Operator, tenant_id: str, page: Annotated[PageQuery, Query()]) -> UserList:
        return await users.page(_known_form(tenant_id, "tenant"), page)

    @router.get("/v1/tenants/{tenant_id}/users/{name}")
    async def get_user(_: Operator, tenant_id: str, name: str) -> User:
        return await users.get(_known_form(tenant_id, "tenant"), _known_form(name, "user"))

    @router.patch("/v1/tenants/{tenant_id}/users/{name}")
    async def change_user(caller: Admin, tenant_id: str, name: str, change: UserChange) -> User:
        return await users.change(caller, _known_form(tenant_id, "tenant"), _known_form(name, "user"), change)

    @router.get("/v1/whoami")
    async def get_own_identity(caller: ProjectCaller) -> OwnIdentity:
        return await users.own(caller)

    return router


def _known_form(text: str, what: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise not_found(what)
    return text
