"""Background tasks end, even those that do not listen at first."""

import asyncio

import pytest

from services.kit.tasks import end_tasks, to_the_end


async def _stubborn(times: int) -> None:
    """Swallow the first cancellations, as a library may do while it connects."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


async def test_tasks_end_however_often_they_must_be_asked() -> None:
    tasks = [asyncio.create_task(_stubborn(times)) for times in (0, 1, 3)]
    finished = asyncio.create_task(asyncio.sleep(0))
    await finished
    async with asyncio.timeout(10):
        await asyncio.sleep(0)
        await end_tasks([*tasks, finished])
    assert all(task.cancelled() for task in tasks)


@pytest.mark.parametrize("depth", [1, 3])
async def test_who_is_ended_while_it_ends_others_ends_them_and_what_it_holds(depth: int) -> None:
    given_back, made = list[bool](), list[asyncio.Task[None]]()

    async def holds(level: int) -> None:
        below = asyncio.create_task(_stubborn(3) if level == 1 else holds(level - 1))
        made.append(below)
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await end_tasks([below])
            finally:
                given_back.append(below.done())

    task = asyncio.create_task(holds(depth))
    async with asyncio.timeout(30):
        for _ in range(2 * depth):
            await asyncio.sleep(0)
        await end_tasks([task])
        had_ended = [each.done() for each in made]
        await end_tasks(made)
    assert given_back == had_ended == [True] * depth
    assert task.cancelled()


async def test_a_task_that_failed_has_ended() -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    await end_tasks([task])
    assert isinstance(task.exception(), ValueError)


async def test_nothing_to_end() -> None:
    await end_tasks([])


async def test_work_that_is_not_left_half_done_ends_before_whoever_was_cancelled_does() -> None:
    steps: list[str] = []
    go_on = asyncio.Event()

    async def work() -> str:
        await go_on.wait()
        steps.append("done")
        return "result"

    async def wait() -> None:
        try:
            await to_the_end(work())
        finally:
            steps.append("left")

    waiting = asyncio.create_task(wait())
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert steps == []
    go_on.set()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert steps == ["done", "left"]
    assert await to_the_end(work()) == "result"


async def test_what_such_work_fails_with_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await to_the_end(fail())
