"""HTTP endpoints for secrets."""

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
from services.kit.routes import from_state

TheSecrets = Annotated[Secrets, from_state("secrets")]
router = APIRouter(tags=["inputs"])


@router.put(
    "/v1/secrets/{name}",
    responses={409: {"description": "The installation has no key to seal secrets with: `capability_missing`."}},
)
async def set_secret(caller: Caller, name: str, spec: SecretSpec, secrets: TheSecrets) -> Secret:
    """Set a secret of the tenant.

    Jobs that name it get its value. No answer ever contains it.
    """
    return await secrets.put(caller, _checked(name), spec)


@router.get("/v1/secrets")
async def list_secrets(caller: Caller, secrets: TheSecrets) -> SecretList:
    """List the secrets of the tenant, without their values."""
    return await secrets.list(caller)


@router.delete("/v1/secrets/{name}", status_code=204)
async def delete_secret(caller: Caller, name: str, query: Annotated[SecretQuery, Query()], secrets: TheSecrets) -> None:
    """Delete a secret.

    Running jobs keep its value; jobs that have yet to start with it fail.
    """
    await secrets.remove(caller, _checked(name), query.project)


def _checked(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, f"The name of a secret {NAME_RULE}.")
    return name
