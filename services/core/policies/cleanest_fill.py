"""Work that may wait, put where and when it is cleanest: lines of batches into what interactive traffic leaves free.

A slot is free capacity at one place for some time; work has a deadline, and is divisible. Which amounts can be done
depends on nested sets of slots alone: those that end after a deadline can only serve work with a later one. Such sets
form a polymatroid, on which the greedy algorithm is optimal: cheapest slot first, each filled as far as it may be,
yields the least carbon at which the most work is done in time. The result is thus also the bound: no schedule of the
same slots emits less.

Source of the greedy algorithm: J. Edmonds, "Submodular functions, matroids, and certain polyhedra", 1970.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from services.core.domain.errors import DomainError


class Slot(NamedTuple):
    """Free capacity at a place; ``start_s`` and ``end_s``: when, UTC seconds; the end is after the start."""

    place: str  #: Its name
    start_s: float
    end_s: float
    gco2: float  #: Carbon of one unit of work there, in any unit that all slots share; may be negative
    amount: float  #: Units of work that it has room for, >= 0; spread evenly over its time


class Due(NamedTuple):
    """Work: how much, >= 0, and by when it has to be done, UTC seconds."""

    deadline_s: float
    amount: float


def cleanest_fill(slots: Sequence[Slot], work: Sequence[Due]) -> list[float]:
    """Return how much of the work each slot does, so that most is done in time, with the least carbon for that.

    Raises:
        DomainError: A slot or an amount is not as described.
    """
    for slot in slots:
        if not (slot.end_s > slot.start_s and math.isfinite(slot.gco2) and 0 <= slot.amount < math.inf):
            raise DomainError(f"a slot has a length, a finite cost and room, not {slot}")
    if not all(0 <= each.amount < math.inf and math.isfinite(each.deadline_s) for each in work):
        raise DomainError("work has a finite deadline, and its amount is finite and >= 0")
    deadlines = sorted({each.deadline_s for each in work})
    # left[k]: how much more slots that end after deadlines[k - 1] may do (all slots, for k = 0)
    left = [sum(each.amount for each in work if each.deadline_s >= at_s) for at_s in deadlines]
    done = [0.0] * len(slots)
    pieces: list[tuple[float, float, float, int, float]] = []  # parts of slots between two deadlines
    for index, slot in enumerate(slots):
        cuts = [slot.start_s, *(at_s for at_s in deadlines if slot.start_s < at_s < slot.end_s), slot.end_s]
        for start_s, end_s in itertools.pairwise(cuts):
            room = slot.amount * (end_s - start_s) / (slot.end_s - slot.start_s)
            pieces.append((slot.gco2, start_s, end_s, index, room))
    for _, _, end_s, index, room in sorted(pieces):
        of = bisect_left(deadlines, end_s)  # the first deadline that this piece can serve
        if of == len(deadlines):
            continue
        taken = min(room, *left[: of + 1])
        if taken > 0:
            done[index] += taken
            for k in range(of + 1):
                left[k] -= taken
    return done


def fill_in_time(slots: Sequence[Slot], work: Sequence[Due], now_s: float, margin_s: float) -> list[float]:
    """Return how much of the work each slot is to do.

    Work is planned to be done ``margin_s`` before its deadline, because forecasts err, or in half of the time left if
    that is less; where that cannot be, by its deadline, and what cannot be done by then either, as soon as possible.
    """
    total = sum(each.amount for each in work)
    for early_s in (margin_s, 0.0):
        due = [Due(each.deadline_s - min(early_s, max(each.deadline_s - now_s, 0.0) / 2), each.amount) for each in work]
        done = cleanest_fill(slots, due)
        if sum(done) >= total * (1.0 - 1e-9):
            return done
    return [slot.amount for slot in slots]  # not even all there is suffices


def amounts_now(slots: Sequence[Slot], done: Sequence[float], now_s: float) -> dict[str, float]:
    """Return how much each place does in the slots that contain ``now_s``; places that do nothing are left out."""
    found: dict[str, float] = {}
    for slot, amount in zip(slots, done, strict=True):
        if amount > 0 and slot.start_s <= now_s < slot.end_s:
            found[slot.place] = found.get(slot.place, 0.0) + amount
    return found
