"""Background tasks of a process: how they go on, and how they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from services.kit.logging import Log

log = Log(__name__)


async def repeat(
    work: Callable[[], Awaitable[object]], every_s: float, *, failed: str, traceback: bool = False
) -> None:
    """Do ``work`` again and again until cancelled, about so long apart: what fails is left to the next time.

    Args:
        work: One turn; cut off anywhere, it does no harm.
        every_s: Between the end of a turn and the next, give or take a fifth, so that replicas do not march in step.
        failed: What the log calls a turn that failed; mostly the database or the broker is away.
        traceback: Whether the log is to say where.
    """
    while True:
        try:
            await work()
        except Exception as error:
            if traceback:
                log.exception(failed)
            else:
                log.warning(failed, error=str(error) or type(error).__name__)
        await asyncio.sleep(every_s * random.uniform(0.8, 1.2))


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when they have ended.

    A cancellation is asked for again until it is heard: redis-py, while it connects, was seen to swallow one (about one
    in a hundred shutdowns right after a first command), and whoever then waits for the task waits for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
