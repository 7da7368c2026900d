"""What is to change so that a pool is as its plan says: pure, and said again of its own outcome it says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.serving import InstanceState

Combination = tuple[str, str]
"""A place and a mode."""
Target = Mapping[Combination, Mapping[str | None, int]]
"""How many instances there are to be, by request class. Under None stand those that are only kept: none is made."""

STAYING = (InstanceState.READY, InstanceState.STARTING, InstanceState.WANTED)
"""The states of instances that are part of a pool, the surest of them first; all others are on their way out."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An instance that is part of a pool.

    Attributes:
        at: Its place and mode.
        state: One of ``STAYING``.
        is_current: Whether one made now would run the same.
        up_s: Since it was ready, or else made.
    """

    id: str
    at: Combination
    request_class: str | None
    state: InstanceState
    is_current: bool
    up_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """What is to be done.

    Attributes:
        make: Instances to make, by place and mode and then by class.
        wait: Those that are missing too, but whose place and mode back off.
        reassign: Instances that go on for another class.
        leave: Instances that leave, in the order in which they should.
    """

    make: tuple[tuple[Combination, str], ...]
    wait: tuple[tuple[Combination, str], ...]
    reassign: Mapping[str, str | None]
    leave: tuple[str, ...]


def diff(target: Target, standing: Sequence[Standing], backing_off: Collection[Combination] = ()) -> Difference:
    """Return what is to change.

    An instance goes on as long as its place and mode are wanted, whatever class it served; as many as possible keep
    their class. One that would run otherwise if it were made now leaves, and another is made for it. Of more than are
    wanted those leave first that are not ready, the youngest first; then ready ones, the *oldest* first, so that those
    that a plan keeps because they have not yet run for ``min_up_s`` are the ones that stay.
    """
    at: dict[Combination, list[Standing]] = defaultdict(list)
    for each in standing:
        at[each.at].append(each)
    make: list[tuple[Combination, str]] = []
    reassign: dict[str, str | None] = {}
    leave: list[str] = []
    for combination in sorted({*target, *at}):
        slots = Counter({name: count for name, count in target.get(combination, {}).items() if count > 0})
        current = sorted((each for each in at[combination] if each.is_current), key=_stays_before)
        leave += [each.id for each in sorted(at[combination], key=_stays_before)[::-1] if not each.is_current]
        leave += [each.id for each in current[slots.total() :][::-1]]
        changed, missing = _assign(slots, current[: slots.total()])
        reassign |= changed
        make += [(combination, name) for name in missing]
    return Difference(
        make=tuple(each for each in make if each[0] not in backing_off),
        wait=tuple(each for each in make if each[0] in backing_off),
        reassign=reassign,
        leave=tuple(leave),
    )


def _stays_before(each: Standing) -> tuple[int, float, str]:
    is_ready = each.state is InstanceState.READY
    return STAYING.index(each.state), each.up_s if is_ready else -each.up_s, each.id


def _assign(slots: Counter[str | None], staying: Sequence[Standing]) -> tuple[dict[str, str | None], list[str]]:
    """Return who changes class to which, and the classes of those that are missing."""
    open_slots = sorted(name for name in slots.elements() if name is not None)
    homeless: list[Standing] = []
    for each in staying:
        if each.request_class in open_slots:
            open_slots.remove(each.request_class)
        else:
            homeless.append(each)
    given = {each.id: open_slots.pop(0) if open_slots else None for each in homeless}
    return {each.id: given[each.id] for each in homeless if given[each.id] != each.request_class}, open_slots
