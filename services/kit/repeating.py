"""Work of a process that is repeated in the background until it is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from services.kit.logging import Log

log = Log(__name__)


async def repeat(
    work: Callable[[], Awaitable[object]], every_s: float, *, failed: str, traceback: bool = False
) -> None:
    """Call ``work`` repeatedly until cancelled; a call that fails is logged, and the next one tries again.

    Args:
        work: One call, which may be cancelled at any point.
        every_s: Between the end of a call and the next, give or take 20 %, so that replicas do not run in step.
        failed: Event name for the log when a call fails, usually because the database or the broker is unreachable.
        traceback: Whether to log the traceback too.
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
