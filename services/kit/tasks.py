"""Background tasks of a process: how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


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
