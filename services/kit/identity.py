"""Who sends a request, and on whose behalf, according to its signed token; and the roles that routes need."""

# Annotations stay objects here: FastAPI cannot resolve those of a callable instance from strings.
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.kit.problems import ProblemError
from services.kit.routes import asked_about

CALLER = "wattshift.caller"
"""Where in a request's scope the user is on whose behalf a service asks; put there when its token was checked."""


def read_identity(request: Request) -> Identity:
    """Return the user on whose behalf the request is made."""
    identity = request.scope.get(CALLER)
    if identity is None:
        raise ProblemError(401, ProblemCode.UNAUTHENTICATED, "The request carries no identity.")
    return identity


def forbidden(role: Role, needed: Role) -> ProblemError:
    """Return the problem for a caller whose role does not suffice."""
    if role is Role.READ_ONLY and needed is Role.USER:
        return ProblemError(403, ProblemCode.FORBIDDEN, "This API key is read-only.")
    whom = {Role.GRID: "an operator, or a key of the role grid,", Role.USER: "a user"}.get(needed, f"an {needed}")
    return ProblemError(403, ProblemCode.FORBIDDEN, f"Only {whom} may do this.")


def not_of_a_project(project: str) -> ProblemError:
    """Return the problem for a caller whose key is limited to a project, on a route that is not about projects."""
    reach = "it reaches that project's jobs, reports and budgets only"
    return ProblemError(403, ProblemCode.FORBIDDEN, f"This API key is limited to the project {project}: {reach}.")


@dataclass(frozen=True, slots=True)
class RequireRole:
    """A dependency that gives a route its caller, and refuses one whose role does not include ``role``.

    This is the only way in which a service's route states its role: by a parameter of type ``Caller``, ``Operator`` or
    ``Admin``, or of type ``ProjectCaller`` if the route also answers keys that are limited to a project, and honours
    ``Identity.project``. ``tools.operations`` reads it into the gateway's table.

    It is a coroutine, as all dependencies here are: FastAPI runs any that are not in a thread, which costs more than
    the rest of a short request (``tests/architecture/test_routes.py``).
    """

    role: Role
    for_projects: bool = False

    async def __call__(self, request: Request) -> Identity:
        identity = read_identity(request)
        if not identity.role.may(request.method, self.role):
            raise forbidden(identity.role, self.role)
        if identity.project is not None and not self.for_projects:
            raise not_of_a_project(identity.project)
        asked_about.set((request.url.path, identity.only_tenant, identity.project))
        return identity


Caller = Annotated[Identity, Depends(RequireRole(Role.USER))]
ProjectCaller = Annotated[Identity, Depends(RequireRole(Role.USER, for_projects=True))]
GridCaller = Annotated[Identity, Depends(RequireRole(Role.GRID))]
Operator = Annotated[Identity, Depends(RequireRole(Role.OPERATOR))]
Admin = Annotated[Identity, Depends(RequireRole(Role.ADMIN))]
