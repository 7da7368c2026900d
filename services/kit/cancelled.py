"""Python 3.11's ``asyncio.wait_for`` loses a cancellation that comes in the turn in which what it awaits is done.

redis-py sends each command by it, so that a task cancelled just then went on: a stop that waited for it never ended.
Python 3.12 has no such fault, and makes no task for each call; this is its way.
"""

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any

_of_the_library = asyncio.wait_for  # noqa: TID251


async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:
    """Return what is awaited, as ``asyncio.wait_for``.

    Raises:
        TimeoutError: It took longer than ``timeout`` seconds, and was cancelled.
    """
    if timeout is not None and timeout <= 0:
        return await _of_the_library(fut, timeout)
    async with asyncio.timeout(timeout):
        return await fut


def keep_cancellations() -> None:
    """Have libraries that wait by ``asyncio.wait_for`` keep them; nothing to do from Python 3.12 on."""
    if sys.version_info < (3, 12):
        asyncio.wait_for = wait_for  # noqa: TID251
