"""From a request and a forecast to a problem."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from lab.bounds import solve as carbon_bound
from services.contracts.carbon import Clock, ForecastPoint, IntensityForecast
from services.contracts.optimize import CarbonBoundRequest
from services.core.domain.carbon import Signal
from services.kit.problems import ProblemError
from tests.optimizer.problems import START, a_bound, points

HOUR = timedelta(hours=1)


class Forecasts:
    """A carbon service whose intensity is the hour's number, asked at ``now``; steps are whole but for the ends."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    async def forecast(self, zone: str, signal: Signal | None, horizon_s: float, clock: Clock) -> IntensityForecast:
        end = self.now + timedelta(seconds=horizon_s)
        found: list[ForecastPoint] = []
        for hour in range(200):
            start_at, end_at = max(START + hour * HOUR, self.now), min(START + (hour + 1) * HOUR, end)
            if start_at < end_at:
                found.append(ForecastPoint(start_at=start_at, end_at=end_at, gco2_per_kwh=hour))
        return IntensityForecast(
            zone=zone,
            signal=signal or Signal.AVERAGE_DIRECT,
            provider="test",
            method="persistence",
            generated_at=self.now,
            is_stale=True,
            points=found,
        )


@pytest.mark.parametrize("minutes", [0, 1, 59])
async def test_asked_within_one_step_a_forecast_makes_one_problem(minutes: int) -> None:
    request = CarbonBoundRequest.model_validate(a_bound(intensity=None, zone="GB", horizon_h=6))
    problem = await carbon_bound.resolve(request, Forecasts(START + timedelta(minutes=minutes)))
    found = [(point.start_at, point.gco2_per_kwh) for point in problem.intensity.points]
    assert found == [(START + hour * HOUR, hour) for hour in range(6)]
    assert problem.intensity.points[-1].end_at == START + 6 * HOUR
    assert problem.source is not None
    assert problem.source.is_stale


async def test_idle_power_may_be_a_share_of_the_works() -> None:
    work = [{"gpu_hours": 3, "power_w": 100}, {"gpu_hours": 1, "power_w": 500}]
    request = CarbonBoundRequest.model_validate(a_bound(work=work, idle_power_fraction=0.2))
    assert (await carbon_bound.resolve(request, Forecasts(START))).idle_power_w == pytest.approx(0.2 * 200)


async def test_what_is_too_large_is_refused_before_it_is_stored() -> None:
    work = [{"gpu_hours": 1, "power_w": 100}] * 2_000
    request = CarbonBoundRequest.model_validate(a_bound(*[1.0] * 300, work=work))
    with pytest.raises(ProblemError, match="more than 500000") as refused:
        await carbon_bound.resolve(request, Forecasts(START))
    assert refused.value.errors[0].pointer == "/work"


async def test_steps_too_short_to_tell_apart_are_refused() -> None:
    late = datetime.fromisoformat("8999-01-01T00:00:00+00:00")
    tick = timedelta(microseconds=1)
    series = [
        {"start_at": (late + n * tick).isoformat(), "end_at": (late + (n + 1) * tick).isoformat(), "gco2_per_kwh": 1}
        for n in range(3)
    ]
    request = CarbonBoundRequest.model_validate(a_bound(intensity={"signal": "marginal", "points": series}))
    with pytest.raises(ProblemError, match="strictly increasing"):
        await carbon_bound.resolve(request, Forecasts(START))


async def test_the_schedule_is_told_class_by_class() -> None:
    work = [
        {"name": "late", "gpu_hours": 1, "power_w": 100, "release_at": (START + 2 * HOUR).isoformat()},
        {"name": "never", "gpu_hours": 2, "power_w": 100, "deadline_at": START.isoformat()},
    ]
    request = CarbonBoundRequest.model_validate(
        a_bound(intensity={"signal": "marginal", "points": points([3, 1, 2])}, work=work)
    )
    result = carbon_bound.solve(await carbon_bound.resolve(request, Forecasts(START)))
    assert (result.status, result.carbon_gco2) == ("infeasible", None)
    late, never = result.schedule
    assert (late.name, late.first_step, late.gpu_hours, late.shortfall_gpu_hours) == ("late", 2, [1], 0)
    assert (never.name, never.gpu_hours, never.shortfall_gpu_hours) == ("never", [], 2)
