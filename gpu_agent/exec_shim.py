"""The shim's side of exec sessions: further processes in a rank's environment, children of the shim as the rank's are.

The shim imports this when the agent first asks for a session, by making a socket named ``exec.sock`` in the rank's
folder. For each session the shim connects to it; the agent sends one request with the descriptors of the command's
standard streams (``Request``), and later ``signal=NUMBER``. The shim sends ``exit CODE`` at the end; before that,
the child itself may send ``ERRNO WHAT`` if the command cannot be run. A session ends with its connection, and thus also
when the agent is killed: SIGHUP, then SIGKILL after ``HANGUP_GRACE_S``. Processes that a command leaves behind are
killed.
"""

# ruff: noqa: SIM105  as in the shim

import fcntl
import os
import signal
import socket
import termios
from collections.abc import Callable

DOOR = "exec.sock"
HANGUP_GRACE_S = 5.0
LONGEST_REQUEST_BYTES = 128 * 1024
_MOST_DESCRIPTORS = 3


class Request:
    """A command to run: entries ``argv`` (repeated), ``process`` and ``env`` (``NAME=value``, repeated)."""

    def __init__(self, data: bytes, streams: list[int]) -> None:
        self.argv: list[bytes] = []
        self.process = 0  #: Which of the rank's processes it shares its environment with
        self.variables: dict[bytes, bytes] = {}
        self.streams = streams  #: Descriptors of its standard streams; a single one is a terminal
        for entry in data.split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"argv":
                self.argv.append(value)
            elif name == b"process":
                self.process = int(value)
            elif name == b"env":
                variable, _, content = value.partition(b"=")
                self.variables[variable] = content

    def connect(self) -> None:
        """Make the streams this process's own; it leads a new session."""
        terminal = len(self.streams) == 1
        for target, source in enumerate(self.streams * 3 if terminal else self.streams):
            os.dup2(source, target)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class _Session:
    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.kill_at = float("inf")


class Sessions:
    """The exec sessions of one rank; ``start`` starts a command, by its request and a descriptor for failures."""

    def __init__(self, start: Callable[[Request, int], int]) -> None:
        self._start = start
        self._waiting: list[socket.socket] = []
        self._sessions: dict[int, _Session] = {}
        self._is_closed = False

    def pids(self) -> list[int]:
        """Return the commands' processes, each the leader of its own session and group."""
        return list(self._sessions)

    def look(self, now: float) -> None:
        """Accept new sessions, and carry out the agent's requests for running ones."""
        self._knock()
        for connection in self._waiting[:]:
            self._receive(connection)
        for session in self._sessions.values():
            self._listen(session, now)
            if now >= session.kill_at:
                _signal_all(session.pid, signal.SIGKILL)

    def hang_up(self, now: float) -> None:
        """End all sessions and accept no more: the rank itself is over."""
        self._is_closed = True
        for session in self._sessions.values():
            _hang_up(session, now)

    def exited(self, pid: int, code: int) -> None:
        """Tell the agent how a process ended, if it was a session's command."""
        session = self._sessions.pop(pid, None)
        if session is None:
            return
        _signal_all(pid, signal.SIGKILL)
        _tell(session.connection, b"exit %d" % code)

    def _knock(self) -> None:
        if not os.path.exists(DOOR):
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(DOOR)
        except OSError:  # left by an agent that was killed, or there are others before us
            connection.close()
            return
        self._waiting.append(connection)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._waiting.remove(connection)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if data and descriptors and not self._is_closed:
            try:
                pid = self._start(Request(data, descriptors), connection.fileno())
                self._sessions[pid] = _Session(pid, connection)
            except OSError as error:  # a host without room for another process; the rank goes on
                _tell(connection, b"%d cannot start a process" % (error.errno or 0))
        else:
            connection.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _listen(self, session: _Session, now: float) -> None:
        while session.kill_at == float("inf"):
            try:
                message = session.connection.recv(256)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                _hang_up(session, now)
            elif message.startswith(b"signal="):
                _signal_group(session.pid, int(message[7:]))


def _tell(connection: socket.socket, last: bytes) -> None:
    try:
        connection.send(last)
    except OSError:
        pass
    connection.close()


def _hang_up(session: _Session, now: float) -> None:
    if session.kill_at == float("inf"):
        session.kill_at = now + HANGUP_GRACE_S
        _signal_all(session.pid, signal.SIGHUP)
        _signal_all(session.pid, signal.SIGCONT)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _signal_all(leader: int, number: int) -> None:
    """Signal every process of a session, whichever group a shell has put it in."""
    _signal_group(leader, number)
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[3]) == leader and int(fields[2]) != leader:
                os.kill(pid, number)
        except (OSError, IndexError, ValueError):
            continue
