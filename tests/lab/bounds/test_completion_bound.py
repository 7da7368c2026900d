"""The bound on completion times, and Theorem 1 as a number."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bounds.completion import Promise, least_total_completion_s
from services.core.domain.errors import DomainError


def test_a_full_cluster_is_bound_by_its_capacity_and_an_empty_one_by_the_jobs_themselves() -> None:
    """Jobs of 10, 20 and 30 s on all four GPUs end at 10, 30 and 60 s; on one GPU of 400 after their own time."""
    submitted, shortest = np.full(3, 100.0), np.array([30.0, 10.0, 20.0])

    assert least_total_completion_s(submitted, shortest, np.full(3, 4), 4) == 10 + 30 + 60
    assert least_total_completion_s(submitted, shortest, np.ones(3, dtype=np.int64), 400) == 10 + 20 + 30


def test_arrivals_count_from_the_first() -> None:
    submitted = np.array([50.0, 55.0])

    assert least_total_completion_s(submitted, np.array([10.0, 2.0]), np.full(2, 4), 4) == 7 + 12


def test_theorem_1_by_hand() -> None:
    """rho = 2, g_max = 4 of 8 GPUs: (2 + 1 + 2 * 2) * 2 = 14; with an error of 3 and a spread of 5, 1,920 more."""
    perfect = Promise(rho=2.0, widest=4, spread=5.0, error=0.0, tau=1.0)

    assert perfect.ratio(8) == 14.0
    assert Promise(2.0, 4, 5.0, 3.0, 1.0).ratio(8) == 14.0 + 2 * 2 * 4 * 5 * (2 + 3 * 2) * 3
    with pytest.raises(DomainError, match="whole cluster"):
        perfect.ratio(4)
