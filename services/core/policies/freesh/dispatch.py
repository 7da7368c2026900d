"""Which instance serves a request: by weights, by work, or where its prompt's beginning is cached already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.core.domain.errors import DomainError


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """An instance that serves the request's class, as the dispatcher knows it.

    Attributes:
        id: Unique.
        capacity: How many requests it may hold.
        held: How many it holds.
        work_s: Predicted seconds of service of what it holds.
        weight: Its part of the requests, > 0.
        cached_tokens: Of this request's prompt, the leading tokens that it has in its prefix cache.
    """

    id: str
    capacity: int
    held: int = 0
    work_s: float = 0.0
    weight: float = 1.0
    cached_tokens: int = 0

    @property
    def has_room(self) -> bool:
        """Whether it may be given another request."""
        return self.held < self.capacity

    @property
    def wait_s(self) -> float:
        """Predicted seconds until it has room: what it holds, served ``capacity`` at a time."""
        if self.has_room:
            return 0.0
        return self.work_s / self.capacity if self.capacity > 0 else math.inf


def least_work(instances: Iterable[InstanceLoad]) -> InstanceLoad | None:
    """Return the instance with room that has the least work for its capacity; None if all are full."""
    free = (each for each in instances if each.has_room)
    return min(free, key=lambda each: (each.work_s / each.capacity, each.held / each.capacity, each.id), default=None)


def with_affinity(
    instances: Sequence[InstanceLoad], laxity_s: float, prefill_s_per_token: float
) -> InstanceLoad | None:
    """Return the instance that answers first, where laxity allows also one that is full but has the prompt cached.

    An instance with room is worth what its cache saves. A full one is worth waiting for if the saving exceeds the wait,
    and the wait does not exceed the laxity; the request then waits at that instance. Without anything cached this is
    ``least_work``.

    Args:
        instances: Those that serve the class.
        laxity_s: How long the request may wait.
        prefill_s_per_token: Seconds saved by each cached token, >= 0.

    Returns:
        The instance, which may be full. None if the request should stay in the queue.
    """
    best = least_work(instances)
    if not prefill_s_per_token > 0 or not any(each.cached_tokens for each in instances):
        return best

    def gain_s(each: InstanceLoad) -> float:
        return each.cached_tokens * prefill_s_per_token - each.wait_s

    allowed = [each for each in instances if each.has_room or 0 <= each.wait_s <= laxity_s]
    cached = max(
        (each for each in allowed if each.cached_tokens),
        key=lambda each: (gain_s(each), -each.work_s, each.id),
        default=None,
    )
    return cached if cached is not None and gain_s(cached) > 0 else best


class WeightedRoundRobin:
    """Gives requests to instances in proportion to their weights, evenly spread (smooth weighted round robin).

    Each instance gains its weight with every choice; the one with most is chosen and pays the sum of all weights. An
    instance without room is passed over, keeps what it gained, and is not owed more than one round.

    Source: FREESH appendix D.6 ("worker selection follows a weighted round-robin strategy").
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, instances: Sequence[InstanceLoad]) -> InstanceLoad | None:
        """Return the next instance with room; None if there is none.

        Raises:
            DomainError: A weight is not above 0.
        """
        if not all(math.isfinite(each.weight) and each.weight > 0 for each in instances):
            raise DomainError("the weights of instances are finite and above 0")
        total = sum(each.weight for each in instances)
        known = self._credit
        self._credit = {each.id: min(known.get(each.id, 0.0) + each.weight, total) for each in instances}
        free = [each for each in instances if each.has_room]
        if not free:
            return None
        chosen = max(free, key=lambda each: (self._credit[each.id], each.weight, each.id))
        self._credit[chosen.id] -= total
        return chosen
