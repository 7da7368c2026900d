"""Rows that cannot be read, such as those that a later release has stored: each costs only itself, and is logged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from services.contracts.schema import Message
from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M", bound=Message)


class Columns(Protocol):
    """A row as queries return it."""

    def keys(self) -> Iterable[str]: ...
    def __getitem__(self, name: str, /) -> Any: ...


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


def say_unread(what: str, name: str, error: Exception) -> None:
    """Log, once for each error, that a row cannot be read."""
    _say_once(what, name, str(error) or type(error).__name__)


BY_ID: Callable[[Any], str] = itemgetter("id")
BY_NAME: Callable[[Any], str] = itemgetter("name")


def each_readable(
    rows: Iterable[T], read: Callable[[T], R], what: str, name: Callable[[T], str] = BY_ID
) -> list[R | Unread]:
    """Return what is made of each row, in order, and what stands for one that cannot be read.

    Args:
        name: Returns a row's name, which for rows of a page is their position in the list.
    """
    found: list[R | Unread] = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception as error:  # whatever is wrong with one, the others are there
            found.append(Unread(name(row)))
            say_unread(what, name(row), error)
    return found


def messages_of(kind: type[M], rows: Iterable[Columns], name: Callable[[Any], str] = BY_ID) -> list[M | Unread]:
    """Return rows as messages whose fields are their columns."""
    return each_readable(rows, lambda row: kind.as_stored(dict(row)), kind.__name__, name)


def readable_messages(kind: type[M], rows: Iterable[Columns], name: Callable[[Any], str] = BY_ID) -> list[M]:
    """Return the rows that can be read as such messages."""
    return [each for each in messages_of(kind, rows, name) if not isinstance(each, Unread)]


def readable(rows: Iterable[T], read: Callable[[T], R], what: str, name: Callable[[T], str] = BY_ID) -> list[R]:
    """Return what is made of the rows that can be read."""
    return [each for each in each_readable(rows, read, what, name) if not isinstance(each, Unread)]
