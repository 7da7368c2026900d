"""The ports of one installation, on which its supervisor listens from start to end.

A process gets the sockets when it starts. While it is being restarted, connections wait for it, and nobody else can
take its port.
"""

import contextlib
import errno
import random
import socket
from dataclasses import dataclass

import psutil

from services.kit.sockets import BACKLOG
from services.standalone.probes import Address
from services.standalone.process import StackError

# Below the range outgoing connections draw from, one of which could have the port at a later start.
_OTHERS = range(20_000, 32_000)
_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True)
class Door:
    """Where a process listens, and the sockets that it is given for that; without any, it makes its own."""

    address: Address
    sockets: tuple[socket.socket, ...] = ()


class Doors:
    """Ports that are open until `close`."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def open(self, host: str, wanted: int, *, exactly: bool = False) -> tuple[int, tuple[socket.socket, ...]]:
        """Listen on a port of `host`, on `wanted` if that is free; return the port and its sockets.

        For this machine's loopback address, or all addresses, the port is held on the other loopback address too: a
        browser that is told `localhost` asks there first.

        Raises:
            StackError: `exactly` that port was asked for and it is taken, or no port is free; or there is no such host.
        """
        for port in [wanted] if exactly else [wanted, *random.sample(_OTHERS, k=1_000)]:
            try:
                sockets = _listening(host, port)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise StackError(f"cannot listen on {host}: {error.strerror or error}") from error
                continue
            self._held += sockets
            return sockets[0].getsockname()[1], tuple(sockets)
        raise StackError(
            f"port {wanted} is taken{holder(wanted)}; name another one" if exactly else "no free port was found"
        )

    @property
    def ports(self) -> list[int]:
        return sorted({each.getsockname()[1] for each in self._held})

    def close(self) -> None:
        while self._held:
            self._held.pop().close()


def _listening(host: str, port: int) -> list[socket.socket]:
    found: list[socket.socket] = []
    addresses = [(family, at) for family, _, _, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if host in ("127.0.0.1", "0.0.0.0"):
        addresses.append((socket.AF_INET6, ("::1", port)))
    try:
        for family, address in addresses:
            try:
                found.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in _NO_IPV6 or not found:
                    raise
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def holder(port: int) -> str:
    """Return who listens on a port, worded to follow `is taken`; empty if that is not known."""
    with contextlib.suppress(psutil.Error):  # other users' connections are not ours to see everywhere
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f" by {psutil.Process(each.pid).name()} (process {each.pid})"
    return ""
