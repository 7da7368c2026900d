"""Keys that are limited to a tenant or a project."""

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.jobs import JobSpec
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError


def spec_in_project(spec: JobSpec, project: str | None, pointer: str = "/project") -> JobSpec:
    """Return a spec in the project that its key is limited to; ``ProblemError``: 403 at ``pointer`` for another."""
    if project is None or spec.project == project:
        return spec
    if "project" in spec.model_fields_set:
        detail = f"This API key is limited to the project {project}."
        errors = [FieldError(pointer=pointer, detail=detail)]
        raise ProblemError(403, ProblemCode.FORBIDDEN, f"{pointer}: {detail}", errors=errors)
    return spec.model_copy(update={"project": project})


def check_project(asked: str | None, project: str | None) -> str | None:
    """Return the project that a list is limited to, given the one that its caller asks for.

    Raises:
        ProblemError: 403, the caller's key is limited to another project.
    """
    if project is None or asked in (None, project):
        return project or asked
    raise ProblemError(403, ProblemCode.FORBIDDEN, f"This API key is limited to the project {project}.")


def check_tenant(asked: str | None, caller: Identity) -> str | None:
    """Return the tenant that a list is limited to, given the one that its caller asks for; None: an operator sees all.

    Raises:
        ProblemError: 403, it is another tenant's, and the caller no operator.
    """
    if caller.is_operator or asked in (None, caller.tenant_id):
        return caller.only_tenant or asked
    raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator may ask for another tenant.")
