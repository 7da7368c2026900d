"""What a route declares besides its signature: to FastAPI, and to ``tools.routes``, which builds the public table."""

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator

from services.kit.problems import not_found

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
