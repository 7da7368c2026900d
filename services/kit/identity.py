"""Read the caller's identity from the headers the gateway sets; services are reachable with the service token only."""

# Annotations stay objects here: FastAPI cannot resolve those of a callable instance from strings.
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from services.contracts.identity import (
    KEY_HEADER,
    PROJECT_HEADER,
    ROLE_HEADER,
    TENANT_HEADER,
    USER_HEADER,
    Identity,
    Role,
)
from services.contracts.problems import ProblemCode
from services.kit.problems import ProblemError


def identity_headers(identity: Identity) -> dict[str, str]:
    """Return the headers that carry ``identity`` to a service."""
    headers = {TENANT_HEADER: identity.tenant_id, ROLE_HEADER: identity.role, KEY_HEADER: identity.key_id}
    if identity.user_id is not None:
        headers[USER_HEADER] = identity.user_id
    if identity.project is not None:
        headers[PROJECT_HEADER] = identity.project
    return headers


def read_identity(request: Request) -> Identity:
    """Return the caller that the gateway names."""
    try:
        return Identity(
            tenant_id=request.headers[TENANT_HEADER],
            role=Role(request.headers[ROLE_HEADER]),
            key_id=request.headers[KEY_HEADER],
            user_id=request.headers.get(USER_HEADER),
            project=request.headers.get(PROJECT_HEADER),
        )
    except (KeyError, ValueError) as error:
        raise ProblemError(401, ProblemCode.UNAUTHENTICATED, "The request carries no identity.") from error


def forbidden(role: Role, needed: Role) -> ProblemError:
    """Return the problem of a caller whose role does not suffice."""
    if role is Role.READ_ONLY and needed is Role.USER:
        return ProblemError(403, ProblemCode.FORBIDDEN, "This API key is read-only.")
    return ProblemError(403, ProblemCode.FORBIDDEN, f"Only an {needed} may do this.")


def not_of_a_project(project: str) -> ProblemError:
    """Return the problem of a caller whose key is limited to a project, on a route that is not about projects."""
    return ProblemError(
        403,
        ProblemCode.FORBIDDEN,
        f"This API key is limited to the project {project}: it reaches that project's jobs, reports and budgets only.",
    )


@dataclass(frozen=True, slots=True)
class RequireRole:
    """A dependency that gives a route its caller, and refuses one whose role does not include ``role``.

    This is the one place where a service's route states its role: by a parameter of type ``Caller``, ``Operator`` or
    ``Admin``, or of type ``ProjectCaller`` where the route answers keys that are limited to a project, too, and honours
    ``Identity.project``. ``tests/architecture/test_routes.py`` compares it with the gateway's table.
    """

    role: Role
    for_projects: bool = False

    def __call__(self, request: Request) -> Identity:
        identity = read_identity(request)
        if not identity.role.may(request.method, self.role):
            raise forbidden(identity.role, self.role)
        if identity.project is not None and not self.for_projects:
            raise not_of_a_project(identity.project)
        return identity


Caller = Annotated[Identity, Depends(RequireRole(Role.USER))]
ProjectCaller = Annotated[Identity, Depends(RequireRole(Role.USER, for_projects=True))]
Operator = Annotated[Identity, Depends(RequireRole(Role.OPERATOR))]
Admin = Annotated[Identity, Depends(RequireRole(Role.ADMIN))]
