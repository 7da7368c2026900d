"""Which instance serves a request: each in proportion to its weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.domain.errors import DomainError


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """An instance that serves the request's class, as the dispatcher knows it."""

    id: str  #: Unique
    capacity: int  #: How many requests it may hold
    held: int = 0  #: How many it holds
    weight: float = 1.0  #: Its relative share of the requests, > 0

    @property
    def has_room(self) -> bool:
        return self.held < self.capacity


class WeightedRoundRobin:
    """Gives requests to instances in proportion to their weights, evenly spread (smooth weighted round robin).

    Each instance gains its weight with every choice; the one with the most is chosen and pays the sum of all weights.
    An instance without room is passed over and keeps what it gained, but is never owed more than one round.

    Source: FREESH appendix D.6 ("worker selection follows a weighted round-robin strategy").
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, instances: Sequence[InstanceLoad]) -> InstanceLoad | None:
        """Return the next instance with room; None if there is none; ``DomainError`` if a weight is not above 0."""
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
