"""All SQL of admission.

``jobs`` reads and changes single jobs, ``submissions`` accepts many in one transaction, ``accounts`` counts what
tenants may still submit, ``access`` is tenants, keys and the audit log, ``events`` reads the events.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection

from services.kit.readable import BY_ID, Unread, each_readable

T = TypeVar("T")


class Repository:
    """Queries on one connection, within the caller's transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def _all(self, query: Executable, made_of: Callable[[Any], T]) -> list[T]:
        return [made_of(dict(row)) for row in (await self._connection.execute(query)).mappings()]

    async def _listed(
        self, query: Executable, made_of: Callable[[Any], T], what: str, name: Callable[[Any], str] = BY_ID
    ) -> list[T | Unread]:
        """Return what is made of each row, and what stands for one that cannot be read."""
        rows = (await self._connection.execute(query)).mappings()
        return each_readable(rows, lambda row: made_of(dict(row)), what, name)

    async def _readable(
        self, query: Executable, made_of: Callable[[Any], T], what: str, name: Callable[[Any], str] = BY_ID
    ) -> list[T]:
        """Return what is made of the rows that can be read."""
        return [each for each in await self._listed(query, made_of, what, name) if not isinstance(each, Unread)]

    async def _one(self, query: Executable, made_of: Callable[[Any], T]) -> T | None:
        row = (await self._connection.execute(query)).mappings().one_or_none()
        return None if row is None else made_of(dict(row))

    async def _value(self, query: Executable) -> Any:
        return (await self._connection.execute(query)).scalar_one_or_none()
