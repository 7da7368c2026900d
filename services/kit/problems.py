"""Errors as RFC 9457 problem documents: one exception to raise, one place that turns everything into HTTP."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from services.contracts.codes import PROBLEMS, ProblemCode
from services.contracts.identity import REQUEST_ID_HEADER
from services.contracts.invalid import explained
from services.contracts.problems import MEDIA_TYPE, FieldError, Problem
from services.core.domain.errors import PlanError, PolicyConfigError, TransitionError, WattshiftError
from services.kit import traces
from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")

_CODES_OF_STATUS = {
    400: ProblemCode.INVALID_REQUEST,
    401: ProblemCode.UNAUTHENTICATED,
    403: ProblemCode.FORBIDDEN,
    404: ProblemCode.NOT_FOUND,
    405: ProblemCode.METHOD_NOT_ALLOWED,
    409: ProblemCode.CONFLICT,
    413: ProblemCode.BODY_TOO_LARGE,
    415: ProblemCode.UNSUPPORTED_MEDIA_TYPE,
    429: ProblemCode.RATE_LIMITED,
    503: ProblemCode.UNAVAILABLE,
}


_TITLES = {status.value: status.phrase for status in HTTPStatus}


def title_of(status: int) -> str:
    """Return the phrase of a status, also of one of those by which proxies before a node or a cell answer, as 520."""
    return _TITLES.get(status, "Other Error")


class ProblemError(WattshiftError):
    """A request that cannot be answered as asked."""

    def __init__(
        self,
        status: int,
        code: ProblemCode,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.problem_code = code
        self.detail = detail
        self.errors = list(errors)
        self.headers = headers or {}

    def document(self, request_id: str | None = None) -> Problem:
        return Problem(
            type=f"{PROBLEMS}/{self.problem_code}",
            title=title_of(self.status),
            status=self.status,
            detail=self.detail,
            code=self.problem_code,
            errors=self.errors,
            request_id=request_id,
            trace_id=traces.trace_id(),
        )


def not_found(what: str) -> ProblemError:
    """Return the problem for something that does not exist, or that the caller may not see."""
    return ProblemError(404, ProblemCode.NOT_FOUND, f"There is no such {what}.")


def found(value: T | None, what: str) -> T:
    """Return a value; ``ProblemError``: 404 if there is none."""
    if value is None:
        raise not_found(what)
    return value


def conflict(detail: str, errors: Sequence[FieldError] = ()) -> ProblemError:
    """Return the problem for a request that does not go together with what there is."""
    return ProblemError(409, ProblemCode.CONFLICT, detail, errors=errors)


def invalid(pointer: str, detail: str, code: ProblemCode = ProblemCode.INVALID_REQUEST) -> ProblemError:
    """Return the problem for an invalid field of a request."""
    return ProblemError(422, code, detail, errors=[FieldError(pointer=pointer, detail=detail)])


def body_too_large(max_bytes: int) -> ProblemError:
    return ProblemError(413, ProblemCode.BODY_TOO_LARGE, f"The body is larger than {max_bytes} bytes.")


def key_reused() -> ProblemError:
    """Return the problem for an ``Idempotency-Key`` that came with another body before."""
    detail = "This Idempotency-Key was used with another request body; nothing was submitted."
    return invalid("#Idempotency-Key", detail, ProblemCode.IDEMPOTENCY_KEY_REUSED)


def unavailable(what: str) -> ProblemError:
    """Return the problem for a dependency that does not answer right now."""
    detail = f"{what} does not answer; try again."
    return ProblemError(503, ProblemCode.UNAVAILABLE, detail, headers={"Retry-After": "1"})


def _pointer(location: Sequence[int | str]) -> str:
    if not location:
        return ""
    place, *path = location
    if mark := {"query": "?", "header": "#"}.get(str(place)):
        return mark + "/".join(map(str, path))
    if place not in ("body", "path"):
        path = [place, *path]
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def field_errors(errors: Sequence[ErrorDetails | dict[str, Any]]) -> list[FieldError]:
    """Return Pydantic's errors as field pointers; at most 50 of them, so that an answer stays readable."""
    return [FieldError(pointer=_pointer(e["loc"]), detail=explained(e)) for e in list(errors)[:50]]


def validation_problem(errors: Sequence[ErrorDetails | dict[str, Any]]) -> ProblemError:
    if any(e["type"] == "json_invalid" for e in errors):
        return ProblemError(400, ProblemCode.BODY_NOT_JSON, "The body is not valid JSON.", errors=field_errors(errors))
    found = field_errors(errors)
    where = found[0].pointer if found else ""
    detail = f"{where or 'The request'}: {found[0].detail}" if found else "The request is not valid."
    return ProblemError(422, ProblemCode.INVALID_REQUEST, detail, errors=found)


def as_problem(error: Exception) -> ProblemError:
    match error:
        case ProblemError():
            return error
        case RequestValidationError():
            return validation_problem(error.errors())
        case PolicyConfigError():
            found = FieldError(pointer="/parameters" + error.pointer, detail=str(error))
            detail = f"{found.pointer}: {error}"
            return ProblemError(422, ProblemCode.INVALID_POLICY_PARAMETERS, detail, errors=[found])
        case TransitionError():
            return ProblemError(409, ProblemCode.INVALID_TRANSITION, str(error))
        case PlanError():
            return ProblemError(409, ProblemCode.CONFLICT, str(error))
        case HTTPException():
            code = _CODES_OF_STATUS.get(error.status_code, ProblemCode.INVALID_REQUEST)
            return ProblemError(error.status_code, code, str(error.detail), headers=dict(error.headers or {}))
        case _:
            detail = "An internal error occurred; the log contains it under the request id."
            return ProblemError(500, ProblemCode.INTERNAL, detail)


def problem_response(error: ProblemError, request_id: str | None = None) -> Response:
    return Response(
        error.document(request_id).model_dump_json(exclude_none=True),
        status_code=error.status,
        media_type=MEDIA_TYPE,
        headers=error.headers,
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every exception in ``app`` with a problem document."""

    async def handle(request: Request, error: Exception) -> Response:
        problem = as_problem(error)
        request_id = request.headers.get(REQUEST_ID_HEADER)
        if problem.status >= 500 and not isinstance(error, ProblemError):
            log.exception("request.failed", method=request.method, path=request.url.path)
        return problem_response(problem, request_id)

    for kind in (WattshiftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
