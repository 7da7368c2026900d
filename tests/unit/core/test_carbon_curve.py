"""One curve of carbon intensity, against numbers worked by hand and against sums over its steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.carbon import LEAST_MEASURED, CarbonCurve, Measured
from services.core.domain.errors import DomainError

STEPPED = CarbonCurve(
    times_s=np.array([0.0, 10.0, 30.0]),
    intensity_gco2_per_kwh=np.array([100.0, 400.0, -50.0]),
    end_s=40.0,
    estimated=np.array([False, True, False]),
)


@pytest.mark.parametrize(
    ("start_s", "end_s", "mean"),
    [
        (0, 10, 100),
        (5, 15, 250),
        (0, 40, (10 * 100 + 20 * 400 - 10 * 50) / 40),
        (-30, 10, 100),
        (-30, -10, 100),
        (-30, 20, (40 * 100 + 10 * 400) / 50),
        (25, 70, (5 * 400 - 40 * 50) / 45),
        (50, 70, -50),
        (-10, 50, (20 * 100 + 20 * 400 - 20 * 50) / 60),
        (10, 10, 400),
        (-5, -5, 100),
        (40, 40, -50),
        (90, 90, -50),
    ],
)
def test_a_mean_is_weighted_by_time_and_the_first_and_last_values_reach_beyond_the_curve(
    start_s: float, end_s: float, mean: float
) -> None:
    assert STEPPED.mean(start_s, end_s) == pytest.approx(mean, rel=1e-14)


@pytest.mark.parametrize(
    ("start_s", "end_s", "estimated"),
    [
        (0, 10, False),
        (0, 10.001, True),
        (9, 9, False),
        (10, 10, True),
        (30, 40, False),
        (29.999, 40, True),
        (40, 40, False),
        (-0.001, 5, True),
        (-5, -5, True),
        (30, 40.001, True),
        (41, 41, True),
    ],
)
def test_a_window_is_estimated_where_any_part_of_it_is_or_lies_beyond_the_curve(
    start_s: float, end_s: float, estimated: bool
) -> None:
    assert STEPPED.is_estimated(start_s, end_s) is estimated


def test_no_step_is_estimated_unless_the_curve_says_so() -> None:
    curve = CarbonCurve(np.array([0.0, 10.0]), np.array([1.0, 2.0]), 20.0)

    assert curve.estimated.tolist() == [False, False]
    assert not curve.is_estimated(0, 20)


def test_a_value_holds_from_its_step_on() -> None:
    assert [STEPPED.at(time_s) for time_s in (-1, 0, 9.9, 10, 29.9, 30, 40, 99)] == [
        *[100, 100, 100, 400, 400, -50, -50, -50]
    ]
    assert [STEPPED.step_at(time_s) for time_s in (-1, 0, 10, 99)] == [0, 0, 1, 2]


def test_the_integral_counts_from_the_beginning_and_goes_on_beyond_both_ends() -> None:
    found = [STEPPED.integral(time_s) for time_s in (-2, 0, 5, 10, 30, 40, 42)]

    assert found == [-200, 0, 500, 1000, 9000, 8500, 8400]


def test_the_steps_of_a_window_are_cut_at_both_ends() -> None:
    begins, ends, intensity = STEPPED.steps(-5, 35)

    assert begins.tolist() == [-5, 0, 10, 30]
    assert ends.tolist() == [0, 10, 30, 35]
    assert intensity.tolist() == [100, 100, 400, -50]


def test_a_part_of_a_curve_knows_what_is_estimated_of_it() -> None:
    part = STEPPED.cut(-5, 45)

    assert (part.start_s, part.end_s) == (-5, 45)
    assert part.estimated.tolist() == [True, False, True, True]
    assert STEPPED.cut(5, 40).estimated.tolist() == [False, True, False]
    assert STEPPED.cut(12, 20).edges_s.tolist() == [12, 20]


@pytest.mark.parametrize(
    ("times", "values", "end_s", "estimated"),
    [
        ([], [], 1.0, []),
        ([0.0, 0.0], [1.0, 1.0], 1.0, [False, False]),
        ([0.0], [1.0], 0.0, [False]),
        ([0.0], [np.nan], 1.0, [False]),
        ([0.0, 1.0], [1.0], 2.0, [False]),
        ([0.0, 1.0], [1.0, 2.0], 2.0, [False]),
    ],
)
def test_a_curve_that_is_not_one_is_refused(
    times: list[float], values: list[float], end_s: float, estimated: list[bool]
) -> None:
    with pytest.raises(DomainError):
        CarbonCurve(np.array(times), np.array(values), end_s, np.array(estimated, dtype=np.bool_))


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(
    lengths=lengths, seed=st.integers(0, 99), start_s=st.integers(-60, 700), length_s=st.integers(1, 300), n=st.just(5)
)
def test_mean_means_and_integral_are_one_thing(
    lengths: list[int], seed: int, start_s: int, length_s: int, n: int
) -> None:
    """All three against a sum over single seconds."""
    times = np.concatenate(([0.0], np.cumsum(lengths)[:-1])).astype(np.float64)
    values = np.random.default_rng(seed).uniform(-50, 500, len(lengths))
    curve = CarbonCurve(times, values, float(sum(lengths)))
    starts_s = np.array([float(start_s + 7 * i) for i in range(n)])
    seconds = [sum(curve.at(start + second) for second in range(length_s)) / length_s for start in starts_s]

    means = curve.means(starts_s, float(length_s))

    assert means == pytest.approx(seconds, abs=1e-9)
    for start, mean in zip(starts_s.tolist(), means, strict=True):
        assert curve.mean(start, start + length_s) == pytest.approx(mean, abs=1e-9)
        whole = curve.integral(start + length_s) - curve.integral(start)
        assert whole / length_s == pytest.approx(mean, abs=1e-9)
        assert curve.cut(start, start + length_s).mean(start, start + length_s) == pytest.approx(mean, abs=1e-9)


def measured(*steps: tuple[float, float, float]) -> Measured:
    """Return steps of begin, end and value, of which the provider estimated none."""
    starts_s, ends_s, values = np.array(steps, dtype=np.float64).reshape(-1, 3).T
    return Measured.of(starts_s, ends_s, values, np.zeros(len(steps), dtype=np.bool_))


def test_in_a_gap_the_value_before_it_holds_as_an_estimate() -> None:
    found = Measured.of(
        np.array([0.0, 30.0, 40.0]),
        np.array([10.0, 40.0, 50.0]),
        np.array([100.0, 400.0, 70.0]),
        np.array([False, False, True]),
    )

    assert found.curve.edges_s.tolist() == [0, 10, 30, 40, 50]
    assert found.curve.intensity_gco2_per_kwh.tolist() == [100, 100, 400, 70]
    assert found.curve.estimated.tolist() == [False, True, False, True]


def test_a_history_of_nothing_is_no_curve() -> None:
    with pytest.raises(DomainError):
        measured()


def test_a_mean_is_unknown_where_too_little_was_measured() -> None:
    past = measured((0, 90, 100), (100, 190, 400))

    assert past.mean(0, 100) == pytest.approx(100)
    assert past.mean(0, 101) == pytest.approx((100 * 100 + 400) / 101)
    assert past.mean(1, 100) is None  # 89 of 99 s
    assert past.mean(0, 0) is None


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(-50, 900)), min_size=1, max_size=8)
"""Seconds of a gap, seconds of the step after it, and its value."""


@given(STEPS, st.integers(-5, 70), st.integers(1, 40))
def test_a_mean_is_that_of_each_second_by_the_value_that_was_measured_last(
    steps: list[tuple[int, int, int]], start_s: int, length_s: int
) -> None:
    known, now_s = [], 0
    for gap_s, step_s, value in steps:
        known.append((now_s + gap_s, now_s + gap_s + step_s, value))
        now_s += gap_s + step_s
    seconds = range(start_s, start_s + length_s)
    last = [next((v for begin, _, v in reversed(known) if begin <= at), known[0][2]) for at in seconds]
    share = sum(any(begin <= at < end for begin, end, _ in known) for at in seconds) / length_s

    past = measured(*known)

    assert past.curve.mean(start_s, start_s + length_s) == pytest.approx(sum(last) / length_s)
    assert past.share(start_s, start_s + length_s) == pytest.approx(share)
    assert (past.mean(start_s, start_s + length_s) is None) == (share < LEAST_MEASURED)
    assert past.curve.is_estimated(start_s, start_s + length_s) == (share < 1)
