"""Ports that no other process listens on, for servers of tests that bind them themselves."""

import random
import socket
import sys

# Below the range outgoing connections draw from: while a killed server restarts, a client's connection could otherwise
# be given the server's own port and keep it from coming back.
_OTHERS = range(20_000, 32_000)


class Ports:
    """Ports, held until `release`.

    Choosing a port and listening on it are two steps, and another test may take one in between. On Linux each port is
    therefore also claimed by a socket name, which the kernel frees when this process ends.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, wanted: int) -> int:
        """Return `wanted` if it is free, else another free port."""
        return next(port for port in (wanted, *random.sample(_OTHERS, k=1_000)) if self._claim(port))

    def release(self) -> None:
        """Release the ports."""
        while self._claims:
            self._claims.pop().close()

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX)
        try:
            socket.create_server(("127.0.0.1", port)).close()
            if sys.platform == "linux":
                claim.bind(f"\0wattshift-port-{port}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True
