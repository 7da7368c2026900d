"""What must change for a pool to match its plan: which instances are made, stay, and may leave by now. Pure.

New ones are made before old ones leave (``drainable``), and none where they fail for some time (``failures``).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

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
    ordinal: int = 0  #: Of what its cluster ends by number, the highest first


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
    for each in sorted(draining, key=lambda each: (each.ordinal, each.up_s, each.id)):
        if each.is_current and wanted[each.at] > 0:
            wanted[each.at] -= 1
            back.append(each)
    return tuple(back)


def _stays_before(each: Member) -> tuple[bool, int, int, float, str]:
    is_ready = each.state is InstanceState.READY
    return each.leaves_first, each.ordinal, STAYING.index(each.state), each.up_s if is_ready else -each.up_s, each.id


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
