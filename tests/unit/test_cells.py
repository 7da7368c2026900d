"""Which of several installations is to run a job."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.transfers import Transfer
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.cells import (
    HANDED_OVER_S,
    Offer,
    Rest,
    Terms,
    emissions,
    for_the_rest,
    is_in_time,
    is_worth_a_move,
    ranked,
    room_after_s,
)

NOW_S = 1_000.0
starts = st.one_of(st.just(math.inf), st.floats(NOW_S, NOW_S + 1e6))
lengths = st.one_of(st.none(), st.floats(0, 1e6))
rates = st.floats(0, 1e6)


@st.composite
def some_offers(draw: st.DrawFn) -> list[Offer]:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    return [Offer(name, draw(starts), draw(rates), draw(lengths)) for name in names]


@st.composite
def some_terms(draw: st.DrawFn) -> Terms:
    deadline_s = draw(st.one_of(st.just(math.inf), st.floats(NOW_S, NOW_S + 2e6)))
    return Terms(NOW_S, deadline_s, draw(st.one_of(st.none(), st.floats(0, 1e6))))


def best(*offers: Offer, **terms: float) -> str:
    return ranked(offers, Terms(NOW_S, **terms))[0].cell


def test_the_cleanest_in_time_is_chosen() -> None:
    clean, dirty = Offer("clean", NOW_S + 60, 10, 3_600), Offer("dirty", NOW_S, 100, 3_600)
    assert best(clean, dirty) == "clean"
    assert best(clean, dirty, deadline_s=NOW_S + 3_630) == "dirty"
    assert best(clean, dirty, flexibility_s=30) == "dirty"
    assert best(Offer("clean", NOW_S + 4_000, 10, 3_600), dirty) == "dirty"  # it would wait for longer than it runs
    assert best(Offer("clean", math.inf, 10, 3_600), dirty) == "dirty"


def test_what_a_job_has_waited_is_of_its_patience() -> None:
    clean, dirty = Offer("clean", NOW_S + 1_800, 10, 3_600), Offer("dirty", NOW_S, 100, 3_600)
    assert [best(clean, dirty, waited_s=each) for each in (0, 1_800, 1_801)] == ["clean", "clean", "dirty"]
    assert is_worth_a_move(clean, dirty, Terms(NOW_S, waited_s=1_801), 0)
    assert best(clean, waited_s=1e6) == "clean"


def test_a_faster_model_counts_by_the_whole_run() -> None:
    assert best(Offer("fast", NOW_S, 300, 1_800), Offer("slow", NOW_S, 100, 7_200)) == "fast"
    assert best(Offer("fast", NOW_S, 300, 1_800), Offer("slow", NOW_S, 100, None)) == "slow"  # by the hour


def test_where_none_is_in_time_the_one_that_ends_first_is_chosen() -> None:
    late = Offer("late", NOW_S + 20, 1, 600), Offer("later", NOW_S + 30, 1, 700)
    assert best(*reversed(late), deadline_s=NOW_S + 60) == "late"
    unknown = Offer("b", math.inf, 5, 60), Offer("a", math.inf, 6, 60)
    assert best(*unknown) == "b"


@given(some_offers(), some_terms())
def test_the_first_is_in_time_if_any_is_and_none_in_time_is_cleaner(offers: list[Offer], terms: Terms) -> None:
    order = ranked(offers, terms)
    assert sorted(order, key=lambda each: each.cell) == sorted(offers, key=lambda each: each.cell)
    assert ranked(reversed(offers), terms) == order
    earliest_s = min(each.start_s for each in offers)
    emitted = emissions(offers)
    in_time = [each for each in offers if is_in_time(each, earliest_s, terms)]
    if in_time:
        assert order[0] in in_time
        assert emitted[order[0].cell] == min(emitted[each.cell] for each in in_time)
        assert order[0].end_s <= terms.deadline_s


@given(st.lists(some_offers(), min_size=1, max_size=30), some_terms())
def test_no_swing_of_forecasts_moves_a_job_more_than_four_times(swings: list[list[Offer]], terms: Terms) -> None:
    place, moves = "a", 0
    for offers in swings:
        own = next((each for each in offers if each.cell == place), None)
        others = ranked([each for each in offers if each.cell != place], terms)
        if own is not None and others and is_worth_a_move(own, others[0], terms, moves):
            place, moves = others[0].cell, moves + 1
    assert moves <= 4


@given(
    st.integers(1, 8),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 8), st.one_of(st.just(math.nan), st.floats(0, 1e6))), max_size=30),
)
def test_there_is_room_once_the_others_that_are_left_and_the_job_fit(
    gpus: int, total: int, others: list[tuple[int, float]]
) -> None:
    held, left_s = [each for each, _ in others], [each for _, each in others]
    after_s = room_after_s(gpus, total, np.array(held, dtype=np.int64), np.array(left_s, dtype=np.float64))

    def at(time_s: float) -> int:
        """Return what the job and those hold that are left after a time."""
        return gpus + sum(n for n, each in others if not 0 < each <= time_s)

    if at(-1) <= total:
        assert after_s == 0
    if math.isfinite(after_s):
        assert at(after_s) <= total
    else:
        assert at(math.inf) > total
    assert all(at(each) > total for each in left_s if 0 < each < after_s)


@given(some_offers(), some_terms(), st.integers(0, 5))
def test_a_move_pays_or_is_in_time_at_last(offers: list[Offer], terms: Terms, moves: int) -> None:
    here, there = offers[0], offers[-1]
    if is_worth_a_move(here, there, terms, moves):
        emitted = emissions((here, there))
        earliest_s = min(here.start_s, there.start_s)
        assert is_in_time(there, earliest_s, terms)
        if is_in_time(here, earliest_s, terms):
            assert emitted[there.cell] < 0.9 * emitted[here.cell]


@pytest.mark.parametrize(("moves", "pays"), [(0, True), (1, True), (2, False)])
def test_each_further_move_must_save_twice_as_much(moves: int, pays: bool) -> None:
    here, there = Offer("here", NOW_S, 100, 60), Offer("there", NOW_S, 75, 60)
    assert is_worth_a_move(here, there, Terms(NOW_S), moves) == pays


def test_what_is_left_follows_from_what_was_used_for_what_is_done() -> None:
    assert Rest.of(0.25, 2, 7_200, J_PER_KWH) == Rest(10_800, 3)
    nothing = [(0.0, 2, 9.0, 9.0), (0.009, 2, 9.0, 9.0), (1.0, 2, 9.0, 9.0), (0.5, 0, 9.0, 9.0), (0.5, 2, 0.0, 9.0)]
    assert {Rest.of(*each) for each in [*nothing, (0.5, 2, 9.0, 0.0), (math.nan, 2, 9.0, 9.0)]} == {None}


@given(
    st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.floats(0, 1_000), st.one_of(starts, st.just(NOW_S))), min_size=5, max_size=5),
    st.floats(60, 1e6),
    st.floats(1e-3, 1e3),
    st.builds(Transfer, st.floats(0, 1e4), st.floats(0.1, 100), st.floats(0, 1)),
    st.integers(0, 5),
)
def test_a_job_that_runs_moves_only_where_there_is_room_and_the_way_is_paid(
    names: list[str], found: list[tuple[float, float]], left_s: float, kwh: float, transfer: Transfer, moves: int
) -> None:
    here, rest = names[0], Rest(left_s, kwh)
    said = {name: Offer(name, start_s, 0.0, None, c) for name, (c, start_s) in zip(names, found, strict=False)}
    offers = {each.cell: each for each in for_the_rest(said.values(), here, rest, NOW_S, transfer)}
    assert for_the_rest(said.values(), "z", rest, NOW_S, transfer) == []
    assert emissions(offers.values())[here] == pytest.approx(kwh * said[here].gco2_per_kwh)
    for there in offers.keys() - {here}:
        assert said[there].start_s <= NOW_S + HANDED_OVER_S
        if is_worth_a_move(offers[here], offers[there], Terms(NOW_S), moves):
            waits_kwh = kwh / left_s * (transfer.seconds + HANDED_OVER_S)
            saved_g = kwh * (said[here].gco2_per_kwh - said[there].gco2_per_kwh)
            way_g = transfer.energy_kwh * (said[here].gco2_per_kwh + said[there].gco2_per_kwh) / 2
            assert saved_g > way_g + waits_kwh * said[there].gco2_per_kwh
            assert moves <= 3


def test_a_move_that_pays_is_one_and_none_is_made_for_little_work() -> None:
    said = Offer("dirty", math.inf, 0, None, 300), Offer("clean", NOW_S, 0, None, 30)

    def goes(kwh: float) -> bool:
        offers = for_the_rest(said, "dirty", Rest(10 * S_PER_HOUR, kwh), NOW_S, Transfer())
        return is_worth_a_move(offers[0], offers[1], Terms(NOW_S), 0)

    assert goes(3.0)
    assert not goes(0.05)
