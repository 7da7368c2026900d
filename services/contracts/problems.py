"""RFC 9457 problem documents, the format of every error."""

from pydantic import Field

from services.contracts.codes import ProblemCode
from services.contracts.schema import Message, maybe, said

MEDIA_TYPE = "application/problem+json"


class FieldError(Message):
    """One error in the request."""

    pointer: str = said("JSON pointer into the body, `?name` for a query parameter, or `#name` for a header.")
    detail: str


class Problem(Message):
    """An RFC 9457 problem document."""

    type: str = said("`/problems/` and the code: the page of the public API that explains it.")
    title: str
    status: int
    detail: str
    code: ProblemCode
    errors: list[FieldError] = Field(default_factory=list[FieldError])
    request_id: str | None = None
    trace_id: str | None = maybe("The trace of the request, where traces are on.")
