"""Whether a server is given requests: it is ejected after failures, and taken back after a success. Pure."""

from dataclasses import dataclass
from enum import StrEnum

FAILURES = 3  #: How many in a row eject a server; a connection that cannot be made does so at once
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
MOST_EJECTIONS = 6  #: From which on the pause is the longest


class BreakerState(StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"  #: All pass
    OPEN = "open"  #: None passes
    HALF_OPEN = "half_open"  #: One passes, to see whether the server answers again


@dataclass(slots=True)
class Breaker:
    """Counts the failures of one server; ``now_s`` is any clock that does not go back."""

    failures: int = 0
    ejections: int = 0
    opened_s: float | None = None
    trial: object | None = None
    """The request that tries the server while it is ejected. The outcomes of requests sent before it count for
    nothing."""

    def state(self, now_s: float) -> BreakerState:
        if self.opened_s is None:
            return BreakerState.CLOSED
        if now_s - self.opened_s < self.pause_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @property
    def pause_s(self) -> float:
        """How long an ejected server is given nothing; doubles after each failed trial."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, self.ejections - 1))

    def passes(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        if self.opened_s is None:
            return True
        return self.trial is None and now_s - self.opened_s >= self.pause_s

    def reachable(self, now_s: float) -> None:
        """Note that an ejected server answers a probe, so that the next request may try it."""
        if self.opened_s is not None:
            self.opened_s = min(self.opened_s, now_s - self.pause_s)

    def refused(self, now_s: float) -> None:
        """Note that a server itself says that it cannot serve: nothing passes until it has long stopped saying so."""
        self.ejections = MOST_EJECTIONS
        self.opened_s = now_s

    def sent(self, request: object) -> None:
        """Note that a request was sent; to an ejected server it is the trial."""
        if self.opened_s is not None:
            self.trial = request

    def succeeded(self) -> None:
        self.failures = 0
        self.ejections = 0
        self.opened_s = None
        self.trial = None

    def abandoned(self, request: object) -> None:
        """Note that a request ended without a verdict, because its client left."""
        if self.trial is request:
            self.trial = None

    def failed(self, now_s: float, request: object | None = None, *, is_certain: bool = False) -> bool:
        """Note a failure, and return whether it ejects the server.

        Args:
            request: The request that failed; None for a probe.
            is_certain: Whether one such failure is enough, for example if no connection can be made.
        """
        self.failures += 1
        was_open = self.opened_s is not None
        if was_open and (request is None or self.trial is not request):
            return False  # a request that was sent before the ejection
        if not is_certain and not was_open and self.failures < FAILURES:
            return False
        self.ejections += 1
        self.opened_s = now_s
        self.trial = None
        return True
