"""A job's profile from its prior to its sixtieth point, and many jobs at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gpus import GPU_MODELS
from services.core.profiles.boards import board_of
from services.core.profiles.capped import NAMES, CappedModel
from services.core.profiles.models import EnergyModel, mape
from services.core.profiles.observations import Observations, PointError
from services.core.profiles.priors import FAMILIES, believed_draw
from services.core.profiles.profile import JobProfile
from tests.support.performance import grid, measured
from tests.support.performance_table import PerformanceTable
from tests.unit.core.profiles.test_capped import points

EVERYWHERE = grid()
TRUTH = measured(EVERYWHERE)
SEEN = measured(EVERYWHERE, noise=0.03, seed=4)
ORDER = np.random.default_rng(1).permutation(len(SEEN))


def after(points: int) -> JobProfile:
    """Return a profile that saw the first ``points``."""
    return JobProfile.of("V100", "vision", ControlKind.CLOCK).observe(SEEN.take(ORDER[:points]))


def errors(profile: JobProfile) -> tuple[float, float]:
    """Return the errors of time and energy against the truth, everywhere."""
    time_s, energy_j = profile.foreseen(*EVERYWHERE)
    return mape(time_s, TRUTH.seconds_per_iteration), mape(energy_j, TRUTH.energy_j_per_iteration)


@pytest.mark.parametrize("axis", list(ControlKind))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", GPU_MODELS)
def test_every_board_has_a_sane_prior(name: str, family: str, axis: ControlKind) -> None:
    board, profile = board_of(name), JobProfile.of(f"NVIDIA {name}", family, axis)
    least = 0.3 * board.top_mhz if axis is ControlKind.CLOCK else board.idle_w + 0.2 * (board.peak_w - board.idle_w)
    controls = np.linspace(least, board.top_mhz if axis is ControlKind.CLOCK else board.peak_w, 40)

    step_s, energy_j = profile.foreseen(1, FAMILIES[family].batch, controls, 1)
    power_w = energy_j / step_s

    assert (np.diff(step_s) <= 0).all()
    assert (np.diff(power_w) >= -1e-9).all()
    assert (power_w > 0.5 * board.idle_w).all()
    assert (power_w <= 1.02 * board.peak_w).all()
    assert 1e-4 < step_s[-1] < 10
    more_s, _ = profile.foreseen(np.array([2, 8, 16, 64]), FAMILIES[family].batch, controls[-1], np.array([1, 1, 2, 8]))
    assert (more_s > step_s[-1]).all()


def test_a_faster_board_is_believed_faster_and_an_unknown_one_is_allowed() -> None:
    speeds = [board_of(name).speed for name in ("Tesla T4", "V100-SXM2-32GB", "A100-SXM4-40GB", "NVIDIA H200")]

    assert speeds == sorted(speeds)
    assert board_of("MI300X").peak_w > 0
    with pytest.raises(DomainError, match="unknown family"):
        JobProfile.of("V100", "poetry", ControlKind.CLOCK)


def test_a_few_points_set_the_scale_and_more_bring_the_shape() -> None:
    few, some, many = errors(after(2)), errors(after(10)), errors(after(60))

    assert max(few) < 0.3
    assert max(some) < 0.12
    assert max(many) < 0.03


def test_equal_points_give_equal_profiles_and_none_change_nothing() -> None:
    one, other, none = after(19), after(19), after(0)
    prior = JobProfile.of("V100", "vision", ControlKind.CLOCK)

    assert np.array_equal(one.foreseen(*EVERYWHERE), other.foreseen(*EVERYWHERE))
    assert np.array_equal(none.foreseen(*EVERYWHERE), prior.foreseen(*EVERYWHERE))


def test_what_was_never_seen_stays_as_believed() -> None:
    one_gpu = grid(gpus=(1,), clocks=(900, 1_200))
    profile = JobProfile.of("V100", "vision", ControlKind.CLOCK).observe(measured(one_gpu))

    alone, spread = (profile.foreseen(gpus, 32, 1_200, nodes)[0] for gpus, nodes in ((1, 1), (16, 2)))

    assert 1.2 * alone < spread < 4 * alone


def test_points_without_energy_teach_times_and_leave_the_draw_as_believed() -> None:
    before = JobProfile.of("V100", "vision", ControlKind.CLOCK)
    after = before.observe(measured(grid(), draw=None))
    truth = measured(EVERYWHERE, draw=None)

    step_s, energy_j = after.foreseen(*EVERYWHERE)

    assert mape(step_s, truth.seconds_per_iteration) < 0.01
    assert isinstance(before.model, EnergyModel)
    assert isinstance(after.model, EnergyModel)
    assert after.model.parameters == before.model.parameters
    assert after.model.throughput.parameters != before.model.throughput.parameters
    assert np.isfinite(energy_j).all()


def test_a_hungrier_job_than_believed_draws_more_everywhere() -> None:
    """One energy scales the draw of every control, and leaves alone how it goes with batch and clock."""
    where = grid(gpus=(1,), batches=(32,), clocks=(900,))
    point = measured(where)
    model = JobProfile.of("V100", "vision", ControlKind.CLOCK).observe(point).model

    assert isinstance(model, EnergyModel)
    believed = believed_draw(board_of("V100"), FAMILIES["vision"])
    ratios = {
        name: now / then for name, now, then in zip(believed._fields, model.parameters, believed, strict=True) if then
    }
    shape = {name: ratios.pop(name) for name in list(ratios) if name.startswith(("alpha", "theta", "beta", "f0"))}
    assert list(shape.values()) == pytest.approx([1.0] * len(shape))
    assert list(ratios.values()) == pytest.approx([ratios["a_hg"]] * len(ratios))
    assert ratios["a_hg"] > 1.2


def test_a_hungrier_job_than_believed_draws_more_under_every_limit() -> None:
    """A job that is slower than believed at one limit, and draws twice of what is believed of it beside idling."""
    before = JobProfile.of("V100", "vision", ControlKind.POWER_LIMIT)
    step_s, energy_j = before.foreseen(1.0, 64.0, 250.0, 1.0)
    slow = Observations.of(
        [1.5 * step_s],
        local_batch=[64.0],
        control=[250.0],
        energy_j_per_iteration=[1.5 * 1.25 * energy_j],
        axis=ControlKind.POWER_LIMIT,
    )

    model = before.observe(slow).model

    assert isinstance(model, CappedModel)
    assert isinstance(before.model, CappedModel)
    believed, found = (dict(zip(NAMES, each.vector.tolist(), strict=True)) for each in (before.model, model))
    for name in ("beta_grad", "kappa_grad", "theta_sync_local", "theta_sync_node"):  # which one point does not tell
        assert found[name] == pytest.approx(1.5 * believed[name])
    for name in ("alpha_w", "sync_w"):
        assert found[name] == pytest.approx(1.25 * believed[name])
    assert 1.25 * believed["beta_w"] <= found["beta_w"] < 1.5 * believed["beta_w"]
    assert (found["gamma1"], found["gamma2"]) == (believed["gamma1"], believed["gamma2"])


def test_nonsense_is_refused() -> None:
    time_s = SEEN.seconds_per_iteration.copy()
    time_s[30] *= 1_000
    with pytest.raises(PointError, match="wrong units"):
        after(0).observe(replace(SEEN, seconds_per_iteration=time_s, energy_j_per_iteration=np.full(len(SEEN), np.nan)))
    with pytest.raises(DomainError, match="these points are by power_limit"):
        after(0).observe(points())


def test_profiles_by_power_limit_learn_too() -> None:
    seen = points(noise=0.02)
    profile = JobProfile.of("V100", "vision", ControlKind.POWER_LIMIT).observe(seen)

    step_s, energy_j = profile.foreseen(seen.gpus, seen.local_batch, seen.control, seen.nodes)

    assert mape(step_s, points().seconds_per_iteration) < 0.03
    assert mape(energy_j, points().energy_j_per_iteration) < 0.03


@pytest.mark.parametrize("axis", list(ControlKind))
def test_a_table_gives_what_each_job_gives(axis: ControlKind) -> None:
    profiles = [JobProfile.of(board, family, axis) for board in GPU_MODELS for family in FAMILIES]
    global_batch = np.array([64.0 * (1 + at % 5) for at in range(len(profiles))])
    sizes, controls = np.array([1.0, 2.0, 8.0, 32.0]), np.array([150.0, 300.0, 900.0])

    found = PerformanceTable([profile.model for profile in profiles]).evaluate(global_batch, sizes, controls, 8)

    assert found.power_w.shape == (len(profiles), 4, 3)
    for job, profile in enumerate(profiles):
        for at, size in enumerate(sizes):
            step_s, energy_j = profile.foreseen(size, global_batch[job] / size, controls, np.ceil(size / 8))
            assert found.step_time_s[job, at] == pytest.approx(step_s, rel=1e-12)
            assert found.energy_j[job, at] == pytest.approx(energy_j, rel=1e-12)


def test_a_table_holds_one_axis() -> None:
    models = [JobProfile.of("V100", "vision", axis).model for axis in ControlKind]
    with pytest.raises(DomainError, match="all by clock"):
        PerformanceTable(models)
