"""Where the services of one machine listen, and find each other: at sockets that nobody else can take.

When a process releases a port, because it ends, anybody can take it. `wattshift up` therefore has its services listen
at Unix sockets in a folder that others cannot enter (``WATTSHIFT_SOCKETS``): ``unix://carbon`` is ``carbon.sock``
there. Where a port is required, the supervisor listens on it and hands it to one process after another.
``WATTSHIFT_LISTEN_AT`` tells a process the path of its socket, and ``WATTSHIFT_LISTEN`` the numbers of open files.
systemd does the same for a unit with a socket unit, and says so by ``LISTEN_FDS`` (sd_listen_fds).
"""

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
    """Return the file name of the socket that ``unix://NAME`` refers to."""
    return f"{name}.sock"


def path_of(name: str) -> str:
    """Return the path of the socket that ``unix://NAME`` refers to."""
    return os.path.join(os.environ.get(SOCKETS, ""), file_of(name))


def handed_over() -> list[socket.socket]:
    """Return the sockets on which this process is to listen; none if it is to create one from its settings.

    The processes that it starts neither inherit nor hear of them.
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
    """Return a socket that listens on a port; while another program has the port, log that and wait.

    Raises:
        OSError: It is impossible to listen there: for example, no host of this machine has that name.
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
