"""Tasks that end reliably. The command line imports this without any extra."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when they have ended.

    Cancellation is repeated until it takes effect: redis-py was seen to swallow one while connecting (about one in a
    hundred shutdowns right after a first command), and waiting for the task would then never end. It calls
    ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that comes with its result; our own code does not
    (ruff's TID251 in ``pyproject.toml``).

    A caller that is cancelled meanwhile first waits for their end: whoever ends it by this function, too, cancels it
    again for as long as they take, and what stands behind its ``finally`` would be left out.
    """
    pending = list(tasks)  # cancelled in this order, so that a simulation repeats
    is_cancelled = False
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=0.2)
        except asyncio.CancelledError:
            is_cancelled = True
        pending = [task for task in pending if not task.done()]
    if is_cancelled:
        raise asyncio.CancelledError


async def to_the_end(work: Awaitable[T]) -> T:
    """Return the result of work that must not be left half done: a caller cancelled meanwhile first waits for its end.

    A thread continues when nobody waits for it, and a lock held around it would be released before it has ended.
    """
    running = asyncio.ensure_future(work)
    is_cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if not running.cancelled():
            running.exception()  # nobody else will look at it
        raise asyncio.CancelledError
    return running.result()


async def merged(*sources: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield what any of ``sources`` yields, as it arrives, until all have ended."""

    async def next_of(source: AsyncIterator[T]) -> T:
        return await anext(source)

    waiting = {asyncio.create_task(next_of(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    found = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.create_task(next_of(source))] = source
                yield found
    finally:
        await end_tasks(waiting)
