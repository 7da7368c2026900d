"""The batch at which a gang progresses fastest."""

from __future__ import annotations

import numpy as np
import pytest

from lab.recipes.best_batch import NoiseScale, StepTimes, best_batch

LINEAR = StepTimes(np.array([8.0, 64.0]), np.array([0.1, 0.45]), np.array([0.05, 0.05]))
"""A pass takes 1/160 s a sample, and 50 ms of every step only synchronise."""


def test_accumulated_passes_synchronise_once() -> None:
    throughput = LINEAR.throughput(4, np.array([64]), np.array([2]))

    assert throughput == pytest.approx(4 * 64 * 3 / (2 * 0.4 + 0.45))


@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("noise", [50.0, 2_000.0, 1e6])
def test_the_best_batch_is_within_a_step_of_the_best_of_all_that_fit(gpus: int, noise: float) -> None:
    scale = NoiseScale(np.array([128.0, 2_048.0]), np.array([noise, noise]))
    every = [(at_once, passes) for at_once in range(8, 65) for passes in range(33)]
    allowed = np.array([each for each in every if 128 <= gpus * each[0] * (each[1] + 1) <= 2_048])
    total = gpus * allowed[:, 0] * (allowed[:, 1] + 1)
    goodput = LINEAR.throughput(gpus, allowed[:, 0], allowed[:, 1]) * scale.efficiency(total.astype(np.float64))

    best = best_batch(LINEAR, scale, gpus)

    assert best.goodput == pytest.approx(goodput.max(), rel=0.03)


def test_the_best_batch_grows_with_the_noise() -> None:
    def total(noise: float) -> int:
        best = best_batch(LINEAR, NoiseScale(np.array([128.0, 2_048.0]), np.array([noise, noise])), 4)
        return 4 * best.batch_per_gpu * (best.accumulated + 1)

    totals = [total(noise) for noise in (10.0, 300.0, 3_000.0, 1e6)]

    assert totals == sorted(totals)
    assert (totals[0], totals[-1]) == (128, 2_048)


def test_a_lone_gpu_accumulates_beyond_the_base_batch() -> None:
    wide = StepTimes(np.array([8.0, 512.0]), np.array([0.1, 3.25]), np.array([0.0, 0.0]))
    best = best_batch(wide, NoiseScale(np.array([128.0, 512.0]), np.array([1e9, 1e9])), 1)

    assert best.accumulated >= 1
