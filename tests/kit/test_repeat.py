"""Background loops continue after a failure and end when they are cancelled."""

from __future__ import annotations

import asyncio

from services.kit.repeating import repeat
from services.kit.tasks import end_tasks


async def test_a_turn_that_fails_is_left_to_the_next() -> None:
    turns: list[int] = []
    done = asyncio.Event()

    async def turn() -> None:
        turns.append(len(turns))
        if len(turns) == 3:
            done.set()
        raise OSError("the database is away")

    loop = asyncio.create_task(repeat(turn, 0.001, failed="turn.failed"))
    await asyncio.wait_for(done.wait(), 30)
    await end_tasks([loop])
    assert loop.cancelled()


async def test_a_turn_is_cut_off_by_its_end() -> None:
    began = asyncio.Event()

    async def turn() -> None:
        began.set()
        await asyncio.Event().wait()

    loop = asyncio.create_task(repeat(turn, 0.001, failed="turn.failed", traceback=True))
    await asyncio.wait_for(began.wait(), 30)
    await end_tasks([loop])
    assert loop.cancelled()
