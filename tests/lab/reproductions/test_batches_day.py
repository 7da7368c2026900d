"""A day of batches in hours: never below its bound, all in time, and where forecasts say it is cleanest."""

from __future__ import annotations

import numpy as np
import pytest

from lab.reproductions.batches_day import WINDOW_H, Day, free_of, outcome, planned
from services.core.domain.arrays import Floats

RATES = 100.0 + 50.0 * np.sin(np.arange(24) / 24 * 2 * np.pi)


def a_day(came: Floats, issued: Floats | None = None) -> Day:
    known = came if issued is None else issued
    later = [np.pad(known[:, since:], ((0, 0), (0, 48 + since)), mode="edge") for since in (0, 24)]
    return Day(np.stack(later), came)


@pytest.mark.parametrize("peak_share", [0.5, 0.7, 0.9])
def test_lines_are_in_time_and_emit_no_less_than_can_be(peak_share: float) -> None:
    for seed in range(5):
        came = np.random.default_rng(seed).uniform(50, 500, (3, 48))
        found = outcome(a_day(came), RATES / 2, free_of(RATES, peak_share, 3))
        assert found.late == 0
        assert found.bound * (1 - 1e-9) <= found.planned < found.arrival


def test_lines_follow_the_forecast_and_emit_what_came() -> None:
    said = np.stack([np.full(48, 100.0), np.full(48, 400.0)])
    found = outcome(a_day(said[::-1], said), RATES / 2, free_of(RATES, 0.1, 2))
    assert found.planned == pytest.approx(400 * RATES.sum() / 2)
    assert found.bound == pytest.approx(100 * RATES.sum() / 2)
    assert found.arrival == pytest.approx(250 * RATES.sum() / 2)


def test_what_does_not_fit_is_late() -> None:
    free = np.full(24, 10.0)
    came = np.full((2, 48), 100.0)
    emitted, late = planned(a_day(came), RATES / 2, free)
    assert emitted / 100 + late == pytest.approx(RATES.sum() / 2)
    assert emitted / 100 <= 2 * 10 * (WINDOW_H + 23)
    assert late > 0
    with pytest.raises(ValueError, match="do not fit"):
        outcome(a_day(came), RATES / 2, free)
