"""Goodput: what a batch is worth, and the best one."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.profiles.goodput import StepTable, batch_gain, statistical_efficiency


def test_efficiency_is_one_at_the_base_batch_and_half_at_the_noise_scale_beyond_it() -> None:
    """(phi + M0) / (phi + M): at M = phi + 2 M0 a sample is worth half of one at M0."""
    efficiency = statistical_efficiency(1_000.0, np.array([128.0, 1_256.0]), 128.0)

    assert efficiency == pytest.approx([1.0, 0.5])


def test_the_gain_of_a_batch_is_that_of_its_goodput() -> None:
    """Four times the batch takes twice as long; of noise as large as four base batches a sample there is worth 5/8."""
    times = StepTable(np.array([1, 2]), np.array([64.0, 256.0]), np.array([[1.0, 2.0], [0.6, 1.2]]))

    assert batch_gain(times, 256.0, 64.0, 2, 256) == pytest.approx(4 / 2 * 5 / 8)
    assert batch_gain(times, 256.0, 64.0, 1, 64) == pytest.approx(1.0)
