"""Which parameters points can tell, what is said of the others, and where a search for them begins."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.domain.arrays import Floats
from services.core.profiles import terms
from services.core.profiles.observations import Observations
from services.core.profiles.terms import DRAW, HIGH, LOW, energy_terms, throughput_terms
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, Times, powers, times
from tests.support.performance import CLOCKS_MHZ, grid, measured
from tests.support.performance import SPEED as PLANTED

LOCAL = {f"{term}_sync_local" for term in ("alpha", "kappa", "beta", "theta")}
NODE = {f"{term}_sync_node" for term in ("alpha", "kappa", "beta", "theta")}
CLOCK = {"kappa_grad", "alpha_sync_local", "kappa_sync_local", "alpha_sync_node", "kappa_sync_node"}


@pytest.mark.parametrize(
    ("where", "fixed"),
    [
        (grid(), set()),
        (grid(clocks=(900,)), CLOCK),
        (grid(batches=(32,)), {"beta_io", "beta_grad"}),
        (grid(gpus=(1, 2, 8)), NODE),
        (grid(gpus=(16, 32)), LOCAL),
        (grid(gpus=(1, 4)), {"kappa_sync_local", "beta_sync_local"} | NODE),
        (grid(gpus=(2, 4, 16)), {"kappa_sync_node", "beta_sync_node"}),
        (grid(gpus=(1,)), LOCAL | NODE | {"gamma2"}),
        (grid(gpus=(1, 2, 4, 16, 32), batches=(32,), clocks=(900,)), CLOCK | {"beta_io", "beta_grad"}),
        (
            grid(gpus=(1,), batches=(32,), clocks=(900, 900)),
            CLOCK | LOCAL | NODE | {"beta_io", "beta_grad", "gamma1", "gamma2"},
        ),
    ],
)
def test_the_times_that_points_cannot_tell_are_held(
    where: tuple[Floats, Floats, Floats, Floats], fixed: set[str]
) -> None:
    found = throughput_terms(measured(where))

    assert set(found.fixed) == fixed
    assert {name for name, free in zip(terms.SPEED, found.free, strict=True) if not free} == fixed
    held = dict(zip(terms.SPEED, found.hold(np.full((1, 15), 7.0))[0], strict=True))
    assert held == {name: (1.0 if name.startswith("gamma") else 0.0) if name in fixed else 7.0 for name in held}


def test_why_a_parameter_is_held_is_said() -> None:
    one = throughput_terms(measured(grid(gpus=(1,), batches=(32,), clocks=(900,)))).fixed
    several = throughput_terms(measured(grid(gpus=(4, 16)))).fixed

    assert one["kappa_grad"] == "clock_mhz is 900 in all points"
    assert one["beta_grad"] == "local_batch is 32 in all points"
    assert one["gamma1"] == "nothing tells the parts of a step apart"
    assert one["gamma2"] == "no point has several GPUs"
    assert one["theta_sync_local"] == "no point has several GPUs on one node"
    assert one["theta_sync_node"] == "no point is on several nodes"
    assert several["beta_sync_local"] == "all points of the local case have 4 GPUs"
    assert several["kappa_sync_node"] == "all points of the node case have 16 GPUs"
    absent = throughput_terms(Observations.of([0.1, 0.2], gpus=[1, 1], local_batch=[16, 32])).fixed
    assert absent["kappa_grad"] == "clock_mhz is absent"


BATCH = {f"{name}_{side}g" for name in ("alpha", "theta", "beta") for side in "lh"}
SYNC = {"a_ls", "b_ls", "a_hs", "b_hs", "c_hs", "d_hs"}


@pytest.mark.parametrize(
    ("where", "fixed"),
    [
        (grid(), set()),
        (grid(clocks=(900,)), {"a_lg", "a_ls", *HIGH}),
        (grid(batches=(32,)), BATCH),
        (grid(gpus=(1,)), SYNC),
    ],
)
def test_the_powers_that_points_cannot_tell_are_held(
    where: tuple[Floats, Floats, Floats, Floats], fixed: set[str]
) -> None:
    found = energy_terms(measured(where))

    assert set(found.fixed) == fixed | {"f0_mhz"}
    assert {name for name, free in zip(DRAW, found.free, strict=True) if not free} == fixed | {"f0_mhz"}
    held = dict(zip(DRAW, found.hold(np.full((1, 21), 7.0))[0], strict=True))
    ones = {"beta_lg", "beta_hg", "theta_lg", "theta_hg"}
    assert held == {name: float(name in ones) if name in fixed else 7.0 for name in held}


def test_a_side_of_the_breaking_point_without_points_is_not_fitted() -> None:
    seen = measured(grid(clocks=(600, 700, 800)))
    both = energy_terms(seen)

    assert set(np.array(DRAW)[~both.broken_at(700, seen).free]) == {"f0_mhz"}
    assert set(np.array(DRAW)[~both.broken_at(600, seen).free]) == {"f0_mhz", *LOW}
    assert set(np.array(DRAW)[~both.broken_at(801, seen).free]) == {"f0_mhz", *HIGH}


def test_what_is_believed_is_held_but_for_the_breaking_point() -> None:
    belief = np.arange(1.0, 22.0)
    found = energy_terms(measured(grid(gpus=(1,))), believed=belief)

    held = dict(zip(DRAW, found.hold(np.zeros((1, 21)))[0], strict=True))
    assert {name: value for name, value in held.items() if value} == {name: DRAW.index(name) + 1 for name in SYNC}


def test_bounds_are_those_of_the_models() -> None:
    low, high = (dict(zip(terms.SPEED, each, strict=True)) for each in terms.throughput_bounds())
    assert {name for name in low if low[name] == 1 and high[name] < np.inf} == {"gamma1", "gamma2"}
    assert sum(low.values()) == 2
    low, high = (dict(zip(DRAW, each, strict=True)) for each in terms.energy_bounds())
    assert {name for name in low if low[name] == 1 and high[name] < np.inf} == {"theta_lg", "theta_hg"}
    assert sum(low.values()) == 2


@pytest.mark.parametrize("name", [name for name in terms.SPEED if not name.startswith("gamma")])
def test_a_times_natural_size_makes_its_term_a_typical_step(name: str) -> None:
    seen = measured(grid(gpus=(1, 2, 4, 4, 8, 16, 16, 32)))
    unit = dict(zip(terms.SPEED, terms.throughput_units(seen), strict=True))[name]
    alone = ThroughputParameters(*[unit if each == name else each.startswith("gamma") for each in terms.SPEED])
    per_node, nodes = float(np.median(seen.gpus / seen.nodes)), 4 if name.endswith("node") else 1
    gpus = 32 if name.endswith(("local", "node")) else per_node

    step = times(alone, gpus, np.median(seen.local_batch), np.median(seen.control), nodes)

    assert float(step.iter_s) == pytest.approx(float(np.median(seen.seconds_per_iteration)))


@pytest.mark.parametrize("name", [name for name in DRAW if name.startswith(("a_", "b_", "c_hg", "c_hs", "d_"))])
def test_a_powers_natural_size_makes_its_term_a_typical_board(name: str) -> None:
    seen = measured(grid())
    unit = dict(zip(DRAW, terms.energy_units(seen), strict=True))[name]
    ones = {"beta_lg": 1.0, "beta_hg": 1.0, "theta_lg": 1.0, "theta_hg": 1.0, name: unit}
    clock = float(np.median(seen.control))
    alone = EnergyParameters(**dict.fromkeys(DRAW, 0.0) | ones)
    alone = alone._replace(f0_mhz=2 * clock if name[2] == "l" else clock / 2)

    drawn = powers(alone, 64, clock)

    assert float(drawn.grad_w + drawn.sync_w) == pytest.approx(float(np.median(seen.power_w)))


def test_where_nothing_overlaps_the_first_start_is_the_job_itself() -> None:
    plain = PLANTED._replace(alpha_io=0.0, gamma1=1.0, gamma2=1.0)  # only the sum of both constants can be told
    seen = measured(grid(clocks=CLOCKS_MHZ[::2]), speed=plain)
    units = terms.throughput_units(seen)

    added, floor, reading = terms.throughput_starts(seen, throughput_terms(seen))

    found = dict(zip(terms.SPEED, added - 0.03 * units, strict=True))
    constants = found.pop("alpha_io") + found.pop("alpha_grad")
    assert constants == pytest.approx(plain.alpha_grad, rel=1e-3)
    wanted = plain._asdict()
    assert all(found[name] == pytest.approx(wanted[name], rel=1e-3) for name in found if not name.startswith("gamma"))
    quickest = 0.8 * seen.seconds_per_iteration.min()
    assert (floor[0], reading[0]) == pytest.approx((quickest, quickest))
    assert floor[1:13].tolist() == added[1:13].tolist()
    assert (added[-1], floor[-1], reading[-1]) == (1.3, 4.0, 2.0)


@pytest.mark.parametrize("low", [True, False])
def test_where_the_batch_does_not_matter_the_start_is_what_the_board_draws(low: bool) -> None:
    planted = dict.fromkeys(DRAW, 0.0) | {"beta_lg": 1.0, "beta_hg": 1.0, "theta_lg": 1.0, "theta_hg": 1.0}
    planted |= {"a_lg": 0.1, "b_lg": 30.0, "a_ls": 0.05, "b_ls": 10.0, "static_l_w": 45.0} if low else {}
    planted |= {"a_hg": 6e-8, "c_hg": 0.05, "d_hg": 20.0, "a_hs": 3e-8, "c_hs": 0.02, "c_h": 0.06} if not low else {}
    f0 = 2_000.0 if low else 100.0
    draw = EnergyParameters(**planted)._replace(f0_mhz=f0)
    where = grid(clocks=CLOCKS_MHZ[::2])
    seen = measured(where, draw=draw)
    step: Times = times(PLANTED, *where)

    (start,) = terms.energy_starts(seen, step, f0)

    found = dict(zip(DRAW, start, strict=True))
    added = dict(zip(DRAW, 0.02 * terms.energy_units(seen), strict=True))  # so that each has a slope to leave 0 by
    for name in ("a_lg", "b_lg", "a_ls", "b_ls", "static_l_w", "a_hg", "b_hg", "c_hg", "d_hg", "a_hs", "c_hs", "c_h"):
        assert found[name] - added[name] == pytest.approx(planted[name], rel=1e-3, abs=1e-3 * added[name]), name
    for side in "lh":  # its part is 1 at the usual batch, half of it by the batch
        batch = found[f"alpha_{side}g"] * np.log(np.median(seen.local_batch) + 2)
        assert (batch, found[f"beta_{side}g"], found[f"theta_{side}g"]) == pytest.approx((0.5, 0.5, 2.0))
