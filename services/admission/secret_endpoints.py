"""HTTP of secrets."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.secrets import Secrets
from services.contracts.codes import ProblemCode
from services.contracts.invalid import NAME_PATTERN, NAME_RULE
from services.contracts.queries import SecretQuery
from services.contracts.secrets import Secret, SecretList, SecretSpec
from services.kit.identity import Caller
from services.kit.problems import ProblemError


def secret_routes(secrets: Secrets) -> APIRouter:
    """Return the routes that are about secrets."""
    router = APIRouter()

    @router.put("/v1/secrets/{name}")
    async def set_secret(caller: Caller, name: str, spec: SecretSpec) -> Secret:
        return await secrets.put(caller, _checked(name), spec)

    @router.get("/v1/secrets")
    async def list_secrets(caller: Caller) -> SecretList:
        return await secrets.list(caller)

    @router.delete("/v1/secrets/{name}", status_code=204)
    async def delete_secret(caller: Caller, name: str, query: Annotated[SecretQuery, Query()]) -> None:
        await secrets.remove(caller, _checked(name), query.project)

    return router


def _checked(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, f"The name of a secret {NAME_RULE}.")
    return name
