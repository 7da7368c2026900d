"""Cursors: opaque to clients, and checked when they come back."""

from __future__ import annotations

import base64
import binascii
import re

from services.contracts.problems import FieldError, ProblemCode
from services.kit.problems import ProblemError

INVALID = ProblemError(
    422,
    ProblemCode.INVALID_CURSOR,
    "The cursor is not one that this list gave out.",
    errors=[FieldError(pointer="?cursor", detail="Not a cursor of this list.")],
)


def write_cursor(position: str) -> str:
    """Return ``position`` as a cursor."""
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def read_cursor(cursor: str | None, pattern: str) -> str | None:
    """Return the position in ``cursor``, which must match ``pattern`` as a whole; None where there is no cursor.

    Raises:
        ProblemError: It is not a cursor of this list.
    """
    if cursor is None:
        return None
    try:
        position = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError) as error:
        raise INVALID from error
    if not matches(pattern, position):
        raise INVALID
    return position


def matches(pattern: str, text: str) -> bool:
    """Return whether the whole of ``text`` is as ``pattern`` says."""
    return re.fullmatch(pattern, text) is not None
