"""The rows of live jobs, kept from round to round, so that only those that have changed are read again.

A job's row is made of one row from each of five tables. PostgreSQL marks each version of a row with the number of the
transaction that wrote it (``xmin``): if all five numbers are unchanged, so is the job's row. The numbers of all live
jobs are read each time, in the transaction that reads the rest, so that nothing depends on being told what has changed.
``tests/scheduler/test_kept_jobs.py`` compares the result with a full read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Bools, Ints
from services.db.database import Connection
from services.db.rows import columns_of, fetch_rows
from services.scheduler.repository import snapshots
from services.scheduler.repository.snapshots import JobRow

FULL_EVERY_S = 600.0  #: Everything is read again so often, long before the numbers of transactions come round
FEW = 1_000  #: So few jobs are read in full sooner than they are compared
CHANGED_SHARE = 0.3  #: Where more than that has changed, everything is read again

_SERVER = "SELECT pg_postmaster_start_time()"

_TABLES = ("j", "a", "f", "p", "q")
_HEADER, _TRAILER = 19, 2
"""Bytes before and after the rows of a binary COPY."""

_NOTHING: Any = None

_DECLARED = get_type_hints(JobRow)
_DTYPES: Mapping[Any, type[Any]] = {
    bool: np.bool_,
    int: np.int64,
    int | None: np.float64,
    float: np.float64,
    float | None: np.float64,
}
"""Of a column, by what its field is declared as; others are columns of objects. None is NaN in a column of numbers."""

Column = NDArray[Any]


@dataclass(frozen=True)
class Kinds:
    """Jobs by what they have in some columns: of a hundred thousand, most have the same."""

    values: tuple[tuple[Any, ...], ...]  #: The distinct values; some may belong to no job any more
    of: Ints  #: (n_jobs,) the index of each job's value

    @classmethod
    def among(cls, rows: Sequence[JobRow], names: Sequence[str], known: Sequence[tuple[Any, ...]] = ()) -> Kinds:
        """Return what rows have in these columns, at least two; the values of ``known`` come first, unchanged."""
        found = [*map(attrgetter(*names), rows)]
        row = {each: at for at, each in enumerate(dict.fromkeys([*known, *found]))}
        return cls((*row,), np.fromiter(map(row.__getitem__, found), np.int64, len(found)))


class JobRows(Sequence[JobRow]):
    """Rows of jobs, also available as columns: (n_jobs,) each, which nobody may change."""

    def __init__(
        self,
        rows: list[JobRow],
        columns: Mapping[str, Column] | None = None,
        kinds: Mapping[tuple[str, ...], Kinds] | None = None,
    ) -> None:
        self._rows = rows
        self._made = columns
        self._kinds = dict(kinds or {})

    @classmethod
    def of(cls, rows: Sequence[JobRow]) -> JobRows:
        """Return rows with their columns."""
        return rows if isinstance(rows, cls) else cls([*rows])

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """Each column by its name."""
        return _arrays(self._rows) if self._made is None else self._made

    def kinds(self, *names: str) -> Kinds:
        """Return the jobs by their values in these columns, at least two."""
        if names not in self._kinds:
            self._kinds[names] = Kinds.among(self._rows, names)
        return self._kinds[names]

    def have(self, column: str) -> Bools:
        """Return which jobs have a value, in a column of objects: (n_jobs,)."""
        return np.not_equal(self.columns[column], _NOTHING).astype(np.bool_)

    def where(self, keep: Bools) -> JobRows:
        """Return those of the rows that ``keep`` (n_jobs,) marks."""
        if keep.all():
            return self
        which = np.flatnonzero(keep)
        kept = {name: _frozen(column[which]) for name, column in self.columns.items()}
        kinds = {names: Kinds(each.values, each.of[which]) for names, each in self._kinds.items()}
        return JobRows([self._rows[at] for at in which.tolist()], kept, kinds)

    def renewed(self, come_from: Ints | None, at: Ints, new: list[JobRow]) -> JobRows:
        """Return rows of which some are carried over and the others are new.

        Args:
            come_from: (n_then,) the index here of each row of the result, anything for a new one; None: none has moved.
            at: (n_new,) the indices of the new ones.
        """
        if come_from is None and not new:
            return self
        sources: list[int] | range = range(len(self)) if come_from is None else come_from.tolist()
        rows = [*map(self._rows.__getitem__, sources)]
        for position, row in zip(at.tolist(), new, strict=True):
            rows[position] = row
        patches = _arrays(new)
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            column = column.copy() if come_from is None else column[come_from]
            column[at] = patches[name]
            columns[name] = _frozen(column)
        kinds: dict[tuple[str, ...], Kinds] = {}
        for names, each in self._kinds.items():
            patch = Kinds.among(new, names, each.values)
            of = each.of.copy() if come_from is None else each.of[come_from]
            of[at] = patch.of
            kinds[names] = Kinds(patch.values, of)
        return JobRows(rows, columns, kinds)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[JobRow]:
        return iter(self._rows)

    @overload
    def __getitem__(self, at: int) -> JobRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[JobRow]: ...
    def __getitem__(self, at: int | slice) -> JobRow | list[JobRow]:
        return self._rows[at]


def _arrays(rows: Sequence[JobRow]) -> dict[str, Column]:
    columns = columns_of(JobRow, rows)
    return {
        name: _frozen(np.fromiter(column, object, len(rows)).astype(_DTYPES.get(_DECLARED[name], object)))
        for name, column in columns.items()
    }


def _frozen(column: Column) -> Column:
    column.setflags(write=False)
    return column


@dataclass(frozen=True)
class _Known:
    """What was read last: the rows, their version numbers, the server's start, and when they were last read in full."""

    rows: JobRows
    versions: Column
    server: object
    full_at_s: float


class KeptJobs:
    """Live jobs as they were last read."""

    def __init__(self, few: int = FEW) -> None:
        self._few = few
        self._known: _Known | None = None
        self._last = 0
        self.read_again = 0  #: How many rows the last reading had to read

    def forget(self) -> None:
        """Read everything the next time, since something may have been missed."""
        self._known = None

    async def fetch(self, connection: Connection, of_gated: Sequence[str] | None) -> JobRows:
        """Return the live jobs as `snapshots.jobs` does.

        Args:
            connection: In a transaction that sees one state of the database throughout.
            of_gated: As for `snapshots.jobs`.
        """
        known, self._known = self._known, None  # whatever goes wrong below, nothing is kept of it
        if self._last < self._few:
            rows = JobRows.of(await snapshots.jobs(connection, of_gated))
            self._last = self.read_again = len(rows)
            return rows
        server = await connection.fetchval(_SERVER)
        versions = await _versions(connection, of_gated)
        found = None
        is_sure = known is not None and known.server == server and time.monotonic() < known.full_at_s + FULL_EVERY_S
        if known is not None and versions is not None and is_sure:
            found = await self._renewed(connection, known, versions)
        full_at_s = time.monotonic() if known is None or found is None else known.full_at_s
        if found is None:
            found = JobRows.of(await snapshots.jobs(connection, of_gated))
            self.read_again = len(found)
            if versions is not None and not _are_of(versions, found):
                versions = None
        self._last = len(found)
        if versions is not None:
            self._known = _Known(found, versions, server, full_at_s)
        return found

    async def _renewed(self, connection: Connection, known: _Known, versions: Column) -> JobRows | None:
        """Return the rows, of which only changed ones are read; None if too many have changed, or nothing was known."""
        if not known.versions.size:
            return None
        come_from, changed = _compare(known.versions, versions)
        at = np.flatnonzero(changed)
        if at.size > CHANGED_SHARE * versions.size:
            return None
        ids: list[str] = versions["id"][at].astype(str).tolist()
        new = await fetch_rows(connection, JobRow, snapshots.JOBS_BY_ID, ids) if ids else []
        if [row.id for row in new] != ids:
            return None
        self.read_again = len(new)
        return known.rows.renewed(come_from, at, new)


def _compare(old: Column, new: Column) -> tuple[Ints | None, Bools]:
    """Return where each new row was among the old, None if none has moved; and which are new or have changed."""
    if old.size == new.size and np.array_equal(old["id"], new["id"]):
        return None, (old["versions"] != new["versions"]).any(axis=1)
    was = np.minimum(np.searchsorted(old["id"], new["id"]), old.size - 1)
    same = (old["id"][was] == new["id"]) & (old["versions"][was] == new["versions"]).all(axis=1)
    return was, ~same


def _are_of(versions: Column, rows: JobRows) -> bool:
    return versions["id"].astype(str).tolist() == rows.columns["id"].tolist()


async def _versions(connection: Connection, of_gated: Sequence[str] | None) -> Column | None:
    """Return the id and version numbers of each live job, in order of id; None if ids differ in length."""
    query, arguments = snapshots.query_of(snapshots.VERSIONS, of_gated)
    data = bytearray()

    async def take(part: bytes) -> None:
        data.extend(part)

    await connection.copy_from_query(query, *arguments, output=take, format="binary")
    size = len(data) - _HEADER - _TRAILER
    if size < 6:
        return np.zeros(0, dtype=[("id", "S1"), ("versions", "u4", (len(_TABLES),))])
    width = int.from_bytes(data[_HEADER + 2 : _HEADER + 6], "big")
    number = np.dtype([("length", ">i4"), ("value", ">u4")])
    row = np.dtype([("fields", ">i2"), ("length", ">i4"), ("id", f"S{width}"), ("of", number, (len(_TABLES),))])
    if size % row.itemsize:
        return None
    rows = np.frombuffer(data, row, size // row.itemsize, _HEADER)
    lengths_hold = (rows["length"] == width).all() and (rows["of"]["length"] == number["value"].itemsize).all()
    if not (lengths_hold and (rows["fields"] == 1 + len(_TABLES)).all()):
        return None
    made = np.empty(rows.size, dtype=[("id", f"S{width}"), ("versions", "u4", (len(_TABLES),))])
    made["id"], made["versions"] = rows["id"], rows["of"]["value"]
    return made[np.argsort(made["id"], kind="stable")]  # they come nearly in this order, which that kind makes use of
