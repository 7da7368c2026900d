"""Failures in the decision loop: what fails over one row or in one step stops neither the others nor rounds."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import asyncpg

from services.core.domain.errors import WattshiftError
from services.db.database import CONNECTION_ERRORS, refuses
from services.kit.logging import Log
from services.scheduler.counters import FAILURES

log = Log(__name__)
Row = TypeVar("Row")

PLAIN = "fifo"  #: The policy of a round that the one in force cannot hold, whatever waits: nobody waits for its mending


def passes_over(error: Exception) -> bool:
    """Whether a failure is one of a database that is away, busy or full."""
    answers = (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS)
    return isinstance(error, answers) and not refuses(error)


def note_failure(error: Exception, event: str = "turn.failed", **names: str) -> None:
    """Count and log a failure, which is being handled."""
    FAILURES.inc()
    if isinstance(error, WattshiftError):
        log.error("round.failed", error=str(error), kind=type(error).__name__, **names)
    else:
        log.exception(event, **names)


@contextmanager
def contained(event: str, **names: str) -> Generator[None]:
    """Count and log what fails in the block, and go on; what passes over is raised."""
    try:
        yield
    except Exception as error:
        if passes_over(error):
            raise
        note_failure(error, event, **names)


async def in_parts(rows: Sequence[Row], work: Callable[[Sequence[Row]], Awaitable[object]], event: str) -> None:
    """Do work with all rows at once, or if that fails with each half of them: the rows that it fails over are left."""
    try:
        await work(rows)
    except Exception as error:
        if passes_over(error):
            raise
        if len(rows) == 1:
            note_failure(error, event, row=str(rows[0]))
            return
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            await in_parts(part, work, event)
