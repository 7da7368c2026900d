"""The optimizer's kind ``carbon-bound``: from a request, through ``lab.bounds.least_carbon``, to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from lab.bounds import least_carbon as carbon
from optimizer_service.kinds import BoundKind, Sources
from services.contracts.carbon import IntensityForecast, IntensityPoint, curve_of
from services.contracts.codes import ProblemCode
from services.contracts.optimize import (
    MAX_CELLS,
    CarbonBoundProblem,
    CarbonBoundRequest,
    CarbonBoundResult,
    ClassSchedule,
    IntensitySeries,
    IntensitySource,
)
from services.contracts.problems import FieldError
from services.core.domain.errors import DomainError
from services.core.domain.solving import Report, unreported
from services.core.domain.units import S_PER_HOUR
from services.kit.problems import ProblemError


async def resolve(request: CarbonBoundRequest, sources: Sources) -> CarbonBoundProblem:
    """Return the problem of a request, with the forecast it asks for."""
    source = None
    intensity = request.intensity
    if intensity is None:
        assert request.zone is not None
        horizon_s = request.horizon_h * S_PER_HOUR
        forecast = await sources.forecast(request.zone, request.signal, horizon_s, request.clock)
        intensity = _whole_steps(forecast)
        source = IntensitySource(
            zone=forecast.zone,
            provider=forecast.provider,
            method=forecast.method,
            generated_at=forecast.generated_at,
            is_stale=forecast.is_stale,
        )
    problem = CarbonBoundProblem(
        capacity_gpus=request.capacity_gpus,
        capacity_gpus_by_step=request.capacity_gpus_by_step,
        work=request.work,
        pue=request.pue,
        solver=request.solver,
        time_limit_s=request.time_limit_s,
        intensity=intensity,
        idle_power_w=request.idle_w,
        source=source,
    )
    try:
        cells = _in_core(problem).cells
    except DomainError as error:  # such as steps of a microsecond, too short to tell apart
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, str(error)) from error
    if cells > MAX_CELLS:
        detail = f"The work's windows cover {cells} steps, more than {MAX_CELLS}; merge classes, or cut the horizon."
        raise ProblemError(
            422, ProblemCode.INVALID_REQUEST, detail, errors=[FieldError(pointer="/work", detail=detail)]
        )
    return problem


def solve(problem: CarbonBoundProblem, report: Report = unreported) -> CarbonBoundResult:
    """Return the bound, and the schedule that reaches it."""
    found = carbon.carbon_bound(_in_core(problem), problem.solver, time_limit_s=problem.time_limit_s, report=report)
    return CarbonBoundResult(
        status=found.status,
        solver=found.solver,
        objective=found.carbon_gco2,
        bound=found.carbon_gco2,
        gap=None if found.carbon_gco2 is None else 0.0,
        note=found.note,
        carbon_gco2=found.carbon_gco2,
        busy_energy_kwh=found.busy_energy_kwh,
        idle_energy_kwh=found.idle_energy_kwh,
        schedule=_schedule(problem, found),
    )


def _whole_steps(forecast: IntensityForecast) -> IntensitySeries:
    """Return the forecast from the beginning of its current step, with its full length.

    A forecast begins now, and a moment later it begins later; in whole steps, a repeated request within a step is the
    same problem. The current step is as long as the one after it.
    """
    points = forecast.points
    if len(points) > 1:
        length = points[-1].end_at - points[0].start_at
        began_at = points[1].start_at - _step(points[1:])
        began_at = min(began_at, points[0].start_at)
        ends_at = began_at + length
        kept = [point for point in points if point.start_at < ends_at]
        kept[-1] = kept[-1].model_copy(update={"end_at": min(kept[-1].end_at, ends_at)})
        points = [kept[0].model_copy(update={"start_at": began_at}), *kept[1:]]
    return IntensitySeries(
        signal=forecast.signal,
        points=[
            IntensityPoint(
                start_at=point.start_at,
                end_at=point.end_at,
                gco2_per_kwh=point.gco2_per_kwh,
                is_estimated=point.is_estimated,
            )
            for point in points
        ],
    )


def _step(points: Sequence[IntensityPoint]) -> timedelta:
    return max(point.end_at - point.start_at for point in points[:2])


def _in_core(problem: CarbonBoundProblem) -> carbon.CarbonBoundProblem:
    capacity = problem.capacity_gpus if problem.capacity_gpus_by_step is None else problem.capacity_gpus_by_step
    return carbon.CarbonBoundProblem(
        curve=curve_of(problem.intensity.points),
        capacity_gpus=np.array(capacity, dtype=np.float64),
        work=[
            carbon.Work(
                gpu_hours=item.gpu_hours,
                power_w=item.power_w,
                release_s=item.release_at.timestamp() if item.release_at else None,
                deadline_s=item.deadline_at.timestamp() if item.deadline_at else None,
                max_gpus=item.max_gpus,
            )
            for item in problem.work
        ],
        idle_power_w=problem.idle_power_w,
        pue=problem.pue,
    )


def _schedule(problem: CarbonBoundProblem, found: carbon.CarbonBound) -> list[ClassSchedule]:
    schedules: list[ClassSchedule] = []
    ends = np.searchsorted(found.work_index, np.arange(len(problem.work) + 1))
    for index, item in enumerate(problem.work):
        steps = found.step_index[ends[index] : ends[index + 1]]
        first = int(steps[0]) if steps.size else 0
        gpu_hours = np.zeros(int(steps[-1]) - first + 1 if steps.size else 0)
        gpu_hours[steps - first] = found.gpu_hours[ends[index] : ends[index + 1]]
        schedules.append(
            ClassSchedule(
                name=item.name,
                first_step=first,
                gpu_hours=gpu_hours.tolist(),
                shortfall_gpu_hours=float(found.shortfall_gpu_hours[index]),
            )
        )
    return schedules


KIND = BoundKind(resolve, solve)
