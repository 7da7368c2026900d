"""What all requests to the router pass, whichever door they come through: keys, limits, and their count."""

from __future__ import annotations

import asyncio

from services.kit.edge.bodies import BodyReader
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import ConcurrencyLimiter, RateLimiter
from services.router.settings import RouterSettings


class Gate:
    """Keys and limits of this process, and the requests that it has not answered yet.

    Attributes:
        keys: Of callers.
        limiter: Requests per second of tenants.
        at_once: Requests of tenants at once.
        bodies: Reads bodies while there is room for them.
        in_flight: Requests that are not answered yet.
        is_empty: Set once there are none, after ``close``.
    """

    def __init__(self, settings: RouterSettings, keys: KeyCache) -> None:
        self.keys = keys
        self.limiter = RateLimiter()
        self.at_once = ConcurrencyLimiter(settings.max_requests_per_tenant, "requests", retry_after_s=1)
        self.bodies = BodyReader(settings.max_buffered_bytes)
        self.in_flight = 0
        self.is_empty = asyncio.Event()
        self._is_closing = False

    def enter(self) -> None:
        """Count a request."""
        self.in_flight += 1

    def leave(self) -> None:
        """Count a request that is answered."""
        self.in_flight -= 1
        if self._is_closing and not self.in_flight:
            self.is_empty.set()

    def close(self) -> None:
        """Have ``is_empty`` set once no request is in flight."""
        self._is_closing = True
        if not self.in_flight:
            self.is_empty.set()
