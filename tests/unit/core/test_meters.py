"""Whatever a counter shows, what is booked is what its hardware can draw, and each second of it once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.accounting.meters import (
    CHECK_PATIENCE_S,
    CHECK_S,
    LONGEST_GAP_S,
    READ_SLACK_S,
    Booked,
    Bound,
    Counter,
    CounterCheck,
    Fault,
    advance,
    board_most_w,
    booked_j,
    sampled,
)

RANGE_J = 262_143.0
WATTS, MOST_W = 200.0, 300.0


def read(bound: Bound, readings: list[tuple[float, float]], modelled_w: float = WATTS) -> list[Booked]:
    """Return what is booked of readings, each with its time."""
    counter, booked = Counter.first(*readings[0]), list[Booked]()
    for reading_j, at_s in readings[1:]:
        counter, found = advance(counter, bound, reading_j, at_s, modelled_w)
        booked.append(found)
    return booked


@dataclass
class Device:
    """A counter of a device that draws 200 W, and what may go wrong with it."""

    wraps_at_j: float
    at_s: float = 50.0
    shown_j: float = 90_000.0

    def step(self, seconds: float, event: str) -> tuple[float, float]:
        """Let time pass, in which something happens; return what is read, and when."""
        if event == "reset":
            self.shown_j = 0.0
        elif event == "jump":
            self.shown_j = (self.shown_j + 150_000) % self.wraps_at_j
        elif event == "gap":
            seconds = 5_000.0
        elif event == "duplicate":
            seconds = 0.0
        self.at_s += seconds
        self.shown_j = (self.shown_j + WATTS * seconds) % self.wraps_at_j
        read_at_s = self.at_s - 3 * seconds if event == "clock" else self.at_s
        once = {"zero": 0.0, "spike": self.shown_j + 4.29e6, "nan": math.nan, "negative": -5.0, "endless": math.inf}
        return once.get(event, self.shown_j), read_at_s


EVENTS = ("", "", "", "reset", "jump", "zero", "spike", "nan", "negative", "endless", "duplicate", "gap", "clock")
STREAMS = st.lists(st.tuples(st.floats(0.5, 20), st.sampled_from(EVENTS)), min_size=1, max_size=25)


@pytest.mark.parametrize("wraps_at_j", [math.inf, RANGE_J])
@settings(max_examples=300)
@given(steps=STREAMS)
def test_each_second_is_booked_once_whatever_is_read(wraps_at_j: float, steps: list[tuple[float, str]]) -> None:
    """Where the model knows the power, measured and modelled parts make up all that was drawn."""
    device, bound = Device(wraps_at_j), Bound(MOST_W, wraps_at_j)
    readings = [(device.shown_j, device.at_s), *(device.step(*each) for each in steps)]
    readings += [device.step(1.0, ""), device.step(1.0, "")]
    booked = read(bound, readings)
    seconds = device.at_s - 50.0
    total_j = sum(each.energy_j for each in booked)
    assert total_j <= MOST_W * (seconds + READ_SLACK_S) + 1e-6
    # Nobody can know how long a clock stood that was set back, nor tell a start anew that looks like a wrap, or like
    # going on from another reading.
    events = [event for _, event in steps]
    looks_like_wrap = wraps_at_j < math.inf and any(0 < now < before for (before, _), (now, _) in pairwise(readings))
    if "clock" not in events and sum(map(events.count, ("reset", "jump", "zero", "gap"))) < 2 and not looks_like_wrap:
        assert total_j == pytest.approx(WATTS * seconds, rel=1e-9)


@settings(max_examples=300)
@given(
    readings=st.lists(st.tuples(st.floats(0, 1e7), st.floats(-10, 100)), min_size=2, max_size=30),
    modelled_w=st.floats(-1e4, 1e9) | st.sampled_from([math.nan, math.inf]),
    wraps_at_j=st.sampled_from([math.inf, RANGE_J, 1.0]),
)
def test_no_stream_of_readings_books_more_than_can_be_drawn(
    readings: list[tuple[float, float]], modelled_w: float, wraps_at_j: float
) -> None:
    at_s, stream = 0.0, list[tuple[float, float]]()
    for reading_j, step_s in readings:
        at_s += step_s
        stream.append((reading_j, at_s))
    booked = read(Bound(MOST_W, wraps_at_j), stream, modelled_w)
    latest_s = max(at_s for _, at_s in stream)
    assert all(each.energy_j >= 0 for each in booked)
    assert sum(each.energy_j for each in booked) <= MOST_W * (latest_s - stream[0][1] + READ_SLACK_S) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shown_j", "after_j", "fault"),
    [
        (250_000.0, 1.0, Fault.FALL),  # were it a wrap, it would be 12 kJ in a second
        (5.0, 0.001, Fault.FALL),
        (1_000.0, 0.0, Fault.FALL),
        (1_000.0, 4.29e6, Fault.RISE),
        (1_000.0, math.nan, Fault.RISE),
        (262_100.0, 100.0, None),  # a wrap
        (1_000.0, 1_200.0, None),
        (1_000.0, 1_000.0, None),
    ],
)
def test_a_fall_is_a_wrap_if_that_can_be_and_a_rise_a_measurement_if_that_can_be(
    shown_j: float, after_j: float, fault: Fault | None
) -> None:
    (booked,) = read(Bound(MOST_W, RANGE_J), [(shown_j, 0.0), (after_j, 1.0)])
    assert booked.fault is fault
    if fault:
        assert booked.energy_j == WATTS


def test_a_reading_that_comes_once_leaves_the_counter_where_it_was() -> None:
    booked = read(Bound(MOST_W), [(5_000, 0), (0, 1), (5_400, 2), (5_600, 3)], modelled_w=150.0)
    assert [each.fault for each in booked] == [Fault.FALL, None, None]
    assert [each.energy_j for each in booked] == [150, 250, 200], "the counter knows the energy of both seconds"


def test_a_counter_that_starts_anew_is_believed_from_its_second_reading() -> None:
    booked = read(Bound(MOST_W), [(5_000, 0), (10, 1), (210, 2), (410, 3)], modelled_w=150.0)
    assert [each.fault for each in booked] == [Fault.FALL, None, None]
    assert [each.energy_j for each in booked] == [150, 200, 200]


def test_a_counter_that_shows_nothing_but_zero_is_never_believed_again() -> None:
    booked = read(Bound(MOST_W), [(5_000, 0), (0, 1), (0, 2), (0, 3)])
    assert [(each.energy_j, each.fault) for each in booked] == [(WATTS, Fault.FALL)] * 3


def test_after_more_than_a_wrap_any_reading_would_fit_so_that_none_counts() -> None:
    (booked,) = read(Bound(600.0, RANGE_J), [(5_000, 0), (5_001, 900)], modelled_w=600.0)
    assert booked == Booked(540_000, Fault.GAP)


def test_sampled_power_is_integrated_within_the_bound() -> None:
    bound = Bound(MOST_W)
    assert sampled(bound, 100, 200, 2) == Booked(300)
    assert sampled(bound, 100, 5_000, 2) == Booked(200, Fault.POWER)
    assert sampled(bound, math.nan, 100, 2) == Booked(200, Fault.POWER)
    assert sampled(bound, -1, 9_000, 2) == Booked(2 * MOST_W, Fault.POWER)
    assert sampled(bound, 100, 200, LONGEST_GAP_S + 1).fault is Fault.GAP


def test_what_a_board_can_draw_is_its_highest_limit_and_a_margin() -> None:
    assert board_most_w("X", (200, 500)) == 600
    assert board_most_w("A100-SXM4-40GB", (150, None)) == 480, "it was lowered when the agent began"
    assert board_most_w("X", (150, None)) == 180


def test_what_hardware_can_have_used_is_booked_as_it_is_and_all_else_at_its_most() -> None:
    assert booked_j(22e6, 480, 5) == 2_400
    assert booked_j(2_500, 480, 5) == 2_500, "readings are not exact moments"
    assert booked_j(500, 480, -3) == 0


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (0.6, True), (0.1, False), (1_000.0, False), (0.0, False)])
def test_a_counter_is_checked_against_power_at_the_start(ratio: float, holds: bool) -> None:
    check, seconds = CounterCheck(), 0.0
    while check.ratio is None:
        assert check.holds
        check = check.after(1.0, ratio * WATTS, WATTS)
        seconds += 1
    assert (check.ratio, check.holds) == (pytest.approx(ratio), holds)
    assert seconds == (CHECK_S if holds else CHECK_PATIENCE_S)
    assert check.after(1.0, 5.0, 1.0) is check


def test_a_bad_start_of_a_check_may_be_made_up_for() -> None:
    check = CounterCheck()
    for second in range(60):
        check = check.after(1.0, 0.0 if second < 9 else WATTS, WATTS)
    assert check.holds
    assert check.ratio == pytest.approx(0.5, abs=0.05)
