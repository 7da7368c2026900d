"""Ask processes whether they are alive, and what they lack.

Each answers from its own event loop, or not at all. One that answers is left alone, however little it can do: what it
lacks, such as its database, comes back without a restart.
"""

import asyncio
import contextlib
import json
import ssl
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.kit.tls import FollowedContext, Tls

Address = Path | tuple[str, int]  #: Where a process listens: its socket, or host and port

_MOST_BYTES = 65_536
_READY_WITHIN_S = 5.0


class Probe:
    """Asks one process; the caller limits the time of `answer`."""

    async def answer(self) -> None:
        """Return once the process has answered, whatever it lacks; ``OSError`` if it does not listen."""
        await self.lacks()

    async def lacks(self) -> str:
        """Return what a process that answers is missing; empty if nothing is, as of a worker that waits itself."""
        return ""

    async def is_ready(self) -> bool:
        """Return whether the process works, if only in part; False if it does not say so within two seconds."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(2):
                return await self._works()
        return False

    async def _works(self) -> bool:
        return not await self.lacks()


class HttpProbe(Probe):
    """Asks a service: `/healthz` is answered by its event loop alone, `/readyz` checks what it depends on."""

    def __init__(self, address: Address, tls: Tls | None = None) -> None:
        self._address = address
        made = tls.client() if tls and tls.certificate else None
        self._context = FollowedContext(tls, made) if tls and made else None

    async def answer(self) -> None:
        await self._get("/healthz")

    async def lacks(self) -> str:
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                status, body = await self._get("/readyz")
        except TimeoutError:  # it waits for something else
            return f"does not say within {_READY_WITHIN_S:.0f} s whether it is ready"
        return "" if status == 200 else str(_document(body).get("detail", "")) or f"not ready (HTTP {status})"

    async def _works(self) -> bool:
        status, body = await self._get("/readyz")
        return status == 200 or _document(body).get("status") == "degraded"

    async def _get(self, path: str) -> tuple[int, bytes]:
        host = "localhost" if isinstance(self._address, Path) else self._address[0]
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        found = await exchange(self._address, request, lambda _: False, self._context and self._context.now())
        head, _, body = found.partition(b"\r\n\r\n")
        words = head.split(maxsplit=2)
        if len(words) < 2 or not words[1].isdigit():
            raise ConnectionError("this is not HTTP")
        return int(words[1]), body


class PostgresProbe(Probe):
    """Asks a PostgreSQL server on this machine for a session, up to the point where it wants a password."""

    def __init__(self, address: Address, user: str, database: str) -> None:
        self._address = address
        parameters = f"user\0{user}\0database\0{database}\0\0".encode()
        self._hello = struct.pack("!ii", 8 + len(parameters), 3 << 16) + parameters

    async def lacks(self) -> str:
        answer = await exchange(self._address, self._hello, lambda so_far: so_far[:1] == b"R")
        if answer[:1] == b"R":
            return ""
        fields = {field[:1]: field[1:].decode(errors="replace") for field in answer[5:].split(b"\0") if field}
        return fields.get(b"M", "it refuses sessions")


class ValkeyProbe(Probe):
    """Sends a PING to a Valkey server."""

    def __init__(self, address: Address, password: str) -> None:
        self._address = address
        self._password = password

    async def lacks(self) -> str:
        lines = await valkey_lines(self._address, self._password, ["PING"])
        return "" if lines == ["+OK", "+PONG"] else lines[-1].lstrip("-")


async def valkey_lines(address: Address, password: str, commands: Sequence[str]) -> list[str]:
    """Return Valkey's answers to a password and to commands, a line each; ``OSError`` if it does not listen."""
    words = [f"AUTH {password}", *commands]
    request = "".join(f"{word}\r\n" for word in words).encode()
    answer = await exchange(address, request, lambda so_far: so_far.count(b"\r\n") >= len(words))
    return answer.decode(errors="replace").splitlines()


class PulseProbe(Probe):
    """Waits until a process without a port, such as a Celery worker, has touched its file again.

    It looks for a change of the file's time and does not use the clock, which may be set.
    """

    def __init__(self, path: Path, look_every_s: float = 0.25) -> None:
        self._path = path
        self._look_every_s = look_every_s
        self._seen_ns = 0
        self._seen_ns = self._touched_ns()

    async def answer(self) -> None:
        while (found_ns := self._touched_ns()) == self._seen_ns:  # noqa: ASYNC110, the file is another process's
            await asyncio.sleep(self._look_every_s)
        self._seen_ns = found_ns

    def _touched_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return self._seen_ns


async def exchange(
    address: Address, request: bytes, is_enough: Callable[[bytes], bool], context: ssl.SSLContext | None = None
) -> bytes:
    """Return a process's answer, complete or up to the connection's end; ``OSError`` if there is none at all."""
    if isinstance(address, Path):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
    try:
        writer.write(request)
        answer = b""
        while len(answer) < _MOST_BYTES and not is_enough(answer) and (part := await reader.read(4_096)):
            answer += part
    finally:
        writer.close()
    if not answer:
        raise ConnectionError("it closed the connection without an answer")
    return answer


def _document(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(body), dict):
            return found
    return {}
