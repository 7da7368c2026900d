"""Ports that no other process listens on, for servers of tests that bind them themselves."""

import random
import socket
import sys

import psutil

from services.standalone.process import StackError

# Below the range outgoing connections draw from: while a killed server restarts, a client's connection could otherwise
# be given the server's own port and keep it from coming back.
_OTHERS = range(20_000, 32_000)


class Ports:
    """The ports of one installation, held until `release`.

    Choosing a port and listening on it are two steps, and another installation may start in between. On Linux each
    port is therefore also claimed by a socket name, which the kernel frees when this process ends.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, wanted: int, *, exactly: bool = False) -> int:
        """Return `wanted` if it is free, else another free port.

        Raises:
            StackError: `exactly` that port was asked for and it is taken, or no port is free.
        """
        if self._claim(wanted):
            return wanted
        if exactly:
            raise StackError(f"port {wanted} is taken{_holder(wanted)}; name another one")
        for port in random.sample(_OTHERS, k=1_000):
            if self._claim(port):
                return port
        raise StackError("no free port was found")

    def release(self) -> None:
        """Release the ports."""
        while self._claims:
            self._claims.pop().close()

    def _claim(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just left is as good as free
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        if sys.platform == "linux":
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0wattshift-port-{port}")
            except OSError:
                claim.close()
                return False
            self._claims.append(claim)
        return True


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:  # other users' connections are not ours to see everywhere
        pass
    return ""
