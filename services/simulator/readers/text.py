"""Read text, gzipped or not, and the cells of a table one row at a time."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from services.kit.extras import missing_extra
from services.simulator.raw import TOO_LARGE, ReadReport, TraceFormatError

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
LONGEST_LINE = 2**24
"""Characters; a few kilobytes can unpack to gigabytes without the end of a line."""
Row = dict[str, str]


class _Lines(io.TextIOWrapper):
    """Text whose lines are read one by one, and none that would fill the memory."""

    def __next__(self) -> str:
        line = self.readline(LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        if len(line) > LONGEST_LINE:
            raise TraceFormatError(f"a line has more than {LONGEST_LINE} characters: it is no trace")
        return line


@contextmanager
def open_text(path: Path) -> Generator[IO[str], None, None]:
    """Open a file of UTF-8 text, unpacking gzip wherever its first bytes say so and leaving out a byte-order mark.

    A Parquet table is read as the CSV that it would be.

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
            with _Lines(binary, encoding="utf-8-sig", newline="") as text:  # pyright: ignore[reportArgumentType]
                yield text
    except FileNotFoundError as error:
        raise TraceFormatError(f"there is no file {path}") from error
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, csv.Error, EOFError, IsADirectoryError) as error:
        raise TraceFormatError(f"{path} is not readable text: {error}") from error


def _table_of(path: Path) -> io.StringIO:
    try:
        import pyarrow  # here: it takes a third of a second, and most files are text
        import pyarrow.csv
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise TraceFormatError(f"{path} is a Parquet file; {missing_extra(error) or error}") from error

    lines = io.BytesIO()
    try:
        pyarrow.csv.write_csv(pyarrow.parquet.read_table(path), lines)
    except pyarrow.ArrowException as error:
        raise TraceFormatError(f"{path} is not a readable Parquet table: {error}") from error
    return io.StringIO(lines.getvalue().decode())


def first_lines(path: Path, count: int = 50) -> list[str]:
    """Return the first lines of a file, without their ends."""
    with open_text(path) as text:
        return [line.rstrip("\r\n") for _, line in zip(range(count), text, strict=False)]


def header_of(lines: Sequence[str], delimiter: str = ",") -> tuple[str, ...]:
    """Return the cells of the first line that is not empty, trimmed; none for an empty file or an overlong cell."""
    for line in lines:
        if line.strip():
            try:
                return tuple(cell.strip() for cell in next(csv.reader([line], delimiter=delimiter)))
            except csv.Error:
                return ()
    return ()


def table(
    lines: Iterable[str], columns: Sequence[str], report: ReadReport, delimiter: str = ","
) -> Iterator[tuple[int, Row]]:
    """Yield line number and cells of each row of a table with a header; rows with too few or too many cells drop.

    Raises:
        TraceFormatError: the header lacks a column.
    """
    reader = csv.reader(lines, delimiter=delimiter)
    header: list[str] = []
    for cells in reader:
        if not header:
            header = [cell.strip() for cell in cells]
            missing = [column for column in columns if column not in header]
            if header and missing:
                raise TraceFormatError(f"{report.source} is not of format {report.format}: no column {missing[0]!r}")
            continue
        if not any(cells):
            continue
        report.rows += 1
        if len(cells) != len(header):
            report.drop(reader.line_num, f"{len(cells)} cells where the header has {len(header)}")
            continue
        yield reader.line_num, dict(zip(header, cells, strict=True))
    if not header:
        raise TraceFormatError(f"{report.source} is empty")


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
