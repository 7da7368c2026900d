"""Times as people and programs write them in URLs and bodies."""

import re
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

FIRST_YEAR, LAST_YEAR = 1970, 2199
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?(Z|[+-]\d{2}:?\d{2})?)?", re.ASCII | re.I)
_LOST_PLUS = re.compile(r"(?<=\d) (?=\d{2}:?\d{2}$)", re.ASCII)


def _parse(value: Any, *, naive_is_utc: bool) -> datetime:
    if isinstance(value, datetime) and value.tzinfo:
        return value
    if not isinstance(value, str):
        raise ValueError("must be a string such as 2026-03-01T12:00:00Z")
    # A plus sign that was not percent-encoded in a query arrives as a space.
    written = _LOST_PLUS.sub("+", value.strip()) if "T" in value else value.strip()
    if not _ISO.fullmatch(written):
        raise ValueError("must be an ISO 8601 time such as 2026-03-01T12:00:00Z")
    parsed = datetime.fromisoformat(written)
    if not FIRST_YEAR <= parsed.year <= LAST_YEAR:
        raise ValueError(f"the year must be between {FIRST_YEAR} and {LAST_YEAR}")
    if parsed.tzinfo is None:
        if not naive_is_utc:
            raise ValueError("needs a time zone: end with Z for UTC or with an offset such as +02:00")
        parsed = parsed.replace(tzinfo=UTC)
    return parsed.astimezone(UTC)


_SCHEMA = WithJsonSchema({"type": "string", "format": "date-time"})
AwareInstant = Annotated[
    datetime, BeforeValidator(partial(_parse, naive_is_utc=False)), _SCHEMA
]  #: A time with a time zone
LenientInstant = Annotated[datetime, BeforeValidator(partial(_parse, naive_is_utc=True)), _SCHEMA]
"""A time; UTC if it has no time zone, midnight if it is only a date."""
