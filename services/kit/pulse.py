"""How a process shows those who watch it that its event loop is running.

``WATTSHIFT_PULSE_FILE`` is a file that it touches about once a second, for a supervisor or a health check on the same
machine. systemd gives a socket (``NOTIFY_SOCKET``) to units of ``Type=notify``: ``READY=1`` says that the process has
started, and ``WATCHDOG=1`` has to come more often than ``WatchdogSec=``. A process without either has no pulse.
"""

import contextlib
import os
import socket
import time
from pathlib import Path

PULSE_FILE = "WATTSHIFT_PULSE_FILE"
EVERY_S = 1.0
OLD_AFTER_S = 20.0  #: A file that was last touched so long ago has no process whose loop turns


class Pulse:
    """The pulse of this process; the variables that configure it are not passed on to its children."""

    def __init__(self) -> None:
        path = os.environ.pop(PULSE_FILE, "")
        self._file = Path(path) if path else None
        self._socket = os.environ.pop("NOTIFY_SOCKET", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)
        self._is_ready = False

    async def beat_async(self) -> None:
        """Beat; for a server to call from its event loop."""
        self.beat()

    def beat(self) -> None:
        """Report that the process is alive; the first time, also that it has started. Never raises."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the folder is gone, or no file may be made: no reason to end
                self._file.touch(mode=0o600)
        if self._socket:
            self._notify("WATCHDOG=1" if self._is_ready else "READY=1\nWATCHDOG=1")
        self._is_ready = True

    def _notify(self, message: str) -> None:
        address = "\0" + self._socket[1:] if self._socket.startswith("@") else self._socket
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.setblocking(False)  # a full queue of messages must not stop the loop
            to.sendto(message.encode(), address)


def is_beating(path: Path) -> bool:
    """Return whether a process has recently touched its file, by the wall clock."""
    try:
        return abs(time.time() - path.stat().st_mtime) < OLD_AFTER_S
    except OSError:
        return False
