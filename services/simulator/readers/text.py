"""Reading of text, gzipped or not, and of the cells of a table, one row at a time.

All row readers go through ``counted``, so that rows kept, dropped and merged add up to the non-empty lines of a file.
"""

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
from services.kit.text import decimal, encoding_of
from services.simulator.raw import TOO_LARGE, TWICE, ReadReport, TraceFormatError

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
LONGEST_LINE = 2**24  #: Characters; a few kilobytes can unpack to gigabytes without the end of a line
MILLISECONDS = (1e12, 1e13)
"""From 2001 to 2286, in milliseconds; seconds have two digits less at least, and digits of a date and time more."""
LEAST_SECONDS = 1e8
"""Of 1973; smaller numbers are dates without separators, days of a spreadsheet, or hours since some beginning."""
NO_ZONE = "times without a zone are assumed to be in UTC"
Row = dict[str, str]


class _Lines(io.TextIOWrapper):
    """Text that is read line by line, refusing lines that would fill the memory; Excel's ``sep=;`` counts as empty."""

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
    """Open a file of UTF-8 or UTF-16 text without its byte-order mark, unpacking gzip if its first bytes say so.

    Bytes that are not UTF-8 become lone surrogates, so that they cost no more than their row. A Parquet table is read
    as if it were CSV.

    Raises:
        TraceFormatError: There is no such file, or it is not text; within the block: a line is too long.
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
    with open_text(path) as text:
        return [line.rstrip("\r\n") for _, line in zip(range(count), text, strict=False)]


def header_of(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the trimmed cells of the first non-empty line; none if the file is empty or not a table."""
    for _, line in numbered(lines):
        try:
            return tuple(_NOT_UTF_8.sub("\ufffd", cell).strip() for cell in _cells(line, _delimiter(line)))
        except csv.Error:
            return ()
    return ()


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines, without line endings, and their numbers, starting at 1."""
    for number, line in enumerate(lines, start=1):
        # Files that were put one behind the other have a byte-order mark in the middle.
        line = line.rstrip("\r\n").removeprefix("\ufeff")
        if line.strip():
            yield number, line


def counted(lines: Iterable[tuple[int, str]], report: ReadReport, *, named: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the readable rows of a file, and count all.

    Args:
        lines: Numbers and texts, as from ``numbered``, without a header.
        named: Whether rows have ids, so that two equal rows are the same: the second is merged into the first.
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
    """Yield the line number and cells of each row of a table with a header; malformed rows are dropped.

    The separator (``,``, ``|``, ``;`` or a tab) follows from the header. Between ``|`` a quote is a character like any
    other, because those who write such tables (``sacct --parsable2``) do not quote. In other tables, a quoted cell ends
    on its line: if one does not, nobody can tell whether it continues or its closing quote is missing, so every such
    line is dropped by itself. If the separator is not ``,``, a comma in a number is a decimal comma.

    Args:
        columns: Those that the header must have.
        named: As for ``counted``.

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
    """Yield the line number and cells of each row of a table; the first row, which may be a header, is not counted.

    Arguments and dropped rows are as for ``table``; a first row that cannot be parsed has no cells.
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


_NUMBER = re.compile(r"[-+\d.eE]+")
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
    """Return a cell as a number, NaN if it is empty; ``ValueError`` names its column if it is not a number."""
    if not text.strip():
        return math.nan
    try:
        return decimal(text)
    except ValueError:
        raise ValueError(f"{column} is not a number") from None


def whole(text: str, column: str) -> int:
    """Return a cell as a whole number; ``ValueError``, which names the column, if it is not one."""
    value = number(text, column)
    if not value.is_integer():
        raise ValueError(f"{column} is not a whole number")
    if abs(value) >= TOO_LARGE:
        raise ValueError(f"{column} is too large")
    return int(value)


def utc_s(text: str, column: str = "time") -> float:
    """Return an ISO 8601 time, UTC without a zone, as UTC seconds; ``ValueError`` names its column if it is none."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{column} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def moment_s(text: str, column: str = "time") -> float:
    """Return UTC seconds of ISO 8601, or of seconds or milliseconds since 1970; ``ValueError`` names the column."""
    try:
        moment = decimal(text)
    except ValueError:
        return utc_s(text, column)
    if MILLISECONDS[0] <= moment < MILLISECONDS[1]:
        return moment / 1_000
    if not abs(moment) < MILLISECONDS[0] / 10:
        raise ValueError(f"{column} is a number of neither seconds nor milliseconds")
    return moment


def date_s(text: str, column: str = "time") -> float:
    """Return a time as ``moment_s``, but of no number too small for a date; ``ValueError`` names its column."""
    found = moment_s(text, column)
    if found < LEAST_SECONDS and _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{column} is a number of neither seconds nor milliseconds since 1970")
    return found


def has_zone(text: str) -> bool:
    """Return whether a time states its zone; a number of seconds is UTC."""
    return re.search(r"[+-]\d\d:?\d\d$|[Zz]$|^[\d.]+$", text.strip()) is not None


def in_unit(row: Row, name: str, units: Mapping[str, float]) -> float:
    """Return a quantity whose column name ends with its unit; NaN if no such column has a value.

    Args:
        name: The column's name without its unit.
        units: By suffix, the size of each unit in that of the result.

    Raises:
        ValueError: The cell is not a number; the message names the column.
    """
    for unit, size in units.items():
        if (cell := row.get(column := f"{name}_{unit}", "")).strip():
            return number(cell, column) * size
    return math.nan
