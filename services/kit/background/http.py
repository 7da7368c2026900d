"""What the endpoints of background work have in common."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header

from services.contracts.problems import Problem

PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "`unauthenticated`."},
    422: {"model": Problem, "description": "`invalid_request`, with a pointer to what is wrong."},
    503: {"model": Problem, "description": "`unavailable`; repeating the request is safe."},
}
SUBMIT_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "`body_not_json`."},
    413: {"model": Problem, "description": "`body_too_large`."},
    429: {"model": Problem, "description": "`quota_exceeded`: too much of the tenant's work is queued or running."},
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "`not_found`."}}
ENDED: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    409: {"model": Problem, "description": "`invalid_transition`: it has ended."},
}

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
