"""What a route declares besides its signature: to FastAPI, and to ``tools.routes``, which builds the public table.

Cursors of paged lists are opaque to clients, and validated when sent back.
"""

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator

from services.contracts.codes import ProblemCode
from services.kit.problems import ProblemError, invalid, not_found
from services.kit.readable import Unread

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key with the same body returns the same work.",
    ),
]
LARGE_BODY = {"x-large-body": True}  #: A route's ``openapi_extra`` where its body may be as large as a batch's


class EventStream(StreamingResponse):
    """Server-sent events; ``responses`` names the model of an event's data under 200."""

    media_type = "text/event-stream"


class Lines(StreamingResponse):
    """Lines of CSV, or JSON Lines if the query asks for them; ``responses`` names the model of a line under 200."""

    media_type = "text/csv"


def from_state(name: str) -> Any:
    """Return a dependency on what the composition root put into ``app.state`` under a name."""

    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


def named_by(pattern: str, what: str) -> AfterValidator:
    """Return the check of a name in a path: text of another form names no such ``what``, and the answer is 404."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise not_found(what)
        return text

    return AfterValidator(check)


async def for_all_users() -> None:
    """Open a router's routes to every user, keys of one project included, and to services that act for no user."""


T = TypeVar("T")


def one_page(found: Sequence[T | Unread], limit: int, position: Callable[[Any], str]) -> tuple[list[T], str | None]:
    """Return a page from the result of a query for one item more than its limit, and the cursor of the next page.

    Items that cannot be read are left out.
    """
    page = [each for each in found[:limit] if not isinstance(each, Unread)]
    if len(found) <= limit:
        return page, None
    last = found[limit - 1]
    return page, write_cursor(last.name if isinstance(last, Unread) else position(last))


def not_a_cursor() -> ProblemError:
    """Return the problem for a cursor that no page of the list gave."""
    return invalid("?cursor", "This is not a cursor of this list.", ProblemCode.INVALID_CURSOR)


asked_about: ContextVar[tuple[str | None, ...]] = ContextVar("asked_about", default=())
"""The list that a request is about, by its path, and whose: its cursors are of no other one."""


def _mark() -> str:
    return f"{zlib.crc32(repr(asked_about.get()).encode()):08x}"


def write_cursor(position: str) -> str:
    return base64.urlsafe_b64encode(f"{_mark()}{position}".encode()).decode().rstrip("=")


def read_cursor(cursor: str | None, pattern: str) -> str | None:
    """Return the position in ``cursor``, which must match ``pattern`` in full; None without a cursor.

    Raises:
        ProblemError: 422, it is not a cursor of this list.
    """
    if cursor is None:
        return None
    try:
        position = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        position = None
    mark = _mark()
    if position is None or not position.startswith(mark) or not re.fullmatch(pattern, position[len(mark) :]):
        raise not_a_cursor()
    return position[len(mark) :]
