"""Rows that cannot be read, such as those that a later release has stored: each costs only itself, and is logged."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")
R = TypeVar("R")


@lru_cache(maxsize=1_000)
def _say_once(what: str, name: str, error: str) -> None:
    log.error("row.unreadable", what=what, name=name, error=error)


def each_readable(rows: Iterable[T], read: Callable[[T], R], name: Callable[[T], str], what: str) -> list[R | None]:
    """Return what is made of each row, in order; None in the place of one that cannot be read."""
    found: list[R | None] = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception as error:  # whatever is wrong with one, the others are there
            found.append(None)
            _say_once(what, name(row), str(error) or type(error).__name__)
    return found


def readable(rows: Iterable[T], read: Callable[[T], R], name: Callable[[T], str], what: str) -> list[R]:
    """Return what is made of the rows that can be read."""
    return [each for each in each_readable(rows, read, name, what) if each is not None]
