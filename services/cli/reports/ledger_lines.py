"""`wattshift report --lines`: every line of the ledger in a period, written as it arrives."""

import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, get_args

from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import errors
from services.cli.values import made
from services.contracts.reports import LedgerLine
from services.contracts.schema import Message


def save_lines(gateway: Gateway, out: str, period: dict[str, str | None], seals: bool = False) -> None:
    """Write the lines to a file in the format its name ends in, or to the output as CSV; with ``seals``, those too.

    Raises:
        CliError: The file cannot be written, or its name has another ending. It appears only once it is complete.
    """
    path = Path(out)
    if seals:
        period = {**period, "seals": "true"}
        if path.suffix == ".parquet":
            raise CliError(f"--lines {out} --seals: must end in .csv or .jsonl, or be -", EXIT_USAGE)
    if out == "-":
        return _fetch(gateway, "csv", period, sys.stdout.buffer)
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise CliError(f"--lines {out}: must end in .csv, .jsonl or .parquet, or be -", EXIT_USAGE)
    if path.suffix == ".parquet":
        import pyarrow  # noqa: F401  # before anything is asked for: it may not be installed
    with made(path) as part, part.open("wb") as file:
        if path.suffix == ".parquet":
            with TemporaryFile(dir=path.parent) as text:
                _fetch(gateway, "csv", period, text)
                text.seek(0)
                _write_parquet(text, file)
        else:
            _fetch(gateway, path.suffix[1:], period, file)
    errors.print(f"wrote {out}")


def _fetch(gateway: Gateway, form: str, period: dict[str, str | None], file: IO[bytes]) -> None:
    given = {name: value for name, value in period.items() if value is not None}
    with gateway.stream("/v1/reports/lines", format=form, **given) as answer:
        for piece in answer.iter_bytes():
            file.write(piece)


def _write_parquet(text: IO[bytes], file: IO[bytes]) -> None:
    from pyarrow import csv, parquet, schema

    types = arrow_types(LedgerLine)
    convert = csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False)
    read = csv.ReadOptions(use_threads=False, block_size=8 << 20)
    with parquet.ParquetWriter(file, schema(list(types.items()))) as writer:
        for batch in csv.open_csv(text, read, convert_options=convert):
            writer.write_batch(batch)


def arrow_types(model: type[Message]) -> dict[str, Any]:
    """Return a message's fields as columns, and their types in Parquet."""
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

    return {name: of(field.annotation) for name, field in model.model_fields.items()}
