"""Jain's index."""

import math

import pytest

from services.core.accounting.completion import jain_index


@pytest.mark.parametrize(
    ("served", "index"), [([1, 1, 1, 1], 1.0), ([7, 0, 0, 0], 0.25), ([1, 2], 0.9), ([3], 1.0), ([0, 0], 1.0)]
)
def test_all_alike_is_one_and_all_for_one_of_n_is_one_nth(served: list[float], index: float) -> None:
    assert jain_index(served) == pytest.approx(index)


def test_without_anybody_there_is_none() -> None:
    assert math.isnan(jain_index([]))
