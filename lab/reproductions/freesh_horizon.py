"""How often plans should be made: the table ``horizon`` of ``lab/results/freesh-pools.md``.

    python -m lab.reproductions.freesh_horizon lab/results/freesh-pools.md DATA

DATA is as for ``reproductions.freesh_day``, with ``carbon/em_hourly`` and ``carbon/forecast_96h`` besides.

The authors' day is planned every 30, 15, 10 and 5 minutes, each plan from the instances of the one before. What a start
takes is paid in every row, two minutes of the instance's full power at the rate of the moment; *priced* says whether
the planner knew. *Foresight* plans with what came. *As issued* plans with what was known at the moment: demand as
``services.learning.demand`` predicts it from the steps so far, marginal rates as the last one known (there is no
forecast of them), hourly intensities as the forecast of the day's first hour. The first four hours are left out
everywhere: until then there is too little to predict demand from.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache
from pathlib import Path

import numpy as np

from lab.reproductions.freesh_day import (
    BETA,
    CLASSES,
    GAP,
    HALF_HOURS,
    PARTITIONS,
    STEP_S,
    STEPS,
    Inputs,
    half_hour,
    read,
)
from lab.reproductions.marked import fill
from services.contracts.pools import GCO2_PER_KWH_OF_LB_PER_MWH
from services.core.domain.arrays import Floats
from services.core.domain.serving import STEPS_AHEAD
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.pool_planning import plan_pools
from services.core.policies.freesh.pools import Partition, PoolPlan, PoolProblem, energy_j, switches
from services.core.profiles.traffic import Traffic
from services.learning.demand import forecast_demand
from services.solving.pools import pool_problem

MINUTES = (30, 15, 10, 5)
START_S = 120.0
FIRST_STEP = 48
DAY_STEPS = HALF_HOURS * STEPS
ZONES = ("US-CAL-CISO", "DE", "GB")
DAYS = tuple(date(2023, 2, 1) + timedelta(days=47 * index) for index in range(7))
"""Spread over the year, each another day of the week."""

Rates = Callable[[int, int], Floats]
"""(n_locations, n_steps) from a step on, as many as asked for."""


@dataclass(frozen=True)
class Day:
    """Rates and demand of a day, as they came and as they were predicted.

    Attributes:
        site: A problem of the site, whose rates and demand are not used.
        rates: (n_locations, DAY_STEPS) gCO2/kWh.
        issued_rates: As predicted at a step.
        demand_qps: (n_classes, DAY_STEPS) of each partition.
        issued_qps: (n_classes, STEPS_AHEAD) of each partition, as predicted at a step.
        start_j: (n_modes,) energy of a start.
    """

    site: PoolProblem
    rates: Floats
    issued_rates: Rates
    demand_qps: tuple[Floats, ...]
    issued_qps: Callable[[int], tuple[Floats, ...]]
    start_j: Floats


@dataclass(frozen=True)
class Outcome:
    """What a day's plans led to.

    Attributes:
        carbon_kg, energy_kwh: Starts included.
        starts: How many instances were started, the first plan's not counted.
        unserved: Share of the demand beyond the capacity, head-room not counted.
    """

    carbon_kg: float
    energy_kwh: float
    starts: int
    unserved: float


def planned_day(day: Day, steps: int, *, is_priced: bool, is_foreseen: bool) -> Outcome:
    """Plan a day every so many steps, and account for it with the rates and the demand that came."""
    none = np.zeros_like(day.site.running)
    running, before, paid = none, None, [0.0, 0.0]
    starts, lacking, wanted = 0, 0.0, 0.0
    for first in range(FIRST_STEP, DAY_STEPS, steps):
        span = slice(first, first + steps)
        demand = tuple(each[:, span] for each in day.demand_qps)
        known = demand if is_foreseen else tuple(each[:, :steps] for each in day.issued_qps(first))
        came = replace(
            day.site,
            rates=day.rates[:, span],
            partitions=_with_demand(day.site, demand),
            running=running,
            locked=none,
        )
        problem = replace(
            came,
            rates=came.rates if is_foreseen else day.issued_rates(first, steps),
            partitions=_with_demand(day.site, known),
            start_j=day.start_j if is_priced else np.zeros_like(day.start_j),
        )
        plan = plan_pools(problem, relative_gap=GAP, incumbent=before)
        started = switches(came, plan)[0] if before is not None else none
        start_j = started @ day.start_j
        paid[0] += float(energy_j(came, plan) @ came.rate_sums + start_j @ came.rates[:, 0]) / J_PER_KWH / 1_000
        paid[1] += float(energy_j(came, plan).sum() * steps + start_j.sum()) / J_PER_KWH
        starts += int(started.sum())
        assert plan.partition is not None
        short = _short(came, plan, plan.partition)
        lacking, wanted = lacking + short[0], wanted + short[1]
        running, before = plan.totals(), plan
    return Outcome(paid[0], paid[1], starts, lacking / wanted)


def _with_demand(site: PoolProblem, demand_qps: tuple[Floats, ...]) -> tuple[Partition, ...]:
    return tuple(
        replace(part, demand_qps=qps, mean_qps=None) for part, qps in zip(site.partitions, demand_qps, strict=True)
    )


def _short(came: PoolProblem, plan: PoolPlan, partition: int) -> tuple[float, float]:
    part = came.partitions[partition]
    capacity = np.einsum("nrm,rm->r", plan.instances, part.max_qps)
    return float(np.maximum(part.demand_qps - capacity[:, None], 0).sum()), float(part.demand_qps.sum())


def the_authors_day(inputs: Inputs) -> Day:
    """Return the authors' day, whose marginal rates nobody forecasts."""
    halves = [half_hour(inputs, index) for index in range(HALF_HOURS)]
    problems = [pool_problem(each) for each in halves]
    rates = GCO2_PER_KWH_OF_LB_PER_MWH * np.concatenate([each.rates for each in problems], axis=1)
    power_w = np.max([part.power_w.max(axis=0) for part in problems[0].partitions], axis=0)
    demand = tuple(
        np.concatenate([each.partitions[at].demand_qps for each in problems], axis=1) for at in range(len(PARTITIONS))
    )
    peaks = [
        np.array([[float(row[name.lower()]) / BETA for name in CLASSES] for row in inputs.demand[part]])
        for part in PARTITIONS
    ]

    @cache
    def issued(step: int) -> tuple[Floats, ...]:
        return tuple(forecast_demand(Traffic(each[:step]), None).peaks_qps.T for each in peaks)

    def last(step: int, steps: int) -> Floats:
        return np.repeat(rates[:, step - 1 : step], steps, axis=1)

    return Day(problems[0], rates, last, demand, issued, START_S * power_w)


def with_zones(day: Day, data: Path, of: date) -> Day:
    """Return the day with the hourly intensities of three zones, and their forecast from its first hour."""
    actual = np.repeat(np.array([_hours(data, zone, of) for zone in ZONES]), 12, axis=1)
    forecast = np.repeat(np.array([_issue(data, zone, of) for zone in ZONES]), 12, axis=1)

    def issued(step: int, steps: int) -> Floats:
        assert steps <= STEPS_AHEAD
        return forecast[:, step : step + steps]

    return replace(day, rates=actual, issued_rates=issued)


@cache
def _rows(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def _hours(data: Path, zone: str, of: date) -> list[float]:
    rows = _rows(data / f"carbon/em_hourly/{zone}_2021_2023.csv.gz")
    return [float(row[4]) for row in rows if row[0].startswith(of.isoformat())]


def _issue(data: Path, zone: str, of: date) -> list[float]:
    """Return the first day of the forecast that was issued for a day; each issue is 96 rows, one after the other."""
    rows = _rows(data / f"carbon/forecast_96h/{zone}_2021_2023.csv.gz")
    issue = next(at for at in range(0, len(rows), 96) if rows[at][0].startswith(of.isoformat()))
    return [float(row[1]) for row in rows[issue : issue + 24]]


def table(days: list[Day]) -> str:
    """Return what plans at each interval lead to, over the days, against half hours with the same knowledge."""
    lines = [
        "| plans made with | every | carbon | | energy | starts a day | demand not served |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = {
        "foresight": (False, True),
        "foresight, starts priced": (True, True),
        "forecasts as issued": (False, False),
        "forecasts as issued, starts priced": (True, False),
    }
    for name, (is_priced, is_foreseen) in kinds.items():
        base: float | None = None
        for minutes in MINUTES:
            found = [
                planned_day(day, minutes * 60 // STEP_S, is_priced=is_priced, is_foreseen=is_foreseen) for day in days
            ]
            carbon_kg = float(np.mean([each.carbon_kg for each in found]))
            energy_kwh = float(np.mean([each.energy_kwh for each in found]))
            base = base or carbon_kg
            lines.append(
                f"| {name} | {minutes} min | {carbon_kg:.2f} kg | {100 * (carbon_kg / base - 1):+.1f} % | "
                f"{energy_kwh:.1f} kWh | {np.mean([each.starts for each in found]):.0f} | "
                f"{100 * np.mean([each.unserved for each in found]):.2f} % |"
            )
    return "\n".join(lines)


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    day = the_authors_day(read(data))
    hourly = [with_zones(day, data, each) for each in DAYS]
    fill(page, {"horizon": lambda: table([day]), "horizon-hourly": lambda: table(hourly)})


if __name__ == "__main__":
    main()
