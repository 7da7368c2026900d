"""What people name and specify, pools, fleets, applications and endpoints: read, changed and deleted in one way."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel

from services.contracts.identity import Identity
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import PageQuery
from services.contracts.schema import Page
from services.kit.problems import conflict
from services.kit.readable import say_unread
from services.kit.routes import one_page, read_cursor
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.specs import SpecRows

ANY_ID = r"[a-z]+_[0-9a-z]{26}"  #: Of an instance or a plan


class HasName(Protocol):
    """A row of one kind."""

    @property
    def name(self) -> str: ...


class Record(HasName, Protocol):
    """One whose specs have revisions."""

    @property
    def spec(self) -> BaseModel: ...
    @property
    def revision(self) -> int: ...
    @property
    def deleted_at(self) -> datetime | None: ...


T = TypeVar("T", bound=HasName)
R = TypeVar("R", bound=Record)
S = TypeVar("S")
P = TypeVar("P", bound=Page[Any])


class Listed(Generic[T, S]):
    """How callers find things of one kind by name: rows are ``T``, and callers see them as ``S``."""

    def __init__(self, repository: ServingRepository) -> None:
        self._repository = repository

    def _rows(self, queries: Queries) -> SpecRows[T]:
        raise NotImplementedError

    async def _show(self, queries: Queries, records: Sequence[T], caller: Identity) -> list[S]:
        """Return rows as a caller sees them."""
        raise NotImplementedError

    async def find(self, name: str, caller: Identity) -> S:
        """Return one with its current state; ``ProblemError``: 404 if there is none that the caller may see."""
        async with self._repository.reading() as queries:
            return await self._shown(queries, name, caller)

    async def page(self, query: PageQuery, caller: Identity, into: type[P]) -> P:
        """Return one page, by name; ``ProblemError``: 422 for an invalid cursor."""
        after = read_cursor(query.cursor, NAME_PATTERN)
        async with self._repository.reading() as queries:
            found = await self._rows(queries).page(after, query.limit + 1, caller)
            records, cursor = one_page(found, query.limit, lambda each: each.name)
            return into(items=await self._show_readable(queries, records, caller), next_cursor=cursor)

    async def _show_readable(self, queries: Queries, records: Sequence[T], caller: Identity) -> list[S]:
        try:
            return await self._show(queries, records, caller)
        except ValueError as error:  # of a row that is read only now
            if len(records) == 1:
                say_unread(self._rows(queries).what, records[0].name, error)
                return []
        return [shown for each in records for shown in await self._show_readable(queries, [each], caller)]

    async def _shown(self, queries: Queries, name: str, caller: Identity) -> S:
        (shown,) = await self._show(queries, [await self._rows(queries).find(name, caller)], caller)
        return shown


class Named(Listed[R, S]):
    """What callers may do with one kind whose specs have revisions, and whose removal takes time."""

    kind: ClassVar[str]  #: Its name in messages
    when_deleted: ClassVar[str] = "its instances are drained"

    async def _before_deletion(self, queries: Queries, record: R) -> None:
        """Refuse to delete something, or end what it has under way."""

    async def delete(self, name: str, caller: Identity) -> S:
        """Have one removed once nothing of it runs; ``ProblemError``: 404 if it is not seen, 409 if it is in use."""
        async with self._repository.writing() as queries:
            rows = self._rows(queries)
            record = await rows.find(name, caller, "update")
            await self._before_deletion(queries, record)
            if record.deleted_at is None:
                await rows.mark_deleted(name)
                await queries.audit(caller, f"{rows.what}.deleted", name)
            return await self._shown(queries, name, caller)

    async def _locked(self, queries: Queries, name: str, caller: Identity) -> R:
        """Return a locked row; ``ProblemError``: 404 if there is none, 409 for one that is being deleted."""
        record = await self._rows(queries).find(name, caller, "update")
        if record.deleted_at is not None:
            raise conflict(f"{self.kind} {name} is being deleted; {self.when_deleted}.")
        return record

    async def _set(
        self, queries: Queries, name: str, spec: BaseModel, caller: Identity, *, may_be_new: bool = True, **columns: Any
    ) -> tuple[S, bool]:
        """Create one or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Args:
            columns: Those of a new row besides its spec.
        """
        rows = self._rows(queries)
        is_new = may_be_new and await rows.add(name, spec, caller, **columns)
        if is_new:
            await queries.audit(caller, f"{rows.what}.created", name)
        else:
            record = await self._locked(queries, name, caller)
            if spec != record.spec:
                await self._replace(queries, record, spec, caller)
        return await self._shown(queries, name, caller), is_new

    async def _replace(self, queries: Queries, record: R, spec: Any, caller: Identity) -> None:
        """Replace the spec of a locked row by another one."""
        rows, revision = self._rows(queries), record.revision + 1
        await rows.set_spec(record.name, spec, revision=revision)
        await queries.audit(caller, f"{rows.what}.changed", record.name, revision=revision)
