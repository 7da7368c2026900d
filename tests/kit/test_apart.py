"""Functions that run in a process of their own."""

from __future__ import annotations

import asyncio
import math
import os
import sys

import psutil
import pytest

from services.core.domain.errors import DomainError
from services.kit.apart import Apart


def loaded(name: str) -> tuple[int, bool]:
    __import__(name)
    print("what a library prints is no answer")
    return os.getpid(), name in sys.modules


def refused(word: str) -> None:
    raise DomainError(f"no {word}")


def ended() -> None:
    os._exit(1)


def slow() -> int:
    import time

    time.sleep(60)
    return 1


async def test_calls_share_one_process_which_then_ends() -> None:
    async with Apart() as apart:
        first, is_loaded = await apart.call(loaded, "this")
        with pytest.raises(DomainError, match="no past"):
            await apart.call(refused, "past")
        assert await apart.call(math.factorial, 4_000) == math.factorial(4_000)
        second, _ = await apart.call(loaded, "this")
        assert (is_loaded, first) == (True, second)
        assert first != os.getpid()
    assert not psutil.pid_exists(first)
    assert "this" not in sys.modules


async def test_nobody_waits_for_one_that_was_killed() -> None:
    async with Apart() as apart:
        with pytest.raises(ChildProcessError, match="of ended has ended"):
            await apart.call(ended)


async def test_who_leaves_takes_it_along() -> None:
    async def leave() -> None:
        async with Apart() as apart:
            started.set_result((await apart.call(loaded, "this"))[0])
            await apart.call(slow)

    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(leave())
    pid = await started
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not psutil.pid_exists(pid)


async def test_without_a_call_there_is_none() -> None:
    before = len(psutil.Process().children())
    async with Apart():
        assert len(psutil.Process().children()) == before
