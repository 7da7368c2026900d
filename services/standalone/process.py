"""One process to run: how it is started, how readiness is detected, how it is stopped."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.kit.sockets import LISTEN
from services.standalone.probes import Address, Probe

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class StackError(Exception):
    """The installation cannot do what was asked; the message is for the user."""


class BadInputError(StackError):
    """An option, a setting or a file of the installation is wrong, and nothing was changed; one line for each error."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """The user that another process runs as."""

    user_id: int
    group_id: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """What the supervisor starts."""

    name: str  #: Unique in the installation; names the log file
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    address: Address | None = None  #: Where it listens, for display
    sockets: tuple[socket.socket, ...] = ()
    """Handed over to it, and held here, so that nobody else can listen in between."""
    account: Account | None = None  #: The user it runs as, if that is not the caller
    stop_signal: signal.Signals = signal.SIGTERM  #: Asks it to shut down cleanly
    stop_within_s: float = 10.0  #: How long that may take before it is killed
    owns_its_group: bool = True
    """Its process group is killed with it. False for an agent, which finds its jobs again on restart."""
    probe: Probe | None = None
    """Asks it whether it is ready, and alive for as long as it runs. Without one, it is ready once it is started, and
    never replaced while it runs."""
    before_start: Callable[[], None] | None = None
    """Called before every start, including restarts; an OSError counts as a failed start."""
    repair: Callable[[], None] | None = None  #: Called when it has ended several times before it was ready
    replaces_children: bool = False
    """Whether it starts another process for each of its own that ends; those that are stopped are killed then."""

    def popen_options(self, output: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments for `subprocess.Popen` besides the command, including those of `dying_too`.

        Args:
            output: File descriptor for everything the process writes; None discards it.
        """
        held = [each.fileno() for each in self.sockets]
        options: dict[str, Any] = {
            "cwd": self.folder,
            "env": {**self.environment, **({LISTEN: ",".join(map(str, held))} if held else {})},
            "pass_fds": held,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL if output is None else output,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,  # Ctrl-C at the terminal is for the supervisor, which then stops all in order
        }
        if self.account:
            options |= {"user": self.account.user_id, "group": self.account.group_id, "extra_groups": []}
        return options | dying_too()


def dying_too() -> dict[str, Any]:
    """Return keyword arguments of `subprocess.Popen` for a process that does not outlive a killed parent, on Linux.

    Start it from the main thread, or from one that lives equally long: it dies with the thread that started it.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return {"preexec_fn": die_with_parent} if sys.platform == "linux" else {}
