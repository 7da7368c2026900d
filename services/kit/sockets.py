"""Where the services of one machine listen, and find each other: at sockets that nobody else can take.

A port that a process lets go, because it ends, is anybody's who takes it first. `wattshift up` therefore has its
services listen at Unix sockets in a folder that others do not enter (``WATTSHIFT_SOCKETS``): ``unix://carbon`` is
``carbon.sock`` there. What has to be a port is listened on by the supervisor, which hands it to one process after
another. ``WATTSHIFT_LISTEN_AT`` tells a process the path of its socket, and ``WATTSHIFT_LISTEN`` the numbers of open
files. systemd does the same for a unit with a socket unit, and says so by ``LISTEN_FDS`` (sd_listen_fds).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from services.kit.logging import Log

log = Log(__name__)

SOCKETS, LISTEN, LISTEN_AT = "WATTSHIFT_SOCKETS", "WATTSHIFT_LISTEN", "WATTSHIFT_LISTEN_AT"
SCHEME = "unix"
BACKLOG = 2048
_FIRST_OF_SYSTEMD = 3


def file_of(name: str) -> str:
    """Return the file name of the socket that ``unix://NAME`` is."""
    return f"{name}.sock"


def path_of(name: str) -> str:
    """Return the path of the socket that ``unix://NAME`` is."""
    return os.path.join(os.environ.get(SOCKETS, ""), file_of(name))


def handed_over() -> list[socket.socket]:
    """Return the sockets that this process is to listen on; none where it is to make one by its settings.

    No process that this one starts gets them, or is told of them.
    """
    given, path = os.environ.pop(LISTEN, ""), os.environ.pop(LISTEN_AT, "")
    count, whose, _ = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"))
    if not given and not path and whose == str(os.getpid()):
        given = ",".join(str(_FIRST_OF_SYSTEMD + number) for number in range(int(count)))
    found = [socket.socket(fileno=int(number)) for number in given.split(",") if number]
    if path:
        found.append(_bound(path))
    for each in found:
        each.set_inheritable(False)
    return found


def listening(host: str, port: int, retry_s: float = 1.0) -> socket.socket:
    """Return a socket that listens at a port; while another program has it, say so and wait.

    Raises:
        OSError: Nobody can listen there: no host of this machine has that name, say.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        log.error("port.in_use", host=host, port=port, waits="until the program that has it lets it go")
        time.sleep(retry_s)


def _bound(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that has ended: nobody else can make files here
    found = socket.socket(socket.AF_UNIX)
    found.bind(path)
    os.chmod(path, 0o600)  # nobody can connect yet
    found.listen(BACKLOG)
    return found
