"""Work that may wait, in the cleanest free capacity: never late while it can be in time, and as good as a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from services.core.domain.errors import DomainError
from services.core.policies.cleanest_fill import Due, Slot, amounts_now, cleanest_fill, fill_in_time

STEP_S = 600.0
PLACES = ("a", "b", "c")

capacities = st.floats(0, 20).map(lambda value: round(value, 2))
costs = st.floats(-50, 900).map(lambda value: round(value, 1))


@st.composite
def curves(draw: st.DrawFn) -> tuple[list[Slot], list[Due]]:
    steps = draw(st.integers(1, 6))
    slots = [
        Slot(place, step * STEP_S, (step + 1) * STEP_S, draw(costs), draw(capacities))
        for place in PLACES[: draw(st.integers(1, 3))]
        for step in range(steps)
    ]
    deadlines = st.integers(1, steps * 2).map(lambda half: half * STEP_S / 2)
    return slots, draw(st.lists(st.builds(Due, deadlines, capacities), min_size=1, max_size=4))


def cost(slots: list[Slot], done: list[float]) -> float:
    return sum(slot.gco2 * amount for slot, amount in zip(slots, done, strict=True))


def least(slots: list[Slot], work: list[Due]) -> tuple[float, float]:
    """Return the most that can be done in time, and the least carbon for that, by a linear program over all pairs."""
    pairs = []
    for index, slot in enumerate(slots):
        for number, due in enumerate(work):
            share = (min(slot.end_s, due.deadline_s) - slot.start_s) / (slot.end_s - slot.start_s)
            if share > 0:
                pairs.append((index, number, share))
    if not pairs:
        return 0.0, 0.0
    rows, bounds = [], []
    for index, slot in enumerate(slots):
        for limit in {share for each, _, share in pairs if each == index}:  # what is due early fits into the beginning
            rows.append([float(each == index and share <= limit) for each, _, share in pairs])
            bounds.append(slot.amount * limit)
    for number, due in enumerate(work):
        rows.append([float(each == number) for _, each, _ in pairs])
        bounds.append(due.amount)
    most = -linprog([-1.0] * len(pairs), rows, bounds).fun
    carbon = [slots[index].gco2 for index, _, _ in pairs]
    found = linprog(carbon, [*rows, [-1.0] * len(pairs)], [*bounds, -most + 1e-9])
    return most, found.fun


@given(curves())
def test_it_does_the_most_that_can_be_in_time_at_the_least_carbon(given_: tuple[list[Slot], list[Due]]) -> None:
    slots, work = given_
    done = cleanest_fill(slots, work)

    most, carbon = least(slots, work)
    assert all(-1e-9 <= amount <= slot.amount + 1e-9 for slot, amount in zip(slots, done, strict=True))
    assert sum(done) == pytest.approx(most, abs=1e-5)
    assert cost(slots, done) == pytest.approx(carbon, rel=1e-6, abs=1e-3)


def follow(slots: list[Slot], work: list[Due], margin_s: float) -> tuple[float, list[Due]]:
    """Do at each step what the plan says for it, and plan anew; return the carbon, and what was missed."""
    carbon, missed = 0.0, []
    left = sorted(work)
    steps = sorted({slot.start_s for slot in slots})
    for now_s in steps:
        ahead = [slot for slot in slots if slot.start_s >= now_s]
        for slot in ahead:
            if slot.start_s > now_s:
                continue
            todo = amounts_now(ahead, fill_in_time(ahead, left, now_s, margin_s), now_s).get(slot.place, 0.0)
            todo = min(todo, slot.amount)
            carbon += todo * slot.gco2
            ahead = [each for each in ahead if each != slot]
            for at, due in enumerate(left):
                taken = min(todo, due.amount)
                left[at], todo = Due(due.deadline_s, due.amount - taken), todo - taken
        missed += [due for due in left if due.deadline_s <= now_s + STEP_S and due.amount > 1e-6]
        left = [due for due in left if due.deadline_s > now_s + STEP_S and due.amount > 1e-9]
    return carbon, [*missed, *(due for due in left if due.amount > 1e-6)]


@st.composite
def long_curves(draw: st.DrawFn) -> tuple[list[Slot], list[Due]]:
    """Curves of a day in hours at three places, and work that fits into a third of it."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots = [
        Slot(place, hour * STEP_S, (hour + 1) * STEP_S, float(level), float(random.uniform(1, 10)))
        for place in PLACES
        for hour, level in enumerate(random.uniform(20, 200) + np.cumsum(random.normal(0, 30, 24)) + 200)
    ]
    early, late = draw(st.integers(6, 12)), draw(st.integers(16, 24))
    room = sum(slot.amount for slot in slots if slot.end_s <= early * STEP_S)
    return slots, [Due(early * STEP_S, room * 0.3), Due(late * STEP_S, room * 0.3)]


@given(long_curves())
def test_followed_step_by_step_it_misses_no_deadline_and_is_as_good_as_the_bound(
    given_: tuple[list[Slot], list[Due]],
) -> None:
    slots, work = given_
    carbon, missed = follow(slots, work, margin_s=0.0)

    assert missed == []
    bound = cost(slots, cleanest_fill(slots, work))
    assert bound - 1e-6 <= carbon + 1e-6
    assert carbon <= bound + 0.1 * abs(bound) + 1e-6


@given(curves(), st.floats(0, 3 * STEP_S))
def test_a_margin_misses_no_deadline_that_can_be_met(given_: tuple[list[Slot], list[Due]], margin_s: float) -> None:
    slots, work = given_
    whole = [Due(math.ceil(due.deadline_s / STEP_S) * STEP_S, due.amount) for due in work]
    if sum(cleanest_fill(slots, whole)) >= sum(due.amount for due in whole) - 1e-9:
        assert follow(slots, whole, margin_s)[1] == []


def test_what_cannot_be_in_time_is_done_as_soon_as_possible() -> None:
    slots = [Slot("a", 0, 10, 900, 1), Slot("a", 10, 20, 1, 1)]

    assert fill_in_time(slots, [Due(20, 5)], 0.0, 0.0) == [1, 1]
    assert fill_in_time(slots, [Due(20, 1)], 0.0, 0.0) == [0, 1]
    assert fill_in_time(slots, [Due(20, 1)], 0.0, 15.0) == [1, 0]  # in half of the time left


def test_what_is_done_now_is_what_slots_of_this_moment_do() -> None:
    slots = [Slot("a", 0, 10, 1, 5), Slot("a", 0, 5, 1, 5), Slot("b", 0, 10, 1, 5), Slot("b", 10, 20, 1, 5)]

    assert amounts_now(slots, [1, 2, 0, 4], 0.0) == {"a": 3}
    assert amounts_now(slots, [1, 2, 0, 4], 10.0) == {"b": 4}


def test_nonsense_is_refused() -> None:
    for slot in (Slot("a", 1, 1, 0, 1), Slot("a", 0, 1, math.nan, 1), Slot("a", 0, 1, 0, -1)):
        with pytest.raises(DomainError):
            cleanest_fill([slot], [Due(1, 1)])
    with pytest.raises(DomainError):
        cleanest_fill([], [Due(1, -1)])
