"""How often plans are made: what a day is charged for, and what is known at a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.reproductions.freesh_horizon import DAY_STEPS, Day, planned_day
from services.contracts.pools import PoolsRequest
from services.solving.pools import pool_problem

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples" / "pools" / "freesh-first.json").read_text())


@pytest.fixture
def day() -> Day:
    """The same five minutes all day long, foreseen as they come."""
    site = pool_problem(PoolsRequest.model_validate(EXAMPLE | {"partition": None, "negative_rates": "frugal"}))
    demand = tuple(np.repeat(part.demand_qps[:, :1], DAY_STEPS, axis=1) for part in site.partitions)
    rates = np.repeat(np.array([[100.0], [200.0], [300.0]]), DAY_STEPS, axis=1)
    return Day(
        site=site,
        rates=rates,
        issued_rates=lambda step, steps: rates[:, step : step + steps],
        demand_qps=demand,
        issued_qps=lambda step: tuple(each[:, step : step + 6] for each in demand),
        start_j=120.0 * site.partitions[0].power_w.max(axis=0),
    )


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_day_without_change_needs_no_start_however_often_it_is_planned(day: Day, is_foreseen: bool) -> None:
    seldom, often = (planned_day(day, steps, is_priced=True, is_foreseen=is_foreseen) for steps in (6, 3))
    assert (seldom.starts, often.starts, often.unserved) == (0, 0, 0.0)
    assert often.energy_kwh == pytest.approx(seldom.energy_kwh)
    assert often.carbon_kg == pytest.approx(seldom.carbon_kg)


def test_starts_are_paid_whether_or_not_the_planner_knew(day: Day) -> None:
    rates = day.rates.copy()
    turned = np.arange(DAY_STEPS) // 6 % 2 == 1  # the clean place changes every half hour
    rates[:, turned] = rates[::-1, turned]
    turning = replace(day, rates=rates)
    unknown, known = (planned_day(turning, 6, is_priced=priced, is_foreseen=True) for priced in (False, True))
    free = planned_day(replace(turning, start_j=np.zeros_like(day.start_j)), 6, is_priced=True, is_foreseen=True)
    assert free.starts == unknown.starts > 0
    assert known.starts <= unknown.starts
    assert known.carbon_kg <= unknown.carbon_kg
    assert unknown.energy_kwh > free.energy_kwh, "the same plans, and their starts"


def test_demand_beyond_the_forecast_is_not_served(day: Day) -> None:
    short = replace(day, issued_qps=lambda step: tuple(each[:, step : step + 6] / 2 for each in day.demand_qps))
    found = planned_day(short, 6, is_priced=True, is_foreseen=False)
    assert 0 < found.unserved < 0.5
