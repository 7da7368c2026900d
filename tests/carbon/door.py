"""A way to the database that a test can shut: to whoever comes this way the server is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Door:
    """Passes connections on to a database server while it is open."""

    def __init__(self, database_url: str) -> None:
        parts = urlsplit(database_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 5432
        self._parts = parts
        self._server: asyncio.Server | None = None
        self._own_port = 0
        self._ways: set[asyncio.Task[None]] = set()

    @property
    def database_url(self) -> str:
        """The database's address by way of this door."""
        user = self._parts.netloc.rpartition("@")[0]
        return self._parts._replace(netloc=f"{user}@127.0.0.1:{self._own_port}").geturl()

    async def open(self) -> None:
        """Let connections through, on the same port as before."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._own_port)
        self._own_port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Refuse new connections and cut those there are."""
        if self._server:
            self._server.close()
        for way in list(self._ways):
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
        ways = [asyncio.create_task(_copy(reader, onward_writer)), asyncio.create_task(_copy(onward_reader, writer))]
        self._ways.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._ways.difference_update(ways)
        writer.close()
        onward_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while content := await reader.read(65_536):
        writer.write(content)
        await writer.drain()


@asynccontextmanager
async def door_to(database_url: str) -> AsyncIterator[Door]:
    """Yield an open door."""
    door = Door(database_url)
    await door.open()
    try:
        yield door
    finally:
        await door.shut()
