"""When a job that depends on others may start."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Condition(StrEnum):
    """How a job must have ended before another may start. An array has ended when all of its tasks have."""

    OK = "ok"  #: It succeeded; of an array, every task did
    ANY = "any"  #: It ended, in whatever way
    NOT_OK = "not_ok"  #: It failed or was cancelled; of an array, at least one task did


class Verdict(Enum):
    """Whether a dependency lets its job start."""

    MET = "met"
    OPEN = "open"
    IMPOSSIBLE = "impossible"  #: It can no longer be met: what has ended does not change any more


@dataclass(frozen=True, slots=True)
class Ends:
    """How far a job or an array that others depend on has got."""

    live: int  #: Tasks that have not ended; for a job, 1 or 0
    not_ok: int  #: Tasks that failed or were cancelled


def verdict(condition: Condition, ends: Ends) -> Verdict:
    """Return whether a dependency is met, is still open, or can no longer be met."""
    if condition is Condition.OK and ends.not_ok:
        return Verdict.IMPOSSIBLE
    if ends.live:
        return Verdict.OPEN
    if condition is Condition.NOT_OK and not ends.not_ok:
        return Verdict.IMPOSSIBLE
    return Verdict.MET
