"""A TCP connection between two processes that can be cut, stalled, slowed down, or lose its answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, Self

Trouble = Literal["cut", "stall", "slow", "unanswered"]
"""``cut``: connections end, new ones at once. ``stall``: bytes wait until it is over. ``slow``: every piece is late.
``unanswered``: requests arrive, answers do not; such a connection ends with the trouble."""

TROUBLES: tuple[Trouble, ...] = ("cut", "stall", "slow", "unanswered")
LATE_S = 0.1
_PIECE = 65_536


class Link:
    """Listens on a port of its own and passes everything on to ``target``."""

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self._target = (host, port)
        self._troubles: list[Trouble] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._unanswered: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        self._flows.set()
        _reset(self._open)
        await asyncio.gather(*self._passing)

    def begin(self, trouble: Trouble) -> None:
        """Have a trouble from now on; several may overlap."""
        self._troubles.append(trouble)
        if trouble == "cut":
            _reset(self._open)
        elif trouble == "stall":
            self._flows.clear()

    def end(self, trouble: Trouble) -> None:
        """Have one trouble less."""
        self._troubles.remove(trouble)
        if "stall" not in self._troubles:
            self._flows.set()
        if "unanswered" not in self._troubles:
            _reset(self._unanswered)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        if "cut" in self._troubles:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._open |= both
        try:
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer, are_answers=True))
        except OSError:
            _reset(both)
        finally:
            self._open -= both
            self._unanswered -= both
            for each in both:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, are_answers: bool = False
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._flows.wait()
            if "slow" in self._troubles:
                await asyncio.sleep(LATE_S)
            if are_answers and "unanswered" in self._troubles:
                self._unanswered.add(writer)
            if writer not in self._unanswered:
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def _reset(writers: set[asyncio.StreamWriter]) -> None:
    for writer in set(writers):
        writer.transport.abort()
