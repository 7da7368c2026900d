"""Commands in running jobs: what they print, and what they are sent while they run."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from wattshift.errors import ApiError, UnreachableError, WattshiftError

PIECE_BYTES = 192 * 1024
MOST_WAITING_BYTES = 1024 * 1024
BEAT_S = 8.0
"""How often a client with nothing to send says that it is there; after 30 seconds without a word it counts as gone."""

LONGEST_OUTPUT_BYTES = 64 * 1024 * 1024
_PAUSE_S = 0.5


@dataclass(frozen=True)
class ExecResult:
    """How a command in a job ended.

    Attributes:
        exit_code: Its exit status; 128 plus the number of the signal that ended it.
        stdout: What it wrote to standard output.
        stderr: What it wrote to standard error.
        detail: Why it ended, if not by itself.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    detail: str = ""

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


@dataclass(frozen=True)
class SessionEvent:
    """One event of a command.

    Attributes:
        type: ``started``, ``output``, ``notice`` or ``exit``.
        session_id: Of ``started``: where input goes.
        stream: Of ``output``: ``stdout`` or ``stderr``.
        data: Of ``output``: the bytes.
        code: Of ``exit``: the exit status.
        detail: A notice, or why it ended.
    """

    type: str
    session_id: str = ""
    stream: str = ""
    data: bytes = b""
    code: int = 0
    detail: str = ""


def read_event(line: str) -> SessionEvent | None:
    """Return the event of one line of a session's stream, if the line has one."""
    if not line.startswith("data: "):
        return None
    found: dict[str, Any] = json.loads(line[6:])
    return SessionEvent(
        found["type"],
        found.get("session_id", ""),
        found.get("stream", ""),
        base64.b64decode(found.get("data", "")),
        found.get("code", 0),
        found.get("detail", ""),
    )


def exec_body(command: Sequence[str], rank: int | None, node: str | None, *, stdin: bool) -> dict[str, Any]:
    """Return the request for a command without a terminal.

    Raises:
        TypeError: ``command`` is a single string.
    """
    if isinstance(command, str):
        raise TypeError(f"command is a list of program and arguments, not one text: {command!r}")
    place = {name: value for name, value in (("rank", rank), ("node", node)) if value is not None}
    return {"command": [str(word) for word in command], "stdin": stdin, **place}


class Collector:
    """Collects the events of a command into its result."""

    def __init__(self, most_bytes: int = LONGEST_OUTPUT_BYTES) -> None:
        self._left = most_bytes
        self._most = most_bytes
        self._output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._exit: SessionEvent | None = None

    def add(self, event: SessionEvent) -> None:
        """Add one event.

        Raises:
            WattshiftError: The output is longer than allowed.
        """
        if event.type == "output":
            self._left -= len(event.data)
            if self._left < 0:
                raise WattshiftError(f"the command wrote more than {self._most} bytes")
            self._output.setdefault(event.stream, []).append(event.data)
        elif event.type == "exit":
            self._exit = event

    def result(self) -> ExecResult:
        """Return the result.

        Raises:
            UnreachableError: The connection was lost before the command ended.
        """
        if self._exit is None:
            raise UnreachableError("the connection to the command was lost; it is ended")
        stdout, stderr = (b"".join(self._output[name]) for name in ("stdout", "stderr"))
        return ExecResult(self._exit.code, stdout, stderr, self._exit.detail)


class _Waiting:
    """What is waiting to be sent: bytes by their offset in standard input, the newest size, and signals."""

    def __init__(self, stdin: bytes) -> None:
        self.offset = 0
        self.data = bytearray(stdin)
        self.is_ended = bool(stdin)
        self.end_is_sent = False
        self.size: tuple[int, int] | None = None
        self.signals: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.data or self.size or self.signals or (self.is_ended and not self.end_is_sent))

    def body(self) -> dict[str, Any]:
        """Return the next request; empty if nothing is waiting."""
        piece = bytes(self.data[:PIECE_BYTES])
        body: dict[str, Any] = {"offset": self.offset}
        if piece:
            body["data"] = base64.b64encode(piece).decode()
        if self.is_ended and len(piece) == len(self.data):
            body["end"] = True
        if self.size is not None:
            body["size"] = {"rows": self.size[0], "columns": self.size[1]}
        if self.signals:
            body["signal"] = self.signals[0]
        return body

    def sent(self, body: dict[str, Any], offset: int) -> None:
        """Note how much of a request was taken."""
        taken = max(0, min(offset - self.offset, len(self.data)))
        del self.data[:taken]
        self.offset += taken
        if body.get("end") and not self.data:
            self.end_is_sent = True
        if self.size is not None and body.get("size") == {"rows": self.size[0], "columns": self.size[1]}:
            self.size = None
        if body.get("signal"):
            self.signals.pop(0)


def _is_passing(error: ApiError) -> bool:
    return error.status in (429, 503)


class Sender:
    """Sends input to a command from a thread of its own, so that its output can be read meanwhile."""

    def __init__(self, put: Callable[[dict[str, Any]], Any], stdin: bytes = b"") -> None:
        """Create a sender.

        Args:
            put: Sends one request and returns the answer.
            stdin: All of standard input, where it is known already.
        """
        self._put = put
        self._waiting = _Waiting(stdin)
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="exec-input", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def feed(self, data: bytes) -> None:
        """Append to standard input; wait while much of it has yet to be taken."""
        for start in range(0, len(data), PIECE_BYTES):
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._waiting.data) < MOST_WAITING_BYTES)
                self._waiting.data += data[start : start + PIECE_BYTES]
                self._changed.notify_all()

    def end(self) -> None:
        """End standard input."""
        with self._changed:
            self._waiting.is_ended = True
            self._changed.notify_all()

    def resize(self, rows: int, columns: int) -> None:
        """Tell the command the size of its terminal."""
        with self._changed:
            self._waiting.size = (rows, columns)
            self._changed.notify_all()

    def signal(self, name: str) -> None:
        """Send the command a signal, such as ``INT``."""
        with self._changed:
            self._waiting.signals.append(name)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._waiting), BEAT_S)
                if self._is_closed:
                    return
                body = self._waiting.body()
            try:
                offset = self._put(body)["offset"]
            except (ApiError, UnreachableError) as error:
                if isinstance(error, ApiError) and not _is_passing(error):
                    self.__exit__(None, None, None)  # it has ended, and its events say how
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._changed:
                self._waiting.sent(body, offset)
                self._changed.notify_all()


class AsyncSender:
    """Sends input to a command from a task of its own."""

    def __init__(self, put: Callable[[dict[str, Any]], Awaitable[Any]], stdin: bytes = b"") -> None:
        """Create a sender.

        Args:
            put: Sends one request and returns the answer.
            stdin: All of standard input.
        """
        self._put = put
        self._waiting = _Waiting(stdin)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                await asyncio.sleep(BEAT_S)
            body = self._waiting.body()
            try:
                answer = await self._put(body)
            except (ApiError, UnreachableError) as error:
                if isinstance(error, ApiError) and not _is_passing(error):
                    return
                await asyncio.sleep(_PAUSE_S)
                continue
            self._waiting.sent(body, answer["offset"])
