"""Query rows as typed records.

A query's row is a ``NamedTuple`` whose fields are the query's columns, in their order::

    class Host(NamedTuple):
        id: str
        address: str


    hosts = await fetch_rows(connection, Host, "SELECT id, address FROM nodes")

A record becomes a tuple in one call, and the tuple's fields are then read faster than a record's columns by name.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, TypeVar, cast

from services.contracts.schema import Message
from services.db.database import Connection, Record

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=tuple[object, ...])  #: A class made with ``NamedTuple``


class RowShapeError(Exception):
    """A query's columns are not the fields of its row: one of the two was changed without the other."""


def rows_of(row_type: type[R], records: list[Record]) -> list[R]:
    """Return records as rows; ``RowShapeError`` if their columns are not the fields of ``row_type``."""
    if records and (columns := [*records[0].keys()]) != (fields := [*row_type.__annotations__]):
        raise RowShapeError(f"{row_type.__name__} has the fields {fields}, its query the columns {columns}")
    new: Callable[[type[R], Record], R] = cast("Any", tuple).__new__
    return [new(row_type, record) for record in records]


def columns_of(row_type: type[R], rows: Sequence[R]) -> dict[str, tuple[object, ...]]:
    """Return rows as columns, by name: (n_rows,) each."""
    columns: Iterable[tuple[object, ...]] = zip(*rows, strict=True) if rows else repeat(())
    return dict(zip(row_type.__annotations__, columns, strict=False))


async def fetch_rows(connection: Connection, row_type: type[R], query: str, *arguments: object) -> list[R]:
    """Return all rows of a query; ``RowShapeError`` if its columns are not the fields of ``row_type``."""
    return rows_of(row_type, await connection.fetch(query, *arguments))


async def fetch_messages(connection: Connection, kind: type[M], query: str, *arguments: object) -> list[M]:
    """Return all rows of a query as messages whose fields are its columns."""
    return [kind.as_stored(dict(record)) for record in await connection.fetch(query, *arguments)]


async def fetch_row(connection: Connection, row_type: type[R], query: str, *arguments: object) -> R | None:
    """Return the first row of a query, None if there is none; ``RowShapeError`` as for ``fetch_rows``."""
    record = await connection.fetchrow(query, *arguments)
    return None if record is None else rows_of(row_type, [record])[0]
