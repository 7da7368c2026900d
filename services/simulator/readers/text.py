"""Read text, gzipped or not, and the cells of a table one row at a time.

Every reader of rows goes through ``counted``, so that rows kept, dropped and merged add up to the lines of a file that
are not empty.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from services.kit.extras import missing_extra
from services.kit.text import encoding_of
from services.simulator.raw import TOO_LARGE, TWICE, ReadReport, TraceFormatError

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
LONGEST_LINE = 2**24
"""Characters; a few kilobytes can unpack to gigabytes without the end of a line."""
MILLISECONDS = (1e12, 1e13)
"""From 2001 to 2286, in milliseconds; seconds have two digits less at least, and digits of a date and time more."""
LEAST_SECONDS = 1e8
"""Of 1973; smaller numbers are dates without separators, days of a spreadsheet, or hours since some beginning."""
NO_ZONE = "times without a zone are assumed to be in UTC"
Row = dict[str, str]


class _Lines(io.TextIOWrapper):
    """Text whose lines are read one by one, and none that would fill the memory; Excel's ``sep=;`` counts as empty."""

    _is_first = True

    def __next__(self) -> str:
        line = self.readline(LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        if len(line) > LONGEST_LINE:
            raise TraceFormatError(f"a line has more than {LONGEST_LINE} characters: it is no trace")
        is_first, self._is_first = self._is_first, False
        return "\n" if is_first and _SEPARATOR.fullmatch(line) else line


@contextmanager
def open_text(path: Path) -> Generator[IO[str], None, None]:
    """Open a file of UTF-8 or UTF-16 text, unpacking gzip wherever its first bytes say so, without a byte-order mark.

    Bytes that are not UTF-8 become lone surrogates, so that they cost no more than their row. A Parquet table is read
    as the CSV that it would be.

    Raises:
        TraceFormatError: there is no such file, or it is not text; in the block, a line is too long.
    """
    try:
        with path.open("rb") as raw:
            magic = raw.read(len(PARQUET_MAGIC))
            packed = magic.startswith(GZIP_MAGIC)
            raw.seek(0)
            if magic == PARQUET_MAGIC:
                yield _table_of(path)
                return
            binary = gzip.GzipFile(fileobj=raw) if packed else raw
            encoding = encoding_of(binary.peek(4)[:4])
            with _Lines(binary, encoding, "surrogateescape", newline="") as text:  # pyright: ignore[reportArgumentType]
                yield text
    except FileNotFoundError as error:
        raise TraceFormatError(f"there is no file {path}") from error
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, IsADirectoryError) as error:
        raise TraceFormatError(f"{path} is not readable text: {error}") from error


def _table_of(path: Path) -> io.StringIO:
    try:
        import pyarrow  # here: it takes a third of a second, and most files are text
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise TraceFormatError(f"{path} is a Parquet file; {missing_extra(error) or error}") from error

    lines = io.BytesIO()
    try:
        table = pyarrow.parquet.read_table(path)
        for at, field in enumerate(table.schema):
            if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type):
                one_line = pyarrow.compute.call_function(
                    "replace_substring_regex",
                    [table.column(at)],
                    pyarrow.compute.ReplaceSubstringOptions(r"[\r\n]+", " "),
                )
                table = table.set_column(at, field.name, one_line)
        pyarrow.csv.write_csv(table, lines)
    except pyarrow.ArrowException as error:
        raise TraceFormatError(f"{path} is not a readable Parquet table: {error}") from error
    return io.StringIO(lines.getvalue().decode())


def first_lines(path: Path, count: int = 50) -> list[str]:
    """Return the first lines of a file, without their ends."""
    with open_text(path) as text:
        return [line.rstrip("\r\n") for _, line in zip(range(count), text, strict=False)]


def header_of(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the cells of the first line that is not empty, trimmed; none for an empty file or one of no table."""
    for _, line in numbered(lines):
        try:
            return tuple(_NOT_UTF_8.sub("\ufffd", cell).strip() for cell in _cells(line, _delimiter(line)))
        except csv.Error:
            return ()
    return ()


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, without their ends, and their numbers from 1 on."""
    for number, line in enumerate(lines, start=1):
        # Files that were put one behind the other have a byte-order mark in the middle.
        line = line.rstrip("\r\n").removeprefix("\ufeff")
        if line.strip():
            yield number, line


def counted(lines: Iterable[tuple[int, str]], report: ReadReport, *, named: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the rows of a file that can be read, and count all.

    Args:
        lines: Numbers and texts, as ``numbered`` has them, without a header.
        report: Counts them.
        named: Whether rows have ids, so that two equal ones are the same: the second is merged into the first.
    """
    seen: set[str] = set()
    for number, line in lines:
        report.rows += 1
        if not line.isascii() and _NOT_UTF_8.search(line):
            report.drop(number, "bytes that are not UTF-8")
        elif line in seen:
            report.merge(number, TWICE)
        else:
            if named:
                seen.add(line)
            yield number, line


def table(
    lines: Iterable[str], columns: Sequence[str], report: ReadReport, *, named: bool = False
) -> Iterator[tuple[int, Row]]:
    """Yield line number and cells of each row of a table with a header; rows that are no rows of the table drop.

    What separates cells, ``,``, ``|``, ``;`` or a tab, follows from the header. Between ``|`` a quote is a character
    like any other, because those who write such tables (``sacct --parsable2``) do not quote. In the others, a quoted
    cell ends on its line: of one that does not, nobody can tell whether it goes on or its end is missing, so that every
    such line drops by itself. Where ``,`` does not separate cells, a comma in a number is a decimal comma.

    Args:
        lines: The whole file.
        columns: That the header must have.
        report: Counts the rows.
        named: As of ``counted``.

    Raises:
        TraceFormatError: The header lacks a column.
    """
    found = cells_of(lines, report, named=named)
    first = next(found, None)
    if first is None:
        raise TraceFormatError(f"{report.source} is empty")
    header = [_NOT_UTF_8.sub("\ufffd", cell).strip() for cell in first[1]]
    if missing := [column for column in columns if column not in header]:
        raise TraceFormatError(f"{report.source} is not of format {report.format}: no column {missing[0]!r}")
    for line, cells in found:
        if len(cells) != len(header):
            report.drop(line, f"{len(cells)} cells where the header has {len(header)}")
        elif not any(cells):
            report.drop(line, "no cell has a value")
        elif [cell.strip() for cell in cells] == header:
            report.drop(line, "the header again")
        else:
            yield line, dict(zip(header, cells, strict=True))


def cells_of(lines: Iterable[str], report: ReadReport, *, named: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row of a table, the first, which may be a header, uncounted.

    The arguments and what drops are those of ``table``; no cells: the first row is none.
    """
    rows = numbered(lines)
    first = next(rows, None)
    if first is None:
        return
    delimiter = _delimiter(first[1])
    try:
        yield first[0], _cells(first[1], delimiter)
    except csv.Error:
        yield first[0], []
    for line, text in counted(rows, report, named=named):
        try:
            cells = _cells(text, delimiter)
        except csv.Error as error:
            is_open = str(error) == "unexpected end of data"
            report.drop(line, "a quoted cell that does not end on its line" if is_open else f"not CSV: {error}")
            continue
        if delimiter != "," and any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells):
            report.note("commas in numbers are read as decimal commas, as no comma separates the cells")
            cells = [cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]
        yield line, cells


_NUMBER = re.compile(r"[-+\d.eE_]+")
_NOT_UTF_8 = re.compile("[\udc80-\udcff]")
_SEPARATOR = re.compile("sep=.?\\s*")
_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*")


def _delimiter(header: str) -> str:
    return max(",|;\t", key=header.count)


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == "|" or '"' not in line:
        return line.split(delimiter)
    return next(csv.reader([line], delimiter=delimiter, strict=True))


def number(text: str, column: str) -> float:
    """Return a cell as a number, NaN where it is empty.

    Raises:
        ValueError: it is none; the message names the column.
    """
    if not text.strip():
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column} is not a number") from None


def whole(text: str, column: str) -> int:
    """Return a cell as a whole number.

    Raises:
        ValueError: it is none; the message names the column.
    """
    value = number(text, column)
    if not value.is_integer():
        raise ValueError(f"{column} is not a whole number")
    if abs(value) >= TOO_LARGE:
        raise ValueError(f"{column} is too large")
    return int(value)


def utc_s(text: str, column: str = "time") -> float:
    """Return an ISO 8601 moment as UTC seconds; one without a zone is UTC.

    Raises:
        ValueError: it is none; the message names the column.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{column} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def moment_s(text: str, column: str = "time") -> float:
    """Return a moment as UTC seconds: ISO 8601, or seconds or milliseconds since 1970.

    Raises:
        ValueError: It is none; the message names the column.
    """
    try:
        moment = float(text)
    except ValueError:
        return utc_s(text, column)
    if MILLISECONDS[0] <= moment < MILLISECONDS[1]:
        return moment / 1_000
    if not abs(moment) < MILLISECONDS[0] / 10:
        raise ValueError(f"{column} is a number of neither seconds nor milliseconds")
    return moment


def date_s(text: str, column: str = "time") -> float:
    """As ``moment_s``, but of a calendar: no numbers that nobody's clock has shown since 1970.

    Raises:
        ValueError: It is no such moment; the message names the column.
    """
    found = moment_s(text, column)
    if found < LEAST_SECONDS and _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{column} is a number of neither seconds nor milliseconds since 1970")
    return found


def has_zone(text: str) -> bool:
    """Whether a moment says which clock it is of: a number of seconds is of UTC."""
    return re.search(r"[+-]\d\d:?\d\d$|[Zz]$|^[\d.]+$", text.strip()) is not None


def in_unit(row: Row, name: str, units: Mapping[str, float]) -> float:
    """Return a quantity by the unit that the name of its column ends with; NaN where no cell has it.

    Args:
        row: A row.
        name: Of the column, without its unit.
        units: By how it is written, its size in the unit of what is returned.

    Raises:
        ValueError: The cell is no number; the message names the column.
    """
    for unit, size in units.items():
        if (cell := row.get(column := f"{name}_{unit}", "")).strip():
            return number(cell, column) * size
    return math.nan
