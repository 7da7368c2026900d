"""A server's time, divided equally among the requests that it holds."""

import time


class SharedTime:
    """Counts the requests at a server, and each one's share of the server's time.

    Attributes:
        share_s: Seconds of the server per request so far: grows by 1 / n in each second in which it holds n requests.
    """

    __slots__ = ("_share_at_s", "held", "held_elsewhere", "share_s")

    def __init__(self) -> None:
        self.held = 0  #: Requests that this process holds there
        self.held_elsewhere = 0  #: Requests that other router processes said they hold
        self.share_s = 0.0
        self._share_at_s = time.monotonic()

    def begin(self) -> float:
        """Count a request that the server is given; return the share clock, with which it is to be ended."""
        self._tick()
        self.held += 1
        return self.share_s

    def end(self, began_share_s: float) -> float:
        """Count a request that the server no longer holds; return the server's seconds that were the request's."""
        self._tick()
        self.held -= 1
        return self.share_s - began_share_s

    def so_far(self, began_share_s: float) -> float:
        """Return the server's seconds that have been a request's until now."""
        self._tick()
        return self.share_s - began_share_s

    def _tick(self) -> None:
        now_s = time.monotonic()
        holds = self.held + self.held_elsewhere
        if holds:
            self.share_s += (now_s - self._share_at_s) / holds
        self._share_at_s = now_s
