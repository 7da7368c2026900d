"""The least carbon of any schedule, against hand computation, merit order and exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.bounds.least_carbon import CarbonBoundProblem, Work, carbon_bound
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, SolveStatus
from services.core.solvers.model import ModelBuilder
from tests.support.builders import hourly_curve
from tests.support.exhaustive import exhaustive

START_S = 0.0


def a_problem(intensities: list[float], capacity: float | list[float], *work: Work, **site: float):
    return CarbonBoundProblem(
        hourly_curve(intensities, start_s=START_S), np.array(capacity, dtype=np.float64), work, **site
    )


def test_work_goes_to_the_greenest_hours() -> None:
    # 6 GPU-hours of 500 W on 4 GPUs: 4 in the hour of 100 g, 2 in that of 200 g.
    found = carbon_bound(a_problem([300, 100, 200], 4, Work(6, 500)))
    assert found.status is SolveStatus.OPTIMAL
    assert found.carbon_gco2 == pytest.approx(0.5 * (4 * 100 + 2 * 200))
    assert (found.busy_energy_kwh, found.idle_energy_kwh) == (pytest.approx(3), 0)
    assert dict(zip(found.step_index.tolist(), found.gpu_hours.tolist(), strict=True)) == {1: 4, 2: 2}


def test_hungry_work_takes_the_greener_of_two_full_hours() -> None:
    # A full cluster: nothing to shift, only to swap. 300 W in the hour of 100 g, 100 W in that of 200 g.
    found = carbon_bound(a_problem([200, 100], 1, Work(1, 100), Work(1, 300)))
    assert found.carbon_gco2 == pytest.approx(0.3 * 100 + 0.1 * 200)
    assert found.work_index.tolist() == [0, 1]
    assert found.step_index.tolist() == [0, 1]


def test_idle_gpus_and_the_site_count() -> None:
    # 2 GPUs, 2 h, idle at 50 W: work moves only the difference of 200 W.
    found = carbon_bound(a_problem([400, 100], 2, Work(2, 250), idle_power_w=50, pue=1.5))
    assert found.carbon_gco2 == pytest.approx(1.5 * (0.25 * 2 * 100 + 0.05 * 2 * 400))
    assert found.idle_energy_kwh == pytest.approx(1.5 * 0.1)


def test_windows_and_widths_bind() -> None:
    # Released after the greenest hour, half an hour into the next; one GPU at most.
    late = Work(1.5, 1000, release_s=1.5 * 3600, max_gpus=1)
    found = carbon_bound(a_problem([10, 100, 300, 200], 8, late))
    assert found.carbon_gco2 == pytest.approx(0.5 * 100 + 1.0 * 200)
    early = Work(3, 1000, deadline_s=2 * 3600)
    assert carbon_bound(a_problem([300, 200, 10], 2, early)).carbon_gco2 == pytest.approx(2 * 200 + 1 * 300)


def test_a_negative_marginal_rate_is_taken_as_it_is() -> None:
    assert carbon_bound(a_problem([-50, 100], 4, Work(2, 500))).carbon_gco2 == pytest.approx(-50)


def test_what_does_not_fit_is_an_answer_with_the_least_shortfall() -> None:
    found = carbon_bound(a_problem([100, 100], 1, Work(1, 100, deadline_s=3600), Work(2, 100)))
    assert (found.status, found.carbon_gco2) == (SolveStatus.INFEASIBLE, None)
    assert found.shortfall_gpu_hours.sum() == pytest.approx(1)
    assert found.gpu_hours.sum() == pytest.approx(2)
    outside = carbon_bound(a_problem([100], 1, Work(1, 100, release_s=7200)))
    assert outside.shortfall_gpu_hours.tolist() == [1]


@pytest.mark.parametrize("backend", [Backend.CBC, Backend.GUROBI])
def test_the_bound_does_not_depend_on_who_solves_it(backend: Backend) -> None:
    problem = a_problem([300, 120, 80, 250, 90], 3, Work(4, 300, deadline_s=9000), Work(5, 120), idle_power_w=40)
    assert carbon_bound(problem, backend).carbon_gco2 == pytest.approx(carbon_bound(problem).carbon_gco2)


@settings(max_examples=50, deadline=None)
@given(
    intensities=st.lists(st.floats(-100, 900), min_size=1, max_size=48),
    share=st.floats(0.01, 1),
    idle=st.floats(0, 300),
)
def test_one_class_fills_the_hours_in_merit_order(intensities: list[float], share: float, idle: float) -> None:
    gpus, hours = 8.0, len(intensities)
    work = Work(share * gpus * hours, 300)
    found = carbon_bound(a_problem(intensities, gpus, work, idle_power_w=idle))
    filled = np.clip(work.gpu_hours - gpus * np.arange(hours), 0, gpus)
    expected = 0.3 * np.sort(intensities) @ filled + idle / 1000 * np.sort(intensities) @ (gpus - filled)
    assert found.carbon_gco2 == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_whole_schedule_is_better(data: st.DataObject) -> None:
    """With whole capacities, windows and amounts some optimum is whole (a transport problem), so search them all."""
    steps = data.draw(st.integers(1, 3))
    intensities = data.draw(st.lists(st.integers(-50, 500), min_size=steps, max_size=steps))
    capacity = data.draw(st.lists(st.integers(0, 3), min_size=steps, max_size=steps))
    work = []
    for _ in range(data.draw(st.integers(1, 2))):
        first = data.draw(st.integers(0, steps - 1))
        last = data.draw(st.integers(first + 1, steps))
        power = data.draw(st.sampled_from([100, 200, 400]))
        amount = data.draw(st.integers(1, 3))
        work.append(Work(amount, power, 3600.0 * first, 3600.0 * last, data.draw(st.sampled_from([None, 1, 2]))))
    found = carbon_bound(a_problem([float(c) for c in intensities], [float(g) for g in capacity], *work))
    builder = ModelBuilder()
    for item in work:
        power_kw, widest = item.power_w / 1000, item.max_gpus or 3
        inside = [item.release_s <= 3600 * t and 3600 * (t + 1) <= item.deadline_s for t in range(steps)]
        upper = [min(g, widest) if t else 0 for g, t in zip(capacity, inside, strict=True)]
        cost = [power_kw * c for c in intensities]
        columns = builder.add_variables(steps, upper=upper, cost=cost, integer=True)
        builder.add_rows(1, (0, columns, 1), lower=item.gpu_hours, upper=item.gpu_hours)
    every = np.arange(steps * len(work))
    builder.add_rows(steps, (every % steps, every, 1), upper=capacity)
    truth = exhaustive(builder.build())
    assert found.status is truth.status
    if truth.objective is not None:
        assert found.carbon_gco2 == pytest.approx(truth.objective, abs=1e-6)


def test_what_cannot_be_is_refused() -> None:
    for broken in ({"gpu_hours": 0}, {"power_w": -1}, {"max_gpus": 0}, {"gpu_hours": float("inf")}):
        with pytest.raises(DomainError):
            Work(**{"gpu_hours": 1, "power_w": 1, **broken})
    for site in ({"pue": 0.9}, {"idle_power_w": -1}):
        with pytest.raises(DomainError):
            a_problem([1], 1, Work(1, 1), **site)
    for capacity in ([1, 2], -1, float("nan")):
        with pytest.raises(DomainError):
            a_problem([1], capacity, Work(1, 1))
