"""A task that is cancelled ends, in whichever turn of the loop that comes: of commands, queries and requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from services.db.database import Database
from services.kit.redis import connect, wait_for
from tests.kit.test_http import a_peer

TURNS = 80


async def all_end(work: Callable[[], Awaitable[object]]) -> None:
    """Cancel work that is done again and again, after 0, 1, 2... turns of the loop."""

    over = asyncio.Event()

    async def until_over() -> None:
        while not over.is_set():
            await work()

    for turns in range(TURNS):
        task = asyncio.create_task(until_over())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        over.set()
        await asyncio.wait([task])
        assert task.cancelled(), f"it goes on after a cancellation in turn {turns}"
        over.clear()


@pytest.mark.parametrize("answers", ["at once", "when there is something"])
async def test_of_commands(redis_url: str, answers: str) -> None:
    async with connect(redis_url) as redis:
        wait_ms = None if answers == "at once" else 20
        await all_end(lambda: redis.xread({"nothing": "0-0"}, block=wait_ms))


async def test_of_queries(database_url: str) -> None:
    database = await Database.open(database_url, size=2)

    async def query() -> None:
        async with database.transaction() as connection:
            await connection.fetchval("SELECT 1")

    await all_end(query)
    await database.close()


async def test_of_requests() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="fine")

    async with a_peer(answer) as peer:
        await all_end(lambda: peer.request("GET", "/x"))


async def test_waiting_is_as_in_the_library() -> None:
    done = asyncio.get_running_loop().create_future()
    done.set_result("done")
    assert await wait_for(done, None) == await wait_for(done, 5) == await wait_for(done, 0) == "done"
    for timeout_s in (-1, 0, 0.01):
        sleeping = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            await wait_for(sleeping, timeout_s)
        assert sleeping.cancelled()
