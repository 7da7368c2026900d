"""Prices of electricity, and what ``joint`` decides by money, by carbon, or by both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.plan import Plan, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot
from services.core.domain.errors import DomainError
from services.core.domain.prices import PriceCurve
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.costs import counted
from services.core.policies.joint.policy import Joint
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, hourly_curve

HOUR_S = 3_600.0
HOURS = 48
START_S = NOON_S // HOUR_S * HOUR_S - 12 * HOUR_S
NOW_S = START_S + 12 * HOUR_S

prices = st.lists(st.integers(-20, 500).map(lambda cents: cents / 1_000.0), min_size=24, max_size=HOURS)
intensities = st.lists(st.integers(1, 900).map(float), min_size=HOURS, max_size=HOURS)
jobs = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.sampled_from([0.0, 150.0, 300.0])),
    min_size=1,
    max_size=5,
)


def seen(rows: list[tuple[int, int, int, float]], grams: list[float], per_kwh: list[float] | None) -> Snapshot:
    """Return a cluster of two nodes at noon, with jobs that need some hours and must be done within others."""
    made: list[JobRow] = [
        a_job(f"j{at}", max_gpus=most, remaining_s=need * HOUR_S, deadline_s=NOW_S + within * HOUR_S, gpu_power_w=watts)
        for at, (need, within, most, watts) in enumerate(rows)
    ]
    curve = hourly_curve(grams, start_s=START_S)
    snapshot = a_snapshot(made, [a_node(), a_node("n1")], curve=curve, now_s=NOW_S)
    known = None if per_kwh is None else PriceCurve(START_S, np.array(per_kwh))
    return replace(snapshot, outlooks=(replace(snapshot.outlooks[0], prices=known),))


def planned(snapshot: Snapshot, tonne_price: float | None) -> tuple[Plan, object]:
    policy = Joint(JointConfig(tonne_price=tonne_price, hour_share=0.05))
    result = run_cycle(policy, snapshot, policy.initial())
    return result.plan, result.memory


@given(rows=jobs, grams=intensities, others=intensities, per_kwh=prices)
def test_where_carbon_costs_nothing_money_alone_plans(
    rows: list[tuple[int, int, int, float]], grams: list[float], others: list[float], per_kwh: list[float]
) -> None:
    assert planned(seen(rows, grams, per_kwh), 0.0) == planned(seen(rows, others, per_kwh), 0.0)


@given(rows=jobs, grams=intensities, per_kwh=prices)
def test_twice_the_prices_change_no_plan_by_money_alone(
    rows: list[tuple[int, int, int, float]], grams: list[float], per_kwh: list[float]
) -> None:
    doubled = [2 * price for price in per_kwh]
    assert planned(seen(rows, grams, per_kwh), 0.0) == planned(seen(rows, grams, doubled), 0.0)


@given(rows=jobs, grams=intensities, per_kwh=prices)
def test_prices_change_nothing_unless_they_are_to_count(
    rows: list[tuple[int, int, int, float]], grams: list[float], per_kwh: list[float]
) -> None:
    assert planned(seen(rows, grams, per_kwh), None) == planned(seen(rows, grams, None), None)
    assert planned(seen(rows, grams, None), 80.0) == planned(seen(rows, grams, None), None)


def test_the_cheap_hours_and_the_green_ones_by_what_a_tonne_costs() -> None:
    """The hour from 16:00 is the cheapest, that from 18:00 the greenest; noon is neither."""
    grams, per_kwh = [400.0] * HOURS, [0.40] * HOURS
    grams[18], per_kwh[16] = 20.0, 0.10
    snapshot = seen([(1, 12, 1, 300.0)], grams, per_kwh)

    def starts_at(tonne_price: float | None) -> int:
        return next(
            hour
            for hour in range(12, 24)
            if any(
                isinstance(action, Start)
                for action in planned(replace(snapshot, now_s=START_S + hour * HOUR_S), tonne_price)[0].actions
            )
        )

    assert [starts_at(price) for price in (None, 0.0, 100.0, 2_000.0)] == [18, 16, 16, 18]


def test_explained_hours_follow_the_costs_and_their_grams_the_grid() -> None:
    per_kwh = [0.40] * HOURS
    per_kwh[16] = 0.10
    snapshot = seen([(1, 12, 1, 300.0)], [100.0 + hour for hour in range(HOURS)], per_kwh)
    policy = Joint(JointConfig(tonne_price=0.0, hour_share=0.05))
    memory = run_cycle(policy, snapshot, policy.initial()).memory
    hours = next(each for each in policy.levers(snapshot, memory, snapshot.jobs.ids[0]) if each.lever.value == "hours")
    assert hours.carbon_saved_gco2 is not None
    assert -2.0 < hours.carbon_saved_gco2 < -1.0, "0.35 kWh in an hour that is 4 g/kWh dirtier"


def test_costs_have_steps_where_either_changes_and_are_never_below_nothing() -> None:
    snapshot = seen([], [100.0, 200.0] * 24, [0.1, -0.5, 0.3])
    (costs,) = counted(snapshot, 1_000.0).outlooks
    assert costs.curve.intensity_gco2_per_kwh[:4].tolist() == pytest.approx([0.2, 0.0, 0.4, 0.3])
    low = replace(snapshot.outlooks[0], low=np.full(48, 10.0), high=np.full(48, 900.0))
    (costs,) = counted(replace(snapshot, outlooks=(low,)), 1_000.0).outlooks
    assert costs.low is not None
    assert costs.low[:3].tolist() == pytest.approx([0.11, 0.0, 0.31])


def test_prices_beyond_what_is_known_are_those_of_the_same_hour_before() -> None:
    curve = PriceCurve(0.0, np.arange(30.0))
    at = [-5.0, 0.0, 3_599.0, 3_600.0, 29 * HOUR_S, 30 * HOUR_S, 53 * HOUR_S, 54 * HOUR_S]
    assert curve.at(np.array(at)).tolist() == [0, 0, 0, 1, 29, 6, 29, 6]
    few = PriceCurve(0.0, np.array([7.0, 8.0]))
    assert few.at(np.array([2 * HOUR_S, 26 * HOUR_S])).tolist() == [7.0, 7.0]
    assert curve.cut(2.5 * HOUR_S, 4 * HOUR_S).per_kwh.tolist() == [2.0, 3.0]
    assert curve.cut(90 * HOUR_S, 95 * HOUR_S).per_kwh.tolist() == [29.0]


def test_gaps_of_prices_have_those_of_the_day_before() -> None:
    known = {hour * HOUR_S: float(hour) for hour in (0, 1, 2, 23, 24, 26)}
    filled = PriceCurve.of(known)
    assert filled is not None
    assert filled.per_kwh[[3, 22, 23, 25, 26]].tolist() == [2.0, 2.0, 23.0, 1.0, 26.0]
    assert PriceCurve.of({}) is None
    for wrong in (PriceCurve, lambda *_: PriceCurve(1.0, np.ones(1)), lambda *_: PriceCurve(0.0, np.array([np.nan]))):
        with pytest.raises(DomainError):
            wrong(0.0, np.empty(0))
