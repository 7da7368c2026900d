"""Traffic from a log of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lab.serving.logs import observe, spare_share
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S
from services.core.profiles.traffic import LastPeak, Traffic, backtest


def test_peaks_of_a_log_counted_by_hand() -> None:
    times = [1_000.0, 1_004.999, 1_005.0, 1_299.9, 1_300.0, 1_301.0, 1_302.0, 1_650.0]
    traffic = observe(times, [0, 0, 0, 1, 1, 0, 1, 0], n_classes=2, start_s=1_000.0, end_s=1_700.0)
    assert_allclose(traffic.peaks_qps, [[0.4, 0.2], [0.2, 0.4]])  # the third step is not whole
    assert traffic.counts is not None
    assert traffic.counts[0, :2, 0].tolist() == [2, 1]
    assert traffic.counts[1, 0].tolist() == [1, 2]
    assert traffic.counts.sum() == 7


@given(st.lists(st.tuples(st.floats(0.0, 1_500.0), st.integers(0, 2)), max_size=60), st.randoms(use_true_random=False))
def test_peaks_are_the_fullest_windows_in_any_order(log: list[tuple[float, int]], shuffled: object) -> None:
    traffic = observe([t for t, _ in log], [c for _, c in log], n_classes=3, start_s=0.0, end_s=1_500.0)
    assert len(traffic) == 5
    for step in range(5):
        for each in range(3):
            windows = [int(t // 5.0) for t, c in log if c == each and step * STEP_S <= t < (step + 1) * STEP_S]
            fullest = max((windows.count(window) for window in windows), default=0)
            assert traffic.peaks_qps[step, each] == pytest.approx(fullest / 5.0)


@pytest.mark.parametrize(
    ("times", "classes"), [([-1.0], [0]), ([601.0], [0]), ([1.0], [2]), ([1.0], [-1]), ([1.0], [0, 0]), ([np.nan], [0])]
)
def test_a_log_that_does_not_hold_together_is_refused(times: list[float], classes: list[int]) -> None:
    with pytest.raises(DomainError):
        observe(times, classes, n_classes=2, start_s=0.0, end_s=600.0)


@pytest.mark.parametrize(("start", "end"), [(600.0, 0.0), (0.0, np.inf), (np.nan, 1.0)])
def test_a_log_that_does_not_end_is_refused(start: float, end: float) -> None:
    with pytest.raises(DomainError):
        observe([], [], n_classes=2, start_s=start, end_s=end)


def test_a_log_shorter_than_a_step_has_no_steps() -> None:
    assert len(observe([1.0], [0], n_classes=1, start_s=0.0, end_s=299.0)) == 0


def test_what_is_spare_counted_by_hand() -> None:
    tested = backtest(Traffic(np.array([[1.0], [2.0], [2.1], [5.0]])), LastPeak(), [1, 2, 3])
    assert_allclose(spare_share(tested, 1.1), [0.1 / 6 / np.mean([2, 2.1, 5, 2.1, 5, 5])])
