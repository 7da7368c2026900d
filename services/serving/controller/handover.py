"""Make before break: which of the leaving instances may be drained now. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

ANY_GPUS = ("", "")


class Outlook(Enum):
    """The prospects of an instance that is not ready."""

    COMES = auto()  #: It is starting
    WAITS = auto()  #: It waits for GPUs that others hold
    STUCK = auto()  #: It failed and is retried, has no node, or takes longer than it should


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one instance: their kind and number; ``ANY_GPUS`` if any of the tenant's GPUs will do (its quota)."""

    kind: tuple[str, str]
    count: int


@dataclass(frozen=True, slots=True)
class Pending:
    """An instance that is wanted but not ready."""

    gpus: Gpus
    outlook: Outlook


def drainable(
    leaving: Sequence[tuple[str, Gpus]], pending: Sequence[Pending], releasing: Iterable[Gpus] = ()
) -> tuple[str, ...]:
    """Return the ids to drain now.

    1. If instances wait for GPUs, enough others leave to free that many of the kind, beyond those already being
    released: otherwise each would wait for the other. 2. As long as an instance is starting, no other leaves. 3. When
    none is, all leave except the last ones, which together hold as many GPUs as the pending instances need: an instance
    that never comes up takes no other down, and does not keep the rest of a pool from shrinking either.

    Args:
        leaving: Instances that leave, in the order in which they should, and what they hold.
        pending: Instances that are wanted but not ready.
        releasing: What draining and stopping instances hold.
    """
    short: Counter[tuple[str, str]] = Counter()
    for each in pending:
        if each.outlook is Outlook.WAITS:
            short[each.gpus.kind] += each.gpus.count
    for gpus in releasing:
        _give(short, gpus)
    drained: list[str] = []
    staying: list[tuple[str, Gpus]] = []
    for instance, gpus in leaving:
        if short[gpus.kind] > 0 or short[ANY_GPUS] > 0:
            drained.append(instance)
            _give(short, gpus)
        else:
            staying.append((instance, gpus))
    if any(each.outlook is Outlook.COMES for each in pending):
        return tuple(drained)
    owed = sum(each.gpus.count for each in pending)
    left = sum(gpus.count for _, gpus in staying)
    for instance, gpus in staying:
        left -= gpus.count
        if left < owed:
            break
        drained.append(instance)
    return tuple(drained)


def _give(short: Counter[tuple[str, str]], gpus: Gpus) -> None:
    for kind in (gpus.kind, ANY_GPUS):
        short[kind] -= gpus.count
