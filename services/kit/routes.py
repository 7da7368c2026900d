"""What a route says beside its signature: to FastAPI, and to ``tools.routes``, which makes the public API's table."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.responses import StreamingResponse

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
LARGE_BODY = {"x-large-body": True}
"""A route's ``openapi_extra`` where its body may be as large as a batch's."""


class EventStream(StreamingResponse):
    """Server-sent events; ``responses`` names the model of an event's data under 200."""

    media_type = "text/event-stream"


class Lines(StreamingResponse):
    """Lines of CSV, or JSON lines if the query asks for them; ``responses`` names the model of a line under 200."""

    media_type = "text/csv"


def from_state(name: str) -> Any:
    """Return a dependency: what the composition root put into ``app.state`` under a name."""

    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


async def for_all_users() -> None:
    """Say of a router's routes that every user may ask them, keys of one project included, and services for nobody."""
