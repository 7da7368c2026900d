"""What a key may do with models: which ones, how many requests and tokens a minute, and how much in a month."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from services.contracts.identity import KeyLimits, ResolvedKey
from services.core.domain.canaries import point_of
from services.kit.edge.exchange import Header
from services.kit.edge.limits import RateLimiter
from services.router.openai import DoorError
from services.router.turn import Received


class KeyRules:
    """Applies the limits of keys; those that are per minute hold for all processes together, as those of tenants do."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._counts: dict[tuple[str, str], int] = {}

    def admit(self, key: ResolvedKey) -> list[Header]:
        """Count a request; return the headers that say how many are left.

        Raises:
            DoorError: 429: there are too many this minute, or a budget of the key is used up.
        """
        limits = key.key_limits
        if key.excess is not None:
            raise DoorError(429, "insufficient_quota", key.excess)
        if limits.requests_per_min is None:
            return []
        return self._draw(key, "requests", limits.requests_per_min, 1)

    def take_tokens(self, received: Received, tokens: int) -> None:
        """Count the tokens that are expected of a request; ``DoorError``: 429 if there are too many this minute."""
        most = received.key.key_limits.tokens_per_min
        if most is not None:
            received.exchange.extra += self._draw(received.key, "tokens", most, tokens)
            received.taken_tokens = tokens

    def settle(self, received: Received) -> None:
        """Count the tokens that a request has used in place of those that were expected of it."""
        if received.taken_tokens is not None:
            name = f"{received.key.identity.key_id} tokens"
            self._limiter.adjust(name, received.used_tokens - received.taken_tokens)

    def _draw(self, key: ResolvedKey, what: str, per_min: int, amount: int) -> list[Header]:
        left, full_s, wait_s = self._limiter.draw(f"{key.identity.key_id} {what}", per_min, amount)
        of = what.encode()
        headers: list[Header] = [
            (b"x-ratelimit-limit-" + of, b"%d" % per_min),
            (b"x-ratelimit-remaining-" + of, b"%d" % max(left, 0)),
            (b"x-ratelimit-reset-" + of, b"%ds" % math.ceil(full_s)),
        ]
        if wait_s > 0:
            after_s = max(1, math.ceil(wait_s))
            message = f"This key may use {per_min} {what} per minute; try again in {after_s} s."
            raise DoorError(429, "rate_limit_exceeded", message, retry_after_s=after_s, more=headers)
        return headers

    def model(self, key: ResolvedKey, name: str, session: str | None, is_there: Callable[[str], bool]) -> str | None:
        """Return the model that answers to a name; None if the key may not name it.

        Of an alias's models that there are, each gets its share of the requests; those of a session all go to one.
        """
        limits, count = key.key_limits, 0
        if session is None and name in (limits.aliases or ()):
            count = self._counts[key.identity.key_id, name] = self._counts.get((key.identity.key_id, name), 0) + 1
        return limits.model_of(name, point_of(session, count), is_there)


def priority_of(limits: KeyLimits, fields: Mapping[str, Any], usual: int) -> int:
    """Return the priority that a request is sent with: its own, as far as its key may state one, else the usual one."""
    given = fields["priority"]
    if limits.priority is None or not isinstance(given, int) or isinstance(given, bool):
        return usual
    return max(given, limits.priority)
