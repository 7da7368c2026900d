"""Whether there is anything to do; while there is not, loops wait and query nothing else."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

LOOK_S = 5.0  #: How often to look whether another process has made the first thing to do


class Presence:
    """Lets loops run while there is something for them, such as a pool."""

    def __init__(self, is_any: Callable[[], Awaitable[bool]]) -> None:
        """Take the query that tells whether there is anything."""
        self.written = asyncio.Event()  #: Set when this process has written something
        self._ask = is_any
        self._asking = asyncio.Lock()
        self._is_any = False
        self._ask_at_s = 0.0

    async def wait(self) -> None:
        """Wait until there is something; return at once if there was a moment ago."""
        while not await self._is_there():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._ask_at_s - _now_s(), 0.0)):
                    await self.written.wait()

    async def _is_there(self) -> bool:
        async with self._asking:
            if _now_s() >= self._ask_at_s or (self.written.is_set() and not self._is_any):
                self.written.clear()
                self._is_any = await self._ask()
                self._ask_at_s = _now_s() + LOOK_S
            return self._is_any


def _now_s() -> float:
    return asyncio.get_running_loop().time()
