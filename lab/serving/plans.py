"""The plans of the simulated time: as the planner of pools makes them, from predicted traffic and intensities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lab.serving.rates import PlaceRates
from lab.serving.requests import RequestTrace
from lab.serving.site import Site
from services.contracts.pools import PoolsRequest, PoolsResult
from services.core.domain.arrays import Floats, Ints
from services.core.domain.serving import STEPS_AHEAD, WINDOW_S
from services.core.policies.freesh.pool_planning import plan_pools
from services.core.profiles.traffic import WINDOWS, Traffic
from services.simulator.raw import TraceFormatError
from services.solving.pools import pool_problem, pools_result

STEP_S = WINDOW_S * WINDOWS
PERIOD_S = STEP_S * STEPS_AHEAD
"""Half an hour."""


class Forecast(StrEnum):
    """How the peaks of the next plan's time are predicted."""

    PERFECT = "perfect"
    LAST = "last"
    LEARNED = "learned"


@dataclass(frozen=True)
class PlannedInstance:
    """Instances of one mode, in one place, for one class."""

    place: str
    request_class: str | None
    mode: str
    count: int


@dataclass(frozen=True)
class HalfHour:
    """A plan in force.

    Attributes:
        from_s: When it begins, seconds since the simulation's start.
        partition: The one that tells requests apart.
        instances: What runs.
        result: The planner's answer.
    """

    from_s: float
    partition: str
    instances: tuple[PlannedInstance, ...]
    result: PoolsResult


def make_plans(
    site: Site,
    rates: PlaceRates,
    trace: RequestTrace,
    classes: Mapping[str, Ints],
    *,
    forecast: Forecast = Forecast.PERFECT,
    replan: bool = True,
) -> list[HalfHour]:
    """Return the plans of all half hours in which requests arrive, or of the intervals that the pool states.

    Args:
        site: The pool.
        rates: Of its places, from the simulation's start; steps must divide five minutes, or be multiples of them.
        trace: The requests that are planned for.
        classes: The class of each of them, by partition.
        forecast: ``perfect`` knows the peaks of the plan's time; ``last`` takes the greatest of the half hour before,
            and ``learned`` those that the product's forecasters predict. The first plan has no history: its peaks are
            known in every case.
        replan: Whether to plan more than once.

    Raises:
        TraceFormatError: The rates' steps do not fit, or no instance can be planned at first.
    """
    steps = site.spec.plan_steps
    period_s = steps * STEP_S
    periods = max(int(np.ceil((trace.length_s + 1e-9) / period_s)), 1) if replan else 1
    peaks = {name: _peaks(trace, of, len(site.class_names(name)), periods * steps) for name, of in classes.items()}
    found: list[HalfHour] = []
    for first in range(0, periods * steps, steps):
        demand = {name: _predicted(each, first, steps, forecast) for name, each in peaks.items()}
        request = _problem(site, _step_rates(rates, first, steps), demand, found[-1].result if found else None)
        problem = pool_problem(request)
        plan = plan_pools(problem, request.solver, time_limit_s=request.time_limit_s, relative_gap=request.gap)
        result = pools_result(request, problem, plan)
        if result.partition is None or not result.instances:
            if not found:
                raise TraceFormatError(
                    f"the first {period_s / 60:g} minutes have no plan with instances: {result.status.value}"
                )
            continue
        instances = tuple(
            PlannedInstance(each.location, each.request_class, each.mode, each.count) for each in result.instances
        )
        found.append(HalfHour(first * STEP_S, result.partition, instances, result))
    return found


def _peaks(trace: RequestTrace, class_of: Ints, n_classes: int, steps: int) -> Traffic:
    windows = steps * WINDOWS
    at = np.minimum((trace.arrival_s / WINDOW_S).astype(np.int64), windows - 1)
    counts = np.bincount(at * n_classes + class_of, minlength=windows * n_classes)[: windows * n_classes]
    return Traffic.of_windows(counts.astype(np.int64).reshape(-1, n_classes))


def _predicted(traffic: Traffic, first: int, steps: int, forecast: Forecast) -> Floats:
    """Return the peaks to plan for: (steps, n_classes)."""
    if forecast is Forecast.PERFECT or first == 0:
        return traffic.peaks_qps[first : first + steps]
    if forecast is Forecast.LAST:
        greatest = traffic.peaks_qps[max(first - STEPS_AHEAD, 0) : first].max(axis=0)
        return np.tile(greatest, (steps, 1))
    from services.learning.demand import forecast_demand  # here: it takes a second to import

    known = traffic.until(first)
    return forecast_demand(known, known.peaks_qps.max(axis=0)).peaks_qps[:steps]


def _step_rates(rates: PlaceRates, first: int, steps: int) -> Floats:
    """Return the means of five-minute steps: (n_places, steps)."""
    if rates.step_s >= STEP_S:
        at = (STEP_S * (first + np.arange(steps)) // rates.step_s).astype(np.int64)
        return rates.gco2_per_kwh[:, at % rates.gco2_per_kwh.shape[1]]
    within = STEP_S / rates.step_s
    if abs(within - round(within)) > 1e-6:
        raise TraceFormatError(f"steps of {rates.step_s:g} s in the carbon data do not divide five minutes")
    fine = rates.of_steps(round(first * within), round(steps * within))
    return fine.reshape(len(fine), steps, round(within)).mean(axis=2)


def _problem(site: Site, intensity: Floats, demand: Mapping[str, Floats], before: PoolsResult | None) -> PoolsRequest:
    spec = site.spec
    partitions = [each for each in spec.partitions if each.name in demand]
    document = {
        **spec.model_dump(include={"objective", "negative_rates", "gap", "head_room", "solver", "time_limit_s"}),
        "step_s": STEP_S,
        "locations": [
            {
                "name": place.name,
                "gpus": place.gpus,
                "intensity": row.tolist(),
                "price_per_kwh": None if place.price_per_kwh is None else [place.price_per_kwh] * intensity.shape[1],
            }
            for place, row in zip(spec.places, intensity, strict=True)
        ],
        "modes": [
            {
                "name": mode.name,
                "gpus": {mode.gpu_model: mode.gpus},
                "idle_w": mode.idle_w,
                **dict(zip(("start_wh", "stop_wh"), spec.switching_wh(mode), strict=True)),
            }
            for mode in spec.modes
        ],
        "partitions": [
            {
                "name": part.name,
                "classes": [
                    next(each for each in part.classes if each.name == name).model_dump()
                    | {"demand_qps": demand[part.name][:, at].tolist()}
                    for at, name in enumerate(site.class_names(part.name))
                ],
            }
            for part in partitions
        ],
        "regions": [region.model_dump() for region in spec.regions],
        "running": [] if before is None else _running(before),
    }
    return PoolsRequest.model_validate(document)


def _running(before: PoolsResult) -> Sequence[Mapping[str, object]]:
    return [{"location": each.location, "mode": each.mode, "instances": each.count} for each in before.instances]
