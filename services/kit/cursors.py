"""Cursors of paged lists: opaque to clients, and validated when sent back."""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from services.contracts.codes import ProblemCode
from services.kit.problems import ProblemError, invalid

T = TypeVar("T")


def one_page(found: Sequence[T], limit: int, position: Callable[[T], str]) -> tuple[list[T], str | None]:
    """Return a page from the result of a query for one item more than its limit, and the cursor of the next page."""
    return [*found[:limit]], write_cursor(position(found[limit - 1])) if len(found) > limit else None


def not_a_cursor() -> ProblemError:
    """Return the problem for a cursor that no page of the list gave."""
    return invalid("?cursor", "This is not a cursor of this list.", ProblemCode.INVALID_CURSOR)


def write_cursor(position: str) -> str:
    """Return ``position`` as a cursor."""
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


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
    if position is None or re.fullmatch(pattern, position) is None:
        raise not_a_cursor()
    return position
