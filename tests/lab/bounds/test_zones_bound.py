"""The least that a choice of zones could have emitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.bounds.zones import Stretch, filled_kg, least_kg, planned_kg, stretches_of
from services.core.domain.transfers import Transfer
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions
from services.simulator.engine.grid import Grid
from services.simulator.engine.simulation import Simulation
from services.simulator.workload import ClusterSpec
from tests.support.workloads import START_S, a_trace, a_workload

HOUR_S = 3_600.0


def grids(*hourly: list[float]) -> list[Grid]:
    return [Grid(a_trace([*each, *[each[-1]] * 48]), HOUR_S, HOUR_S) for each in hourly]


def a_stretch(row: int, hours: int, watts: float) -> Stretch:
    return row, START_S, START_S + hours * HOUR_S, watts, 1


def test_the_hottest_gang_gets_the_cleanest_gpu() -> None:
    """One GPU each at 400 and 100 g: 300 Wh on the cleaner, 200 Wh on the other."""
    least = least_kg([a_stretch(0, 1, 200.0), a_stretch(1, 1, 300.0)], grids([400.0], [100.0]), [1, 1], 0.0)

    assert least == pytest.approx((0.3 * 100 + 0.2 * 400) / 1_000)


def test_filling_the_cleanest_gpus_is_the_least_for_gangs_of_like_draw_and_no_less_for_others() -> None:
    known = grids([400.0, 50.0], [100.0, 600.0])
    like = [a_stretch(0, 2, 250.0), a_stretch(1, 1, 250.0)]
    assert filled_kg(like, known, [1, 1]) == pytest.approx(least_kg(like, known, [1, 1], 0.0))
    unlike = [a_stretch(0, 2, 200.0), a_stretch(1, 1, 300.0)]
    assert filled_kg(unlike, known, [1, 1]) == pytest.approx((0.25 * 500 + 0.2 * 50) / 1_000)
    assert filled_kg(unlike, known, [1, 1]) > least_kg(unlike, known, [1, 1], 0.0)


@pytest.mark.parametrize(("move_kwh", "grams"), [(0.1, 200.0 + 0.1 * 100.0), (10.0, 700.0)])
def test_a_move_is_made_only_where_it_pays(move_kwh: float, grams: float) -> None:
    """A kilowatt for two hours; the zones swap 100 and 600 g after the first, and a move counts at the cleaner."""
    least = least_kg([a_stretch(0, 2, 1_000.0)], grids([100.0, 600.0], [600.0, 100.0]), [1, 1], move_kwh)

    assert least == pytest.approx(grams / 1_000)


@pytest.mark.parametrize(("kwh_per_gb", "grams"), [(0.01, 200.0 + 0.1 * 350.0 + 100.0 / 45), (1.0, 700.0)])
def test_a_gang_is_planned_where_its_rest_emits_least_and_moves_only_where_that_pays(
    kwh_per_gb: float, grams: float
) -> None:
    """As above, but the one move is of a whole gang, which draws while its checkpoint is under way for 80 s."""
    transfer = Transfer(kwh_per_gb=kwh_per_gb)
    known = grids([100.0, 600.0], [600.0, 100.0])

    assert planned_kg([a_stretch(0, 2, 1_000.0)], known, [1, 1], transfer) == pytest.approx(grams / 1_000)
    assert planned_kg([a_stretch(0, 2, 1_000.0)], known, [1, 0], transfer) == pytest.approx(0.7)


def test_a_run_is_never_below_its_bound() -> None:
    traces = [replace(a_trace([each] * 48), zone=zone) for zone, each in (("AA", 400.0), ("BB", 100.0))]
    jobs = a_workload([(900.0 * at, 5_000.0 + 700.0 * at, 1) for at in range(8)])
    options = EngineOptions()
    run = Simulation(
        build_policy("joint", {}), jobs, ClusterSpec.parse("AA=1x2:A100,BB=1x2:A100"), traces[0], options,
        elsewhere=traces[1:],
    )  # fmt: skip
    stretches = stretches_of(run)
    result = run.run({})

    spent_kwh = sum(watts * (end_s - begin_s) for _, begin_s, end_s, watts, _ in stretches) / 3.6e6
    moved_kwh = options.transfer.energy_kwh * sum(of["checkpoints"] for of in result.zones.values())
    assert spent_kwh == pytest.approx(result.energy_kwh - result.idle_energy_kwh - moved_kwh)
    least = least_kg(stretches, [Grid(trace, HOUR_S, HOUR_S) for trace in traces], [2, 2], options.transfer.energy_kwh)
    assert 0 < least <= result.carbon_kg
