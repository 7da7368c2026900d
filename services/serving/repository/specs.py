"""Queries on what people name and specify, whatever it is: pools, fleets, applications and registered endpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel
from sqlalchemy import Executable, RowMapping, Select, TableClause, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.identity import Identity
from services.kit.problems import not_found
from services.kit.readable import BY_NAME, Unread, each_readable, readable

Lock = Literal["share", "update", "free"]
"""``share`` keeps a row from being changed, ``update`` also from being locked; ``free`` passes over one that is."""


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D", bound=Dataclass)


def record_of(kind: type[D], row: RowMapping, **read: Any) -> D:
    """Return a row as a record: each field is the column of the same name, except for those given."""
    columns = {each.name: row[each.name] for each in fields(kind) if each.name not in read}
    return kind(**columns, **read)


class Rows:
    """Queries on one connection, within the caller's transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def _rows(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[RowMapping]:
        return (await self._connection.execute(query, values)).mappings().all()

    async def _row(self, query: Executable, values: Mapping[str, Any] | None = None) -> RowMapping | None:
        return (await self._connection.execute(query, values)).mappings().one_or_none()


class SpecRows(Rows, Generic[R]):
    """Queries on the table of one kind."""

    table: ClassVar[TableClause]
    what: ClassVar[str]

    def _record(self, row: RowMapping) -> R:
        raise NotImplementedError

    async def find(self, name: str, caller: Identity | None = None, lock: Lock | None = None) -> R:
        """Return a row, locked on request; without a caller, whoever owns it.

        Raises:
            ProblemError: 404 if there is none that the caller may see.
        """
        found = await self.known(name, caller, lock)
        if found is None:
            raise not_found(self.what)
        return found

    async def known(self, name: str, caller: Identity | None = None, lock: Lock | None = None) -> R | None:
        """Return a row, locked on request; None if there is none that the caller may see or that can be locked."""
        query = self._seen(select(self.table), caller).where(self.table.c.name == name)
        if lock is not None:
            query = query.with_for_update(read=lock == "share", skip_locked=lock == "free")
        return next(iter(await self._read(query)), None)

    async def all(self) -> list[R]:
        """Return all rows that can be read, by name."""
        rows = await self._rows(select(self.table).order_by(self.table.c.name))
        return readable(rows, self._record, self.what, BY_NAME)

    async def page(self, after: str | None, limit: int, caller: Identity | None = None) -> list[R | Unread]:
        """Return rows by name; without a caller, those of all tenants. One that cannot be read has a stand-in."""
        rows = await self._rows(self._listed(select(self.table), after, limit, caller))
        return each_readable(rows, self._record, self.what, BY_NAME)

    async def add(self, name: str, spec: BaseModel, caller: Identity, **columns: Any) -> bool:
        """Add a row, and return whether the name was free."""
        own = {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "spec": spec.model_dump(mode="json")}
        statement = upsert(self.table).values({"name": name, **own, **columns}).on_conflict_do_nothing()
        return (await self._connection.execute(statement.returning(self.table.c.name))).one_or_none() is not None

    async def change(self, name: str, **columns: Any) -> None:
        await self._connection.execute(update(self.table).where(self.table.c.name == name).values(columns))

    async def set_spec(self, name: str, spec: BaseModel, **columns: Any) -> None:
        await self.change(name, spec=spec.model_dump(mode="json"), updated_at=func.now(), **columns)

    async def mark_deleted(self, name: str) -> None:
        """Mark a row for removal once nothing of it runs."""
        await self.change(name, deleted_at=func.now(), updated_at=func.now())

    async def remove(self, name: str) -> None:
        await self._connection.execute(delete(self.table).where(self.table.c.name == name))

    async def _read(self, query: Select[Any]) -> list[R]:
        return [self._record(row) for row in await self._rows(query)]

    def _listed(self, query: Select[Any], after: str | None, limit: int, caller: Identity | None) -> Select[Any]:
        query = self._seen(query, caller).order_by(self.table.c.name).limit(limit)
        return query if after is None else query.where(self.table.c.name > after)

    def _seen(self, query: Select[Any], caller: Identity | None) -> Select[Any]:
        if caller is None or caller.is_operator:
            return query
        return query.where(self.table.c.tenant_id == caller.tenant_id)
