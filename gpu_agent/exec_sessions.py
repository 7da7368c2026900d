"""The agent's side of exec sessions: it passes bytes between a client and a command beside a rank.

The command is a child of the rank's shim (``exec_shim``), so that it ends with the rank, its lease and its time limit.
The agent holds the other ends of its standard streams. A command's output is read no faster than its client takes it,
and input from the client is buffered only in the command's pipe. A session ends when its client leaves or is silent.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu_agent import containers, exec_shim
from gpu_agent.containers import Engine
from gpu_agent.environment import is_per_gpu
from gpu_agent.gangs import Gang, Gangs
from gpu_agent.processes import kill_marked
from gpu_agent.settings import AgentSettings
from gpu_agent.shim import NOT_EXECUTABLE, NOT_FOUND, spec_bytes
from services.contracts import exec_sessions
from services.contracts.codes import ProblemCode
from services.contracts.nodes import EndedBy, RankState
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, not_found, unavailable

log = Log(__name__)

PIECE_BYTES = 32 * 1024
MOST_WAITING_PIECES = 8
MOST_BYTES_PER_S = 32 * 2**20  #: Output of one session: more would keep the agent from its own work

_ANSWER_S = 5.0
_INPUT_PATIENCE_S = 1.0
_TICK_S = 0.5
_LAST_WORDS_S = 10.0  #: How long the end of a session waits for a client that does not read
_WARN_S = 60.0
_LONGEST_SOCKET_PATH = 100
_END_OF_FILE = b"\x04"
_KEEP_ALIVE = b": still here\n\n"


@dataclass
class _Streams:
    """The agent's ends of a command's standard streams: a terminal's master, or three pipes."""

    command: list[int]  #: The command's ends, closed once the shim has them
    stdin: int  #: Where input is written; -1 for none
    outputs: dict[int, str]  #: Descriptors to read, with the stream that each belongs to
    terminal: int = -1

    @classmethod
    def open(cls, request: exec_sessions.ExecRequest) -> _Streams:
        if request.terminal is not None:
            master, slave = pty.openpty()
            streams = cls([slave], master, {master: "stdout"}, master)
            streams.resize(request.terminal)
        else:
            stdin, stdin_in = os.pipe() if request.stdin else (os.open(os.devnull, os.O_RDONLY), -1)
            stdout_out, stdout = os.pipe()
            stderr_out, stderr = os.pipe()
            streams = cls([stdin, stdout, stderr], stdin_in, {stdout_out: "stdout", stderr_out: "stderr"})
        for descriptor in {streams.stdin, *streams.outputs} - {-1}:
            os.set_blocking(descriptor, False)
        return streams

    def resize(self, size: exec_sessions.TerminalSize) -> None:
        """Set the terminal's size; the kernel tells the programs in it."""
        if self.terminal >= 0:
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    def close_command(self) -> None:
        for descriptor in self.command:
            os.close(descriptor)
        self.command.clear()

    def close_stdin(self) -> None:
        if self.stdin >= 0 and self.stdin != self.terminal:
            os.close(self.stdin)
        self.stdin = -1

    def close(self) -> None:
        self.close_command()
        self.close_stdin()
        for descriptor in self.outputs:
            os.close(descriptor)
        self.outputs.clear()
        self.terminal = -1


@dataclass
class ExecSession:
    id: str
    owner: str  #: The API key of its client; nobody else may send input
    gang: Gang
    settings: AgentSettings
    mark: str  #: What identifies its processes in a container; empty without a container
    streams: _Streams
    connection: socket.socket
    taken: int = 0
    code: int | None = None
    detail: str = ""
    began_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    busy_at: float = field(default_factory=time.monotonic)
    _pieces: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING_PIECES))
    _exited: asyncio.Event = field(default_factory=asyncio.Event)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _feeding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waking: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])
    _warned: set[str] = field(default_factory=set[str])
    _over_at: float = float("inf")

    async def run(self) -> None:
        """Pass on output until the command has ended, its client has left, or a limit is reached; then release all."""
        tasks = [asyncio.create_task(self._read(descriptor)) for descriptor in self.streams.outputs]
        tasks.append(asyncio.create_task(self._watch()))
        ended = asyncio.gather(*tasks)
        left = asyncio.create_task(self._left.wait())
        try:
            while not ended.done() and not left.done() and time.monotonic() < self._over_at + _LAST_WORDS_S:
                await asyncio.wait((ended, left), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done() and self._over_at == float("inf") and (reason := self._why_over()):
                    self._hang_up(reason)
        finally:
            for task in (*tasks, left):
                task.cancel()
            await asyncio.gather(ended, left, return_exceptions=True)
            async with self._feeding:  # else another file could get the number of one that is waited for
                self.streams.close()
            self.connection.close()
            if self.code is None or self._over_at < float("inf"):
                wake_shim(self.gang)
            if self.mark:
                await asyncio.to_thread(kill_marked, self.mark)
            log.info("exec.ended", allocation_id=self.gang.allocation_id, session=self.id[-8:], code=self.code)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the session's events until the command has ended; the session ends with the iteration."""
        parts = len(self.streams.outputs) + 1
        beat_at = look_at = time.monotonic()
        try:
            yield exec_sessions.ExecEvent(type="started", session_id=self.id, node_id=self.settings.node_id).message()
            while parts:
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + _TICK_S
                    if notice := self._notice():
                        yield exec_sessions.ExecEvent(type="notice", detail=notice).message()
                try:
                    async with asyncio.timeout(_TICK_S):
                        piece = await self._pieces.get()
                except TimeoutError:
                    if now - beat_at > exec_sessions.BEAT_S:
                        beat_at = now
                        yield _KEEP_ALIVE
                    continue
                if piece is None:
                    parts -= 1
                    continue
                beat_at = now
                yield piece
            if notice := self._notice():  # a busy node may have come to no look between the stop and the end
                yield exec_sessions.ExecEvent(type="notice", detail=notice).message()
            yield exec_sessions.ExecEvent(type="exit", code=self._shell_code(), detail=self.detail or None).message()
        finally:
            self._left.set()

    async def feed(self, given: exec_sessions.ExecInput) -> exec_sessions.ExecInputAnswer:
        """Pass on input, a size or a signal; return what is taken; ``ProblemError``: 409 if input is missing."""
        self.heard_at = time.monotonic()
        if given.size is not None:
            self.streams.resize(given.size)
        if given.signal is not None:
            self._send(b"signal=%d" % signal.Signals[f"SIG{given.signal}"].value)
        async with self._feeding:
            if given.offset > self.taken:
                raise conflict(f"Bytes {self.taken} to {given.offset} of standard input are missing.")
            content = given.content[self.taken - given.offset :]
            if content:
                self.busy_at = self.heard_at
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INPUT_PATIENCE_S):
                        await self._write(content)
            if given.end and self.taken >= given.offset + len(given.content):
                self._end_input()
        self.heard_at = time.monotonic()
        return exec_sessions.ExecInputAnswer(offset=self.taken)

    # --- output

    async def _read(self, descriptor: int) -> None:
        """Queue what the command writes to one stream, followed by None at its end."""
        stream = self.streams.outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, PIECE_BYTES)
            except BlockingIOError:
                if self._exited.is_set():  # all that it wrote has been read; what it left behind is not waited for
                    break
                await self._readable(descriptor)
                continue
            except OSError as error:
                if error.errno == errno.EIO and not self._exited.is_set():  # the terminal is closed by all
                    await self._exited.wait()
                break
            if not data:
                break
            self.busy_at = time.monotonic()
            await self._pieces.put(exec_sessions.output_message(stream, data))
            await asyncio.sleep(len(data) / MOST_BYTES_PER_S)
        await self._pieces.put(None)

    async def _readable(self, descriptor: int) -> None:
        """Wait until a descriptor can be read, or the command has ended."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waking.add(future)
        loop.add_reader(descriptor, _resolve, future)
        try:
            await future
        finally:
            loop.remove_reader(descriptor)
            self._waking.discard(future)

    async def _watch(self) -> None:
        """Record how the command ends, as the shim reports it."""
        loop = asyncio.get_running_loop()
        while not self._exited.is_set():
            try:
                message = (await loop.sock_recv(self.connection, 1_024)).decode(errors="replace")
            except OSError:
                message = ""
            word, _, rest = message.strip().partition(" ")
            if word == "exit":
                self.code = int(rest) if self.code is None else self.code
            elif word.isdecimal():
                missing = int(word) in (errno.ENOENT, errno.ENOTDIR)
                self.code = NOT_FOUND if missing else NOT_EXECUTABLE
                self.detail = f"{rest}: {os.strerror(int(word))}"
                continue
            else:
                self.code = -signal.SIGKILL if self.code is None else self.code
                self.detail = self.detail or "The process that supervises the job was killed."
            self._exited.set()
        for future in self._waking:
            _resolve(future)
        await self._pieces.put(None)

    def _shell_code(self) -> int:
        """Return the exit status as shells number it."""
        code = -signal.SIGHUP if self.code is None else self.code
        return 128 - code if code < 0 else code

    # --- input

    async def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view and self.streams.stdin >= 0:
            try:
                count = os.write(self.streams.stdin, view)
            except BlockingIOError:
                await _writable(self.streams.stdin)
                continue
            except OSError:  # the command reads no more, which is its own affair
                break
            self.taken += count
            view = view[count:]
        self.taken += len(view)

    def _end_input(self) -> None:
        if self.streams.stdin >= 0 and self.streams.stdin == self.streams.terminal:
            with suppress(OSError):
                os.write(self.streams.terminal, _END_OF_FILE)
        else:
            self.streams.close_stdin()

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            self.connection.send(message)
            wake_shim(self.gang)

    # --- limits

    def _why_over(self) -> str:
        """Return why the session has to end now; empty while it may continue."""
        now = time.monotonic()
        if now - self.heard_at > exec_sessions.SILENCE_S:
            return f"Its client was silent for {exec_sessions.SILENCE_S:g} s."
        if now - self.busy_at > self.settings.exec_idle_s:
            return f"Nothing was typed or printed for {self.settings.exec_idle_s:g} s."
        if now - self.began_at > self.settings.exec_longest_s:
            return f"A session may last {self.settings.exec_longest_s:g} s."
        return ""

    def _hang_up(self, reason: str) -> None:
        self.code, self.detail, self._over_at = -signal.SIGHUP, reason, time.monotonic()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        wake_shim(self.gang)

    def _notice(self) -> str:
        """Return what the user should know now and has not been told yet; empty for nothing."""
        spec = self.gang.start.spec if self.gang.start else None
        if spec is None or self.gang.started_at is None:
            return ""
        words, key = "", ""
        if self.gang.state is RankState.STOPPING or self.gang.ended_by is EndedBy.STOP:
            key, words = "stop", f"the job is being stopped: it is ended in {spec.grace_s:g} s at the latest"
        elif spec.time_limit_s is not None:
            left_s = self.gang.started_at.timestamp() + spec.time_limit_s - time.time()
            if left_s <= 0:
                key, words = "limit", f"the job has reached its time limit: it is ended in {spec.grace_s:g} s"
            elif left_s <= min(_WARN_S, spec.time_limit_s / 2):
                key, words = "soon", f"the job reaches its time limit in {left_s:.0f} s"
        if key in self._warned:
            return ""
        self._warned.add(key)
        return words


class ExecSessions:
    def __init__(self, gangs: Gangs, engine: Engine | None, settings: AgentSettings) -> None:
        self._gangs = gangs
        self._engine = engine
        self._settings = settings
        self._sessions: dict[str, ExecSession | None] = {}
        self._door = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    async def open(
        self, allocation_id: str, session_id: str, request: exec_sessions.ExecRequest, owner: str
    ) -> ExecSession:
        """Start a command beside a rank.

        Raises:
            ProblemError: 404 if the rank does not run here, 409 if its run cannot be entered or the id is in use, 429
                beyond the limit, 503 if its shim does not answer.
        """
        gang = self._gangs.get(allocation_id)
        if gang is None or gang.start is None or gang.state is not RankState.RUNNING:
            raise conflict("The job's processes do not run on this node now.")
        local_rank = 0 if request.rank is None else request.rank - gang.start.rank_offset
        if not 0 <= local_rank < len(gang.start.devices):
            raise not_found(f"rank {request.rank} on this node")
        if session_id in self._sessions:
            raise conflict("There is such a session already.")
        if len(self._sessions) >= (limit := self._settings.exec_sessions):
            most = f"Node {self._settings.node_id} has {limit} exec sessions, which is the maximum."
            raise ProblemError(429, ProblemCode.RATE_LIMITED, most, headers={"retry-after": "5"})
        self._sessions[session_id] = None
        try:
            session = await self._start(gang, session_id, request, owner, local_rank)
        finally:
            del self._sessions[session_id]
        self._sessions[session_id] = session
        running = asyncio.create_task(session.run())
        self._running.add(running)
        running.add_done_callback(lambda _: self._forget(running, session_id))
        return session

    def get(self, session_id: str, owner: str) -> ExecSession:
        """Return a session of this client; ``ProblemError``: 404 if there is none."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise not_found("session, or it has ended")
        return session

    def _forget(self, running: asyncio.Task[None], session_id: str) -> None:
        self._running.discard(running)
        self._sessions.pop(session_id, None)
        if not running.cancelled() and (error := running.exception()) is not None:
            log.error("exec.failed", session=session_id[-8:], error=repr(error))

    async def _start(
        self, gang: Gang, session_id: str, request: exec_sessions.ExecRequest, owner: str, local_rank: int
    ) -> ExecSession:
        start = gang.start
        assert start is not None
        process = local_rank if is_per_gpu(start) else None
        argv, mark = request.command, ""
        if start.spec.image is not None and self._engine is not None:
            mark = f"WATTSHIFT_EXEC={session_id}"
            argv = containers.exec_argv(self._engine, start, request, process, mark)
        entries = [("process", str(process or 0)), *(("argv", word) for word in argv)]
        if request.terminal is not None:
            entries.append(("env", f"TERM={request.terminal_type}"))
        with ExitStack() as stack:
            streams = _Streams.open(request)
            stack.callback(streams.close)
            async with self._door:
                connection = await _shim_connection(gang)
            stack.callback(connection.close)
            socket.send_fds(connection, [spec_bytes(entries)], streams.command)
            wake_shim(gang)
            streams.close_command()
            stack.pop_all()
        log.info("exec.started", allocation_id=gang.allocation_id, session=session_id[-8:])
        return ExecSession(session_id, owner, gang, self._settings, mark, streams, connection)


def wake_shim(gang: Gang) -> None:
    """Make a rank's shim look at once. SIGCHLD has no other effect on it, whichever release started it."""
    started = gang.folder.started()
    if started is not None and gang.folder.is_held():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(started["shim"]), signal.SIGCHLD)


async def _shim_connection(gang: Gang) -> socket.socket:
    """Return a connection that a rank's shim has made; ``ProblemError``: 503 if it makes none, as an older one."""
    folder = os.open(gang.folder.path, os.O_RDONLY | os.O_DIRECTORY)
    door = gang.folder.path / exec_shim.DOOR
    path = door if len(str(door)) < _LONGEST_SOCKET_PATH else Path(f"/proc/self/fd/{folder}/{exec_shim.DOOR}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.unlink(missing_ok=True)
        listener.bind(str(path))
        door.chmod(0o600)
        listener.listen(1)
        listener.setblocking(False)
        wake_shim(gang)
        async with asyncio.timeout(_ANSWER_S):
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    except TimeoutError:
        raise unavailable("The process that supervises the job") from None
    finally:
        listener.close()
        door.unlink(missing_ok=True)
        os.close(folder)
    return connection


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    loop.add_writer(descriptor, _resolve, future := loop.create_future())
    try:
        await future
    finally:
        loop.remove_writer(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
