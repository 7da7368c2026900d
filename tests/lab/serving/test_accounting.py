"""Violations, latencies and fairness of requests against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.serving.accounting import (
    ServedRequests,
    fairness_of_classes,
    jain_index,
    length_fairness,
    of_requests,
    violation_rate,
)
from services.core.domain.errors import DomainError


def served(rows: list[tuple[float, float, float, int, float]]) -> ServedRequests:
    """Rows of arrival, first token, finish, tokens, Lat."""
    columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return ServedRequests(columns[0], columns[1], columns[2], columns[3].astype(np.int64), columns[4])


def test_latencies_and_violations() -> None:
    found = served([(0, 1, 5, 5, 1.0), (2, 2.5, 2.5, 1, 1.0), (0, 1, 5.01, 2, 1.0)])

    assert found.e2e_s.tolist() == [5, 0.5, 5.01]
    assert found.ttft_s.tolist() == [1, 0.5, 1]
    assert found.tbt_s[0] == 1
    assert math.isnan(found.tbt_s[1])
    assert found.violates.tolist() == [False, False, True]
    assert violation_rate(found) == pytest.approx(1 / 3)
    assert math.isnan(violation_rate(served([])))


def test_tokens_count_within_the_window() -> None:
    # a window of 1.4 * 10 = 14 s: tokens at 2, 4, 6, ... 20, of which seven are in time
    assert served([(0, 2, 20, 10, 10.0)]).timely_tokens().tolist() == [7]
    assert served([(0, 15, 20, 6, 10.0)]).timely_tokens().tolist() == [0]
    assert served([(0, 14, 14, 1, 10.0), (0, 1, 5, 5, 10.0)]).timely_tokens().tolist() == [1, 5]


def test_jain_of_equal_and_of_unequal_amounts() -> None:
    assert jain_index(np.array([3.0, 3, 3, 3])) == 1
    assert jain_index(np.array([1.0, 0, 0, 0])) == 0.25
    assert jain_index(np.array([1.0, 2.0])) == pytest.approx(9 / 10)
    assert jain_index(np.zeros(4)) == 1
    assert math.isnan(jain_index(np.array([])))


def test_fairness_is_over_quartiles_of_output_length() -> None:
    rows = [(0.0, 1.0, 2.0, tokens, 100.0) for tokens in (8, 1, 2, 4, 1, 8, 2, 4)]

    assert length_fairness(served(rows)) == pytest.approx(jain_index(np.array([2.0, 4, 8, 16])))
    assert length_fairness(served(rows[:2])) == pytest.approx(jain_index(np.array([1.0, 8])))
    assert math.isnan(length_fairness(served([])))


def test_the_fairness_of_classes_is_their_mean() -> None:
    rows = [(0.0, 1.0, 2.0, tokens, 100.0) for tokens in (8, 1, 2, 4, 5, 5, 5, 5)]
    classes = np.array([0, 0, 0, 0, 3, 3, 3, 3])
    alone = length_fairness(of_requests(served(rows), classes == 0))

    assert fairness_of_classes(served(rows), classes) == pytest.approx((4 * alone + 4 * 1.0) / 8)
    assert math.isnan(fairness_of_classes(served([]), np.array([], dtype=np.int64)))


@pytest.mark.parametrize("row", [(1, 0, 2, 1, 1.0), (0, 2, 1, 1, 1.0), (0, 1, 2, 0, 1.0), (0, 1, 2, 1, 0.0)])
def test_impossible_requests_are_refused(row: tuple[float, float, float, int, float]) -> None:
    with pytest.raises(DomainError):
        served([row])
    with pytest.raises(DomainError):
        ServedRequests(np.zeros(2), np.zeros(2), np.zeros(2), np.ones(1, np.int64), np.ones(2))
