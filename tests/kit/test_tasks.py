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
