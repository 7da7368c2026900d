"""What must change for a pool to match its plan. Pure and idempotent."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.serving import InstanceState

Combination = tuple[str, str]  #: A place and a mode
Target = Mapping[Combination, Mapping[str | None, int]]
"""How many instances there should be, by request class; those under None are only kept, and none is started for it."""

STAYING = (InstanceState.READY, InstanceState.STARTING, InstanceState.WANTED)
"""The states of instances that belong to a pool, the most certain ones first; instances in other states are leaving."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance that belongs to a pool."""

    id: str
    at: Combination  #: Its place and mode
    request_class: str | None
    state: InstanceState  #: One of ``STAYING``
    is_current: bool  #: Whether an instance created now would run the same process
    up_s: float  #: Seconds since it was ready, or else since it was created
    leaves_first: bool = False  #: Whether it leaves before others of its place and mode, if any must


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes to make."""

    make: tuple[tuple[Combination, str], ...]  #: Instances to make, by place and mode and then by class
    wait: tuple[tuple[Combination, str], ...]  #: Missing instances whose place and mode back off
    reassign: Mapping[str, str | None]  #: Instances that get another class, by id
    leave: tuple[str, ...]  #: Instances that leave, in the order in which they should


def diff(target: Target, members: Sequence[Member], backing_off: Collection[Combination] = ()) -> Difference:
    """Return what must change.

    An instance stays as long as its place and mode are wanted, whatever class it served; as many as possible keep their
    class. One that would run a different process if it were created now leaves, and is replaced. If there are too many,
    those that are not ready leave first, youngest first; then ready ones, *oldest* first, so as to spare those that a
    plan keeps because they have not run for ``min_up_s`` yet.
    """
    at: dict[Combination, list[Member]] = defaultdict(list)
    for each in members:
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


def recalled(missing: Iterable[tuple[Combination, str]], draining: Sequence[Member]) -> tuple[Member, ...]:
    """Return the draining instances that serve again in place of new ones, which would have to start first.

    Args:
        missing: Instances that would be made, by place and mode and then by class.
        draining: Instances that still run; the most recently ready are taken first.
    """
    wanted = Counter(at for at, _ in missing)
    back: list[Member] = []
    for each in sorted(draining, key=lambda each: (each.up_s, each.id)):
        if each.is_current and wanted[each.at] > 0:
            wanted[each.at] -= 1
            back.append(each)
    return tuple(back)


def _stays_before(each: Member) -> tuple[bool, int, float, str]:
    is_ready = each.state is InstanceState.READY
    return each.leaves_first, STAYING.index(each.state), each.up_s if is_ready else -each.up_s, each.id


def _assign(slots: Counter[str | None], staying: Sequence[Member]) -> tuple[dict[str, str | None], list[str]]:
    """Return the instances that change class, with their new class, and the classes of missing instances."""
    open_slots = sorted(name for name in slots.elements() if name is not None)
    unassigned: list[Member] = []
    for each in staying:
        if each.request_class in open_slots:
            open_slots.remove(each.request_class)
        else:
            unassigned.append(each)
    given = {each.id: open_slots.pop(0) if open_slots else None for each in unassigned}
    return {each.id: given[each.id] for each in unassigned if given[each.id] != each.request_class}, open_slots
