"""Strong scaling: the batch of a job split over its gang, from the measured steps."""

from __future__ import annotations

import numpy as np
import pytest

from lab.recipes.best_batch import StepTimes
from lab.recipes.measured import SPEED_OF, profile, steps
from lab.recipes.powerflow import BOARD, SIZES, fitted_strong_profile
from lab.recipes.strong import samples_per_s, strong_profile
from services.simulator.readers.jobs import read_jobs

STEPS = StepTimes(np.array([10.0, 20.0, 40.0]), np.array([1.0, 1.5, 3.0]), np.array([0.5, 0.5, 0.5]))


@pytest.mark.parametrize(
    ("total", "gpus", "step_s"),
    [
        (80, 4, 1.5),  # 20 each, as measured
        (60, 2, 2.25),  # 30 each, between 20 and 40
        (20, 4, 1.0),  # 5 each, fewer than ever measured: as long as 10
        (160, 2, 3.0 + 2.5),  # 80 each in two passes, the first without synchronising
    ],
)
def test_a_step_is_the_measured_one_of_a_gpus_part_of_the_batch(total: float, gpus: int, step_s: float) -> None:
    assert samples_per_s(STEPS, total, gpus) == pytest.approx(total / step_s)


@pytest.mark.parametrize(("model", "batch", "gang"), [("resnet50", 57, 4), ("shufflenet", 64, 8), ("bert", 12, 1)])
def test_at_the_gang_of_its_user_a_job_does_what_it_does_with_the_batch_per_gpu_kept(
    model: str, batch: int, gang: int
) -> None:
    strong, weak = strong_profile(model, batch, gang).true[BOARD], profile(model, batch).true[BOARD]
    reference = steps(SPEED_OF[model], "rtx")[("one", 1)]
    one, whole = samples_per_s(reference, batch, 1), samples_per_s(reference, batch * gang, 1)

    at = np.array([gang])
    assert strong.speed_at(at) * whole == pytest.approx(weak.speed_at(at) * one, rel=0.01)
    assert strong.power_w_at(at) == pytest.approx(weak.power_w_at(at), rel=0.01)


def test_wide_gangs_gain_less_than_with_the_batch_per_gpu_kept_and_draw_less() -> None:
    strong, weak = (each.true[BOARD] for each in (strong_profile("resnet50", 200, 1), profile("resnet50", 200)))

    assert (strong.speed_at(SIZES[1:]) < weak.speed_at(SIZES[1:])).all()
    assert (strong.power_w_at(SIZES[1:]) < weak.power_w_at(SIZES[1:]) + 5.0).all()
    assert 1.3 < strong.speed_at(np.array([2]))[0] < 2.0


def test_the_fitted_form_sees_the_split_batch() -> None:
    fitted = fitted_strong_profile("deepspeech2", 40, 1)

    found = fitted.predicted[BOARD].speed_at(SIZES[:4])
    assert found == pytest.approx(fitted.true[BOARD].speed_at(SIZES[:4]), rel=0.1)


def test_the_two_recipes_draw_the_same_jobs() -> None:
    weak, strong = (read_jobs("powerflow-day", recipe=recipe, seed=4) for recipe in ("powerflow", "powerflow-strong"))

    assert strong.requested_gpus.tolist() == weak.requested_gpus.tolist()
    names = [weak.profiles[kind].name for kind in weak.profile]
    for at in range(0, len(weak), 97):
        gang = int(weak.requested_gpus[at])
        assert strong.profiles[strong.profile[at]].name == f"{names[at]} on each of {gang}"
