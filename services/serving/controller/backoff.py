"""How long a place and mode whose instances fail gets no new one; computed from their rows, even after a restart."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.serving.controller.diff import Combination

FIRST_S = 5.0
LONGEST_S = 300.0


@dataclass(frozen=True, slots=True)
class Life:
    """The life of an instance."""

    at: Combination
    created_at: datetime
    ready_at: datetime | None  #: When it first answered; None if it never did, or has been started again since
    failed_at: datetime | None  #: When it was given up because of a fault; None while it runs, or if it left as planned


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures without a success in between: how many there were, and when the last one was."""

    count: int
    last_at: datetime

    @property
    def retry_at(self) -> datetime:
        """When the next instance may start: 5 s after the first failure, twice as long after each, 300 s at most."""
        return self.last_at + timedelta(seconds=min(FIRST_S * 2 ** min(self.count - 1, 16), LONGEST_S))


def failures(lives: Iterable[Life]) -> dict[Combination, Failures]:
    """Return the places and modes whose newest instances failed.

    Instances made at the same moment count once. One that served for ``LONGEST_S`` before it failed, or that still
    serves, counts as a success.

    Args:
        lives: Instances, newest first.
    """
    failed: dict[Combination, set[datetime]] = defaultdict(set)
    last: dict[Combination, datetime] = {}
    closed: set[Combination] = set()
    for life in lives:
        if life.at in closed:
            continue
        if life.failed_at is None:
            if life.ready_at is not None:
                closed.add(life.at)
            continue
        failed[life.at].add(life.created_at)
        last[life.at] = max(last.get(life.at, life.failed_at), life.failed_at)
        if life.ready_at is not None and (life.failed_at - life.ready_at).total_seconds() >= LONGEST_S:
            closed.add(life.at)
    return {at: Failures(len(failed[at]), last[at]) for at in failed}
