"""A hint that cannot be given is dropped, whatever the server says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.kit import redis
from services.kit.redis import connect, hint


@asynccontextmanager
async def a_server(answer: bytes) -> AsyncIterator[str]:
    """A server that answers the same to whatever it is asked; nothing, if that is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"redis://user:word@127.0.0.1:{port}/0"
    finally:
        server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b"*0\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"-ERR no\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("protocol", ["", "?protocol=3"])
async def test_whatever_the_server_says_a_hint_ends_quietly(
    answer: bytes, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "HINT_WITHIN_S", 0.05 if answer == b"" else 5.0)
    async with a_server(answer) as url:
        client = connect(url + protocol)
        await hint(client, "node", node="n1")
        await client.aclose()


async def test_a_hint_that_fails_for_a_fault_of_ours_ends_quietly_too() -> None:
    class Broken:
        async def xadd(self, *_: object, **__: object) -> None:
            raise AttributeError("'bytes' object has no attribute 'get'")

    await hint(Broken(), "node", node="n1")  # pyright: ignore[reportArgumentType]
