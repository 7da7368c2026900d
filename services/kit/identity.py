"""Read the caller's identity from the headers the gateway sets; services are reachable with the service token only."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from services.contracts.identity import KEY_HEADER, ROLE_HEADER, TENANT_HEADER, Identity, Role
from services.contracts.problems import ProblemCode
from services.kit.problems import ProblemError


def identity_headers(identity: Identity) -> dict[str, str]:
    """Return the headers that carry ``identity`` to a service."""
    return {TENANT_HEADER: identity.tenant_id, ROLE_HEADER: identity.role, KEY_HEADER: identity.key_id}


def read_identity(request: Request) -> Identity:
    """Return who the gateway says is asking."""
    try:
        return Identity(
            tenant_id=request.headers[TENANT_HEADER],
            role=Role(request.headers[ROLE_HEADER]),
            key_id=request.headers[KEY_HEADER],
        )
    except (KeyError, ValueError) as error:
        raise ProblemError(401, ProblemCode.UNAUTHENTICATED, "The request carries no identity.") from error


def read_operator(request: Request) -> Identity:
    """Return the caller if it may steer the cluster."""
    identity = read_identity(request)
    if not identity.is_operator:
        raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator may do this.")
    return identity


def read_admin(request: Request) -> Identity:
    """Return the caller if it may give out keys."""
    identity = read_identity(request)
    if identity.role is not Role.ADMIN:
        raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an admin may do this.")
    return identity


Caller = Annotated[Identity, Depends(read_identity)]
Operator = Annotated[Identity, Depends(read_operator)]
Admin = Annotated[Identity, Depends(read_admin)]
