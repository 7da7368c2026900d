"""Rows that cannot be read, such as those that a later release has stored: each costs only itself, and is logged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Unread:
    """Stands for a row that cannot be read, so that a page that ends with it has a next one."""

    name: str

    @property
    def id(self) -> str:
        return self.name


@lru_cache(maxsize=1_000)
def _say_once(what: str, name: str, error: str) -> None:
    log.error("row.unreadable", what=what, name=name, error=error)


def each_readable(rows: Iterable[T], read: Callable[[T], R], name: Callable[[T], str], what: str) -> list[R | Unread]:
    """Return what is made of each row, in order, and what stands for one that cannot be read."""
    found: list[R | Unread] = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception as error:  # whatever is wrong with one, the others are there
            found.append(Unread(name(row)))
            _say_once(what, name(row), str(error) or type(error).__name__)
    return found


def readable(rows: Iterable[T], read: Callable[[T], R], name: Callable[[T], str], what: str) -> list[R]:
    """Return what is made of the rows that can be read."""
    return [each for each in each_readable(rows, read, name, what) if not isinstance(each, Unread)]
