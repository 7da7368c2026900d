"""`wattshift report --lines`: every line of the ledger in a period, written as it arrives."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, get_args

import httpx

from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import errors
from services.contracts.reports import LedgerLine
from services.kit.files import whole


def save_lines(gateway: Gateway, out: str, period: dict[str, str | None], seals: bool = False) -> None:
    """Write the lines to a file in the format its name ends in, or to the output as CSV; with ``seals``, those too.

    Raises:
        CliError: The file cannot be written, or its name has another ending. It appears only once it is complete.
    """
    if seals:
        period = {**period, "seals": "true"}
        if out.endswith(".parquet"):
            raise CliError(f"--lines {out} --seals: must end in .csv or .jsonl, or be -", EXIT_USAGE)
    if out == "-":
        _fetch(gateway, "csv", period, lambda answer: _copy(answer, sys.stdout.buffer))
        return
    path = Path(out)
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise CliError(f"--lines {out}: must end in .csv, .jsonl or .parquet, or be -", EXIT_USAGE)
    if path.suffix == ".parquet":
        import pyarrow  # noqa: F401  # before anything is asked for: it may not be installed
    try:
        with whole(path) as part, part.open("wb") as file:
            if path.suffix == ".parquet":
                _fetch(gateway, "csv", period, lambda answer: _write_parquet(answer, file))
            else:
                _fetch(gateway, path.suffix[1:], period, lambda answer: _copy(answer, file))
    except OSError as error:
        raise CliError(f"cannot write {out}: {error.strerror or error}", EXIT_USAGE) from error
    errors.print(f"wrote {out}")


def _fetch(gateway: Gateway, form: str, period: dict[str, str | None], take: Callable[[httpx.Response], None]) -> None:
    given = {name: value for name, value in period.items() if value is not None}
    with gateway.stream("/v1/reports/lines", format=form, **given) as answer:
        take(answer)


def _copy(answer: httpx.Response, file: IO[bytes]) -> None:
    for piece in answer.iter_bytes():
        file.write(piece)


def _write_parquet(answer: httpx.Response, file: IO[bytes]) -> None:
    from pyarrow import csv, parquet, schema

    types = arrow_types()
    convert = csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False)
    read = csv.ReadOptions(use_threads=False, block_size=8 << 20)
    text = io.BufferedReader(_Pieces(answer.iter_bytes()), 1 << 20)
    with parquet.ParquetWriter(file, schema(list(types.items()))) as writer:
        for batch in csv.open_csv(text, read, convert_options=convert):
            writer.write_batch(batch)


def arrow_types() -> dict[str, Any]:
    """Return the columns of lines and their types in Parquet."""
    import pyarrow

    def of(annotation: Any) -> Any:
        kinds = (annotation, *get_args(annotation))
        if bool in kinds:
            return pyarrow.bool_()
        if float in kinds:
            return pyarrow.float64()
        if int in kinds:
            return pyarrow.int64()
        return pyarrow.timestamp("us", tz="UTC") if "AwareDatetime" in str(annotation) else pyarrow.string()

    return {name: of(field.annotation) for name, field in LedgerLine.model_fields.items()}


class _Pieces(io.RawIOBase):
    """Bytes as they arrive, as a file to read from beginning to end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or a part of it."""
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = piece
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
