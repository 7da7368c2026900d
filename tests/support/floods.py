"""Clients that hold places: headers without end, half heads, bodies that drip. They end by themselves.

`python -m tests.support.floods SECONDS ADDRESS...`, where an address is `HOST:PORT` or the path of a Unix socket. Run
by root it becomes another user, as a job is: on loopback, users of the machine are told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from dataclasses import dataclass, field

BODY = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n{"
ENDLESS = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-endless: "
HALF = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-half: " + b"h" * 8_000
AGAIN_S = 10.0
"""After which a client whose connection was closed makes another."""
SIZES = {"endless": 50, "half": 5_000, "body": 200}


@dataclass
class Flood:
    """What one address is sent.

    Attributes:
        path: Where bodies go.
        sizes: Connections of each kind.
        opened: How many were made so far.
    """

    address: str
    seconds: float
    path: str = "/v1/jobs"
    sizes: dict[str, int] = field(default_factory=lambda: dict(SIZES))
    opened: int = 0

    async def run(self) -> None:
        """Hold as many places as the server lets, until the time is over or `seconds` is set to 0."""
        self._began_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._client(kind) for kind, size in self.sizes.items() for _ in range(size)))

    @property
    def is_whole(self) -> bool:
        """Whether each client has had a connection."""
        return self.opened >= sum(self.sizes.values())

    def _left_s(self) -> float:
        return self._began_s + self.seconds - asyncio.get_running_loop().time()

    async def _client(self, kind: str) -> None:
        while self._left_s() > 0:
            with contextlib.suppress(OSError):
                await self._connection(kind)
            for _ in range(int(AGAIN_S)):
                if self._left_s() > 0:
                    await asyncio.sleep(1)

    async def _connection(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        if self.address.startswith("/"):
            transport, client = await loop.create_unix_connection(_Client, self.address)
        else:
            host, _, port = self.address.rpartition(":")
            transport, client = await loop.create_connection(_Client, host, int(port))
        self.opened += 1
        begin = {"endless": ENDLESS, "half": HALF, "body": BODY % self.path.encode()}[kind]
        more, pause_s = {"endless": (b"a" * 65_536, 0.02), "half": (b"", 1.0), "body": (b" ", 0.5)}[kind]
        try:
            transport.write(begin)
            while self._left_s() > 0 and not client.lost.is_set():
                if more and not transport.get_write_buffer_size():
                    transport.write(more)
                try:
                    async with asyncio.timeout(pause_s):
                        await client.lost.wait()
                except TimeoutError:
                    pass
        finally:
            transport.abort()


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


def files_for(connections: int) -> bool:
    """Let this process open as many files, and some; return whether it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 500
    if soft != resource.RLIM_INFINITY and soft < wanted <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return hard == resource.RLIM_INFINITY or wanted <= hard


async def main(seconds: float, addresses: list[str]) -> None:
    """Send a flood to each address at once."""
    files_for(sum(SIZES.values()) * len(addresses))
    if os.geteuid() == 0:
        "x".encode("idna")  # read before its folder is closed to this process
        os.setuid(65_534)
    floods = [Flood(address, seconds) for address in addresses]
    await asyncio.gather(*(flood.run() for flood in floods))
    print(*(flood.opened for flood in floods), flush=True)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2:]))
