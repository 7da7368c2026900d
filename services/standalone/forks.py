"""Python processes of an installation, forked from one that has already imported what they import.

Importing a service takes a second or two of processor time, and 30 to 90 MB of memory; here both are paid once: a
forked process shares its memory with the one that forked it until either writes to it.
`python -m services.standalone.forks` only forks. Each process that it makes is the supervisor's child, not its own, and
runs a module as `python -m` would: its process id, environment, folder, output, sockets, session, command line and exit
status are as if its command had started it; it dies with the supervisor, and survives the process that forked it.

A process reads what it should run by itself, after the fork: no secret of one is ever in another's memory.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.kit.sockets import LISTEN
from services.standalone.process import dying_too
from services.standalone.processes import PYTHON, Service

MODULE = "services.standalone.forks"
POSSIBLE = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64")
"""Where the kernel can make a process a child of the caller's parent, and this module knows how to ask for it."""

_CELERY = ("celery.apps.worker", "celery.bin.worker", "celery.concurrency.prefork", "kombu.transport.redis")
_OF_WORKERS = {
    "worker": ("optimizer_service.length_model", "optimizer_service.worker", *_CELERY),
    "plan-solver": ("optimizer_service.worker", *_CELERY),
    "simulator-worker": ("services.simulator.worker", *_CELERY),
}

_LATER = ("uvicorn.loops.uvloop", "uvicorn.lifespan.on", "fastapi.telemetry._runtime", "encodings.idna", "httpcore")
"""What services import only when they run, so that each process would hold it by itself: 1.5 MB, most of it uvloop."""

_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
_MOST_FILES = 16
_TITLE = "-" * 512  #: An argument in whose place a process writes its own command line


def imported_by(services: Iterable[Service], workers: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that the processes of an installation import, including the migrations of its database."""
    of_workers = (name for worker in workers for name in _OF_WORKERS[worker])
    return tuple(dict.fromkeys((*of_workers, *(each.module for each in services), *_LATER, "migrations.run")))


class Forked:
    """A running process, with the part of the interface of `asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, pid: int) -> None:
        """Take a child of this process that nobody is waiting for yet."""
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Return its exit status once it has ended; negative if a signal killed it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal; ``ProcessLookupError`` if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class Forks:
    """The process that forks, as the supervisor sees it; it is started again if it dies."""

    def __init__(self, environment: Mapping[str, str], preloaded: Iterable[str]) -> None:
        """Start the process; it imports in the background.

        Args:
            environment: Its environment; each process gets its own, but their interpreter was started in this one.
        """
        self._preloaded = preloaded
        # A process that forks must have no thread, and OpenBLAS would start one for each core.
        self._environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        self._start()

    async def spawn(self, command: Sequence[str], options: Mapping[str, Any]) -> Forked:
        """Run a module as a process of its own.

        Args:
            options: As `Process.popen_options` returns them; of the files, only `stdout` and `pass_fds` count.

        Raises:
            OSError: no process can be made.
        """
        asking = asyncio.create_task(self._ask(command, options), name="fork")
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_end)
            raise

    async def close(self) -> None:
        """End the process that forks; the processes that it forked live on."""
        self._server.close()
        await asyncio.to_thread(self._process.wait)

    def _start(self) -> None:
        self._server, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", MODULE, str(theirs.fileno()), _TITLE, *self._preloaded],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **dying_too(),
            )

    async def _ask(self, command: Sequence[str], options: Mapping[str, Any]) -> Forked:
        if self._process.poll() is not None:
            self._server.close()
            self._start()
        asked = {
            "words": list(command),
            "folder": str(options["cwd"]),
            "environment": dict(options["env"]),
            "supervisor": os.getpid(),
        }
        text, loop = json.dumps(asked).encode(), asyncio.get_running_loop()
        own, theirs = socket.socketpair()
        with own:
            own.setblocking(False)
            try:
                with theirs:
                    socket.send_fds(self._server, [b"f"], [theirs.fileno()])
                socket.send_fds(own, [len(text).to_bytes(4, "big")], [options["stdout"], *options["pass_fds"]])
                await loop.sock_sendall(own, text)
                answer = await loop.sock_recv(own, 4)
            except ConnectionError:  # what forks has died meanwhile
                answer = b""
        if not answer:
            raise OSError("no process could be forked; supervisor.log says why")
        return Forked(int.from_bytes(answer, "big"))


def _end(asked: asyncio.Task[Forked]) -> None:
    """Kill a process that nobody is waiting for any more."""
    if not asked.cancelled() and asked.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            asked.result().kill()


def _serve(server: socket.socket) -> list[str]:
    """Fork for each socket that is handed over, until the supervisor is gone; return only in a child, with its task."""
    while True:
        message, files, *_ = socket.recv_fds(server, 1, 1)
        if not message:
            sys.exit()
        with socket.socket(fileno=files[0]) as connection:
            if _fork() == 0:
                server.close()
                return _become(connection)


def _fork() -> int:
    """Fork a child of the parent: `os.fork` with CLONE_PARENT. The process must have only one thread.

    The address of the thread id is the one that glibc's fork gives the kernel.
    """
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    address = ctypes.c_void_p()
    flags = _CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0:
        flags |= _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID
    python.PyOS_BeforeFork()
    # The last two are thread area and thread id on one kind of machine, and the other way round on the other.
    pid = libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, address, address)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(connection: socket.socket) -> list[str]:
    """Turn into the process that the supervisor asks for; return the module to run, and its arguments."""
    length, files, *_ = socket.recv_fds(connection, 4, _MOST_FILES)
    asked: dict[str, Any] = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asked["supervisor"]:  # it died before the line above
        os._exit(1)
    os.chdir(asked["folder"])
    output, *sockets = files
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["environment"])
    if sockets:
        os.environ[LISTEN] = ",".join(map(str, sockets))
    time.tzset()
    words: list[str] = asked["words"]
    _show(words)
    connection.sendall(os.getpid().to_bytes(4, "big"))
    return words[words.index("-m") + 1 :]


def _show(words: Sequence[str]) -> None:
    """Show `words` as this process's command line, by overwriting the memory of the one that it was started with.

    If the last byte is not 0, the kernel shows everything up to the first 0.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])  # arg_start and arg_end of proc(5)
    shown = os.fsencode(" ".join(words))[: size - 2]
    ctypes.memset(start, ord("-"), size)
    ctypes.memmove(start, shown + bytes(1), len(shown) + 1)


def main() -> None:
    """Import everything, then fork; in a child, run its module."""
    _, number, _, *preloaded = sys.argv
    server = socket.socket(fileno=int(number))
    _show([*PYTHON, "-m", MODULE])
    for name in preloaded:
        with contextlib.suppress(Exception, SystemExit):  # the process that runs it says what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to what is shared
    sys.argv = _serve(server)
    sys.modules.pop(sys.argv[0], None)  # it is run, as `python -m` would
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
