"""Background loops continue after a failure and end when they are cancelled."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from services.kit import repeating
from services.kit.repeating import each_apart, pauses, repeat
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


def test_pauses_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating.random, "uniform", lambda low, high: high)
    assert [*islice(pauses(0.5), 8)] == [0.5, 1, 2, 4, 8, 16, 16, 16]


async def test_an_item_that_fails_keeps_no_other_from_its_turn_and_raises_at_the_end() -> None:
    done: list[int] = []

    async def work(item: int) -> None:
        done.append(item)
        if item in (1, 3):
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^1$"):
        await each_apart([0, 1, 2, 3, 4], work, failed="item.failed")
    assert done == [0, 1, 2, 3, 4]
    await each_apart([0, 2], work, failed="item.failed")
