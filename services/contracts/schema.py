"""The base of every message: unknown fields are refused on the way in, times are timezone-aware."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name people type: letters, digits, dot, dash, underscore; at most 63 characters."""


_NUMBER = re.compile(r"\s*[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?\s*")


def _storable(value: datetime) -> datetime:
    if not 1970 <= value.year <= 9_000:
        raise ValueError("must lie between the years 1970 and 9000")
    return value


def _written_out(value: Any) -> Any:
    """Pydantic takes a number for a count of seconds or milliseconds, whichever looks likelier: not a moment meant."""
    if isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        raise ValueError("must be an ISO 8601 date and time, such as 2026-03-01T12:00:00Z")
    return value


Instant = Annotated[AwareDatetime, AfterValidator(_storable), BeforeValidator(_written_out)]
"""A moment, timezone-aware, of an era that every database and library can hold."""

# Pydantic takes true for 1 and "8" for 8; in what a user asks for, the wrong type is a mistake to be told of.
Int = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]

# PostgreSQL's text and jsonb cannot hold U+0000; refusing it here keeps it a 422 and not a server error.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]


class Message(BaseModel):
    """Something one process sends to another."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
