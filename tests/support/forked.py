"""`python -m MODULE` without its imports: forked from a server that has them already.

To import a process of Wattshift takes about a second of CPU time, and tests start hundreds. One made here has a pid, an
environment, a folder and output of its own, and dies of signals, as any other does. That the product starts it too is
shown by tests/integration and tests/standalone, which start whole installations.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.kit.sockets import LISTEN

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.preloaded"])
_PR_SET_PDEATHSIG = 1


class Forked:
    """A running process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, *words: str, env: Mapping[str, str], cwd: Path, output: Path, sockets: Sequence[socket.socket] = ()
    ) -> None:
        """Start a module as a main program.

        Args:
            words: What would stand after `python -m`.
            env: Its whole environment.
            cwd: It works there.
            output: What it writes is appended to this file.
            sockets: It is to listen on.
        """
        self._process = _CONTEXT.Process(target=_run, args=(words, dict(env), cwd, output, sockets))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not, after so many seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    async def ended(self) -> int:
        """Return its exit status once it has ended."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        return Forked.wait(self)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


class _ForSupervisor(Forked):
    """One whose `wait` is that of `asyncio.subprocess`."""

    wait = Forked.ended  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        """Its exit status, None while it runs."""
        return self.poll()


@contextmanager
def forked_by_the_supervisor() -> Iterator[None]:
    """Have the supervisor fork what is a Python module from the server of these tests, not from one of its own."""

    async def start(*command: str, **options: Any) -> Process:
        if sys.platform != "linux" or "-m" not in command:
            return await asyncio.create_subprocess_exec(*command, **options)
        output = Path(os.readlink(f"/proc/self/fd/{options['stdout']}"))
        words = command[command.index("-m") + 1 :]
        sockets = [socket.socket(fileno=os.dup(number)) for number in options["pass_fds"]]
        try:
            return _ForSupervisor(  # type: ignore[return-value]
                *words, env=options["env"], cwd=options["cwd"], output=output, sockets=sockets
            )
        finally:
            for each in sockets:
                each.close()

    with (
        patch("services.standalone.supervisor.POSSIBLE", False),
        patch("services.standalone.supervisor.create_subprocess_exec", start),
    ):
        yield


def _run(
    words: tuple[str, ...], env: dict[str, str], cwd: Path, output: Path, sockets: Sequence[socket.socket]
) -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(cwd)
    written = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(written, standard)
    os.close(written)
    os.environ.clear()
    os.environ.update(env)
    if sockets:
        os.environ[LISTEN] = ",".join(str(each.detach()) for each in sockets)
    sys.argv = [*words]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children leave without
        sys.stdout.flush()
