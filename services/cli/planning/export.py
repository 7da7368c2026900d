"""``wattshift export``: the jobs a live cluster ran, as a file that ``simulate training`` replays."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import errors, instant
from services.cli.reports.ledger_lines import arrow_types
from services.cli.values import made, utc_time
from services.contracts.reports import PastJob
from services.kit.text import write_row

COLUMNS = tuple(PastJob.model_fields)
TIMES = ("submitted_at", "started_at", "ended_at")

Row = dict[str, Any]
Write = Callable[[Sequence[Row]], None]


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    out: Annotated[str, typer.Option(help="A file, .csv or .parquet; - is standard output, as CSV.")],
    start: Annotated[str | None, typer.Option(help="Only jobs submitted at or after this time: ISO 8601, UTC.")] = None,
    end: Annotated[str | None, typer.Option(help="Only jobs submitted before this time.")] = None,
    tenant: Annotated[str | None, typer.Option(help="For operators: only this tenant's jobs.")] = None,
) -> None:
    """Write past jobs, as they ran, to a file that `simulate training --jobs FILE --format wattshift` replays."""
    period = {"start": utc_time(start, "--start"), "end": utc_time(end, "--end"), "tenant": tenant}
    gateway = Gateway()
    count, unfinished = 0, 0
    with errors.status("exporting") as status, _sink(out) as write:
        for page in gateway.in_pages("/v1/reports/history", **period):
            write(page)
            count += len(page)
            unfinished += sum(row["ended_at"] is None for row in page)
            status.update(f"{count} jobs")
    still = f"; {unfinished} have not ended yet; a replay leaves them out" if unfinished else ""
    errors.print(f"{count} jobs{'' if out == '-' else f' in {out}'}{still}")


@contextmanager
def _sink(out: str) -> Iterator[Write]:
    """Yield a function that writes rows; a file appears only once it is complete."""
    if out == "-":
        yield _csv(sys.stdout)
        return
    path = Path(out)
    if path.suffix not in (".csv", ".parquet"):
        raise CliError(f"{out} ends in neither .csv nor .parquet", EXIT_USAGE)
    with made(path) as part:
        if path.suffix == ".csv":
            with part.open("w", encoding="utf-8", newline="") as file:
                yield _csv(file)
        else:
            with _parquet(part) as write:
                yield write


def _csv(file: IO[str]) -> Write:
    write_row(file, COLUMNS)

    def write(rows: Sequence[Row]) -> None:
        for row in rows:
            write_row(file, (row.get(column) for column in COLUMNS))

    return write


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    import pyarrow  # here: it takes a third of a second
    from pyarrow import parquet

    schema = pyarrow.schema(list(arrow_types(PastJob).items()))
    with parquet.ParquetWriter(path, schema) as writer:

        def write(rows: Sequence[Row]) -> None:
            timed = [{**row, **{name: instant(row[name]) for name in TIMES}} for row in rows]
            writer.write_table(pyarrow.Table.from_pylist(timed, schema=schema))

        yield write
