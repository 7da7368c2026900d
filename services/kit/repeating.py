"""Work that a process repeats in the background until it is cancelled."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")

When = Callable[[], Awaitable[object]]

LONGEST_GROWTH = 32


def pauses(first_s: float) -> Iterator[float]:
    """Yield how long to wait before each further attempt at the same work: longer and longer, up to a bound."""
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.8, 1)
        pause_s = min(2 * pause_s, LONGEST_GROWTH * first_s)


async def repeat(
    work: Callable[[], Awaitable[object]],
    every_s: float,
    *,
    failed: str,
    traceback: bool = False,
    once: bool = False,
    when: When | None = None,
    spread: float = 0.2,
) -> None:
    """Call ``work`` repeatedly until cancelled; a call that fails is logged, and the next one tries again.

    Args:
        work: One call, which may be cancelled at any point.
        every_s: Between the end of a call and the next, give or take ``spread``, so that replicas do not run in step.
        failed: Event name for the log when a call fails, usually because the database or the broker is unreachable.
        traceback: Whether to log the traceback too.
        once: Whether only the first of several failures in a row is logged.
        when: Awaited before each call, for work that may have nothing to do for a long time.
    """
    is_failing = False
    while True:
        try:
            if when is not None:
                await when()
            await work()
            is_failing = False
        except Exception as error:
            if traceback:
                log.exception(failed)
            elif not (once and is_failing):
                log.warning(failed, error=str(error) or type(error).__name__)
            is_failing = True
        await asyncio.sleep(every_s * random.uniform(1 - spread, 1 + spread))


async def each_apart(
    items: Iterable[T], work: Callable[[T], Awaitable[object]], *, failed: str, name: Callable[[T], str] = str
) -> None:
    """Do the work on each item, one after the other; one that fails keeps no other from its turn.

    Args:
        failed: Event name for the log when an item fails, with its ``name``.

    Raises:
        Exception: The first failure, once all have had their turn.
    """
    failures: list[Exception] = []
    for item in items:
        try:
            await work(item)
        except Exception as error:
            log.warning(failed, of=name(item), error=str(error) or type(error).__name__)
            failures.append(error)
    if failures:
        raise failures[0]
