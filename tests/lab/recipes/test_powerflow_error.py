"""PowerFlow under a power limit with models that are wrong: how far it is exceeded, and what meters change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions, SimulationResult
from services.simulator.engine.recorder import AboveLimit
from services.simulator.engine.simulation import Simulation
from services.simulator.workload import ANY_MODEL, Behaviour, ClusterSpec, JobProfile, Workload
from tests.support.workloads import SIZES, a_trace, a_workload

LIMIT = ControlKind.POWER_LIMIT
LIMITS = np.array([100.0, 150.0, 200.0, 250.0])


def misread(gpu_w: float, scaling: float, above: float, stated: float) -> JobProfile:
    """Return jobs whose boards draw a share more than their model says, which states another share as its error."""
    share = LIMITS / 250.0
    drawn_w = 40.0 + (gpu_w - 40.0) * share
    true = Behaviour(
        SIZES, SIZES**scaling, np.full(SIZES.size, gpu_w), controls={LIMIT: ControlCurve(LIMITS, share**0.5, drawn_w)}
    )
    seen = replace(
        true,
        gpu_power_w=true.gpu_power_w / (1 + above),
        controls={LIMIT: ControlCurve(LIMITS, share**0.5, drawn_w / (1 + above))},
        power_error=stated,
    )
    return JobProfile(
        f"{gpu_w}", {ANY_MODEL: true}, {ANY_MODEL: seen}, host_power_w=60.0, restart_s=30.0, checkpoint_s=10.0
    )


def run(workload: Workload, parameters: dict[str, object], **options: object) -> SimulationResult:
    """Return what becomes of the jobs on three nodes of four GPUs."""
    policy = build_policy("powerflow", parameters)
    cluster = ClusterSpec.parse("3x4:V100")
    return Simulation(
        policy, workload, cluster, a_trace(), EngineOptions(**{"round_interval_s": 900.0, **options})
    ).run({})


jobs = st.tuples(
    st.integers(0, 20_000).map(float), st.integers(60, 30_000).map(float), st.sampled_from([1, 1, 1, 2, 4])
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(jobs, min_size=1, max_size=12),
    kinds=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    above=st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=3),
    profiling=st.sampled_from(["never", "unknown", "first_run", "each_job"]),
    limit_w=st.integers(1_300, 3_500).map(float),
    known=st.booleans(),
)
def test_the_excess_is_at_most_the_models_stated_error(
    rows: list[tuple[float, float, int]],
    kinds: list[int],
    above: list[float],
    profiling: str,
    limit_w: float,
    known: bool,
) -> None:
    """Each kind's model states the error it has; gangs that stop, start and are measured included."""
    profiles = [
        misread(gpu_w, scaling, error, abs(error))
        for (gpu_w, scaling), error in zip([(250.0, 0.9), (180.0, 0.6), (120.0, 0.98)], above, strict=True)
    ]
    workload = a_workload(sorted(rows), profiles, profile=kinds[: len(rows)], most=8)
    result = run(workload, {"power_limit_w": limit_w, "profiling": profiling}, settings_known=known)

    assert result.above_limit_of_error <= 1 + 1e-6
    assert result.peak_power_w <= limit_w * (1 + max(abs(error) for error in above) + 1e-9)
    assert (result.above_limit_most == 0) == (result.peak_power_w <= limit_w * (1 + 1e-9))


def a_busy_day(above: float) -> Workload:
    rng = np.random.default_rng(5)
    rows = sorted((float(rng.uniform(0, 40_000)), float(rng.lognormal(8.5, 1.0)), 1) for _ in range(30))
    profiles = [misread(250.0, 0.9, above, 0.05), misread(180.0, 0.6, above, 0.05)]
    return a_workload(rows, profiles, profile=rng.integers(0, 2, 30).tolist(), most=8)


def test_meters_take_a_standing_error_off_the_limit() -> None:
    """Boards draw 20 % more than their models say, which state an error of 5 %."""
    parameters = {"power_limit_w": 2_000.0, "profiling": "never"}
    blind, metered, wide = (
        run(a_busy_day(0.2), {**parameters, "margin": margin}, settings_known=True, metered=meters)
        for meters, margin in ((False, 0.0), (True, 0.0), (False, 0.2))
    )
    exact = run(a_busy_day(0.0), parameters, settings_known=True, metered=True)

    assert blind.above_limit_share > 0.1
    assert blind.above_limit_of_error > 1
    assert metered.above_limit_kwh < 0.25 * blind.above_limit_kwh
    assert wide.above_limit_most == 0
    assert (exact.above_limit_share, exact.above_limit_kwh, exact.above_limit_of_error) == (0, 0, 0)


def test_what_is_above_the_limit_is_added_up() -> None:
    above = AboveLimit()
    above.draw(9_000.0, 100.0)  # no limit yet
    assert not above.held(1_200.0, 1_000.0)
    above.stated(1_200.0, 400.0)
    above.draw(1_200.0, 1_800.0)
    above.draw(900.0, 1_800.0)

    assert above.figures(3_600.0) == pytest.approx(
        {"above_limit_share": 0.5, "above_limit_kwh": 0.1, "above_limit_most": 0.2, "above_limit_of_error": 0.5}
    )
    above.stated(1_200.0, 0.0)
    above.stated(1_200.0, 400.0)
    assert np.isnan(above.figures(1.0)["above_limit_of_error"])


def test_a_limit_of_nothing_is_exceeded_without_a_share() -> None:
    above = AboveLimit()
    assert not above.held(100.0, 0.0)
    above.draw(100.0, 3_600.0)

    found = above.figures(3_600.0)
    assert (found["above_limit_share"], found["above_limit_kwh"], found["above_limit_most"]) == (1.0, 0.1, 0.0)
