"""PowerFlow over simulated days: the limit at every instant, profiling, unused nodes, and what eta does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.policies.powerflow.limit import least_of
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions, SimulationResult
from services.simulator.engine.simulation import Simulation
from services.simulator.workload import ANY_MODEL, Behaviour, ClusterSpec, JobProfile, Workload
from tests.support.workloads import SIZES, START_S, a_trace, a_workload

LIMIT = ControlKind.POWER_LIMIT
CLUSTER = ClusterSpec.parse("3x4:V100")
IDLE_W = 12 * (40.0 + 30.0)


class Watched(Simulation):
    """A simulation that notes the power of every interval between two events."""

    def __init__(self, parameters: dict[str, Any], workload: Workload, options: EngineOptions) -> None:
        super().__init__(build_policy("powerflow", parameters), workload, CLUSTER, a_trace(), options)
        self.powers_w: list[tuple[float, float, float]] = []

    def _advance(self, time_s: float) -> None:
        now_s = self.gangs.now_s
        if time_s > now_s:
            self.powers_w.append((now_s, time_s, self.gangs.power_w + self.nodes.idle_w))
        super()._advance(time_s)

    def watch(self) -> SimulationResult:
        return self.run({})


def a_kind(gpu_w: float, scaling: float, bound: float, restart_s: float = 30.0) -> JobProfile:
    """Return jobs of this power, scaling over GPUs and slowing under power limits."""
    limits = np.array([100.0, 150.0, 200.0, 250.0])
    share = limits / 250.0
    curve = ControlCurve(limits, share**bound, 40.0 + (gpu_w - 40.0) * share)
    behaviour = Behaviour(SIZES, SIZES**scaling, np.full(SIZES.size, gpu_w), controls={LIMIT: curve})
    return JobProfile(f"{gpu_w}", {ANY_MODEL: behaviour}, host_power_w=60.0, restart_s=restart_s, checkpoint_s=10.0)


KINDS = [a_kind(250.0, 0.9, 0.5), a_kind(180.0, 0.6, 0.3), a_kind(120.0, 0.98, 0.9)]
jobs = st.tuples(
    st.integers(0, 30_000).map(float), st.integers(60, 40_000).map(float), st.sampled_from([1, 1, 1, 2, 4])
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(jobs, min_size=1, max_size=12),
    kinds=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    curve=st.lists(st.integers(1_300, 4_500), min_size=1, max_size=8),
    hours=st.floats(0.3, 5.0),
    interval_s=st.sampled_from([300.0, 1_800.0, 3_600.0]),
    parameters=st.fixed_dictionaries(
        {
            "eta": st.sampled_from([0.6, 1.0]),
            "placement": st.sampled_from(["buddy", "consolidated"]),
            "profiling": st.sampled_from(["never", "unknown", "first_run", "each_job"]),
            "power_down": st.booleans(),
            "migration": st.booleans(),
            "marginal": st.sampled_from(["energy", "power"]),
            "at_limit": st.sampled_from(["stop", "skip"]),
        }
    ),
    known=st.booleans(),
)
def test_power_is_at_no_instant_above_the_limit(
    rows: list[tuple[float, float, int]],
    kinds: list[int],
    curve: list[int],
    hours: float,
    interval_s: float,
    parameters: dict[str, Any],
    known: bool,
) -> None:
    """Restarts, measurements, passive rounds and falling caps included; idle draw alone is below every cap."""
    steps = [[START_S + 3_600.0 * hours * at, float(watts)] for at, watts in enumerate(curve)]
    options = EngineOptions(round_interval_s=interval_s, settings_known=known, until_s=START_S + 4 * 86_400.0)
    workload = a_workload(sorted(rows), KINDS, profile=kinds[: len(rows)], most=8)

    simulation = Watched({**parameters, "power_limit_curve": steps}, workload, options)
    simulation.watch()

    pairs = tuple((when, watts) for when, watts in steps)
    for begin_s, end_s, power_w in simulation.powers_w:
        cap_w = min(least_of(pairs, begin_s, begin_s), least_of(pairs, begin_s, math.nextafter(end_s, begin_s)))
        assert power_w <= cap_w * (1 + 1e-9), (begin_s - START_S, power_w, cap_w)


def run(parameters: dict[str, Any], **options: Any) -> SimulationResult:
    """Return two days of jobs of all kinds under these parameters; curves are known."""
    rng = np.random.default_rng(5)
    rows = sorted((float(rng.uniform(0, 40_000)), float(rng.lognormal(8.5, 1.0)), 1) for _ in range(60))
    workload = a_workload(rows, KINDS, profile=rng.integers(0, 3, 60).tolist(), most=8)
    return Watched(parameters, workload, EngineOptions(**{"settings_known": True, **options})).watch()


def test_a_higher_eta_ends_jobs_sooner_and_draws_more() -> None:
    found = [run({"eta": eta, "power_down": False}) for eta in (0.4, 0.55, 0.7, 0.85, 1.0)]

    assert all(result.completed == 60 for result in found)
    jct_s = [result.avg_jct_s for result in found]
    assert jct_s == sorted(jct_s, reverse=True)
    peaks_w = [result.peak_power_w for result in found]
    assert peaks_w == sorted(peaks_w)


def one_after_the_other(parameters: dict[str, Any], **options: Any) -> SimulationResult:
    """Return two equal jobs of one GPU, the second of which comes when the first is over."""
    kind = a_kind(250.0, 0.0001, 0.5)
    workload = a_workload([(0.0, 7_200.0, 1), (14_400.0, 7_200.0, 1)], [kind], most=1)
    return Watched(parameters, workload, EngineOptions(**options)).watch()


def test_measuring_takes_four_minutes_at_slower_settings_once_per_kind_or_per_job() -> None:
    """In a minute at each of four limits a job does 60 s of work at the highest, less at the others."""
    told = one_after_the_other({"profiling": "never"}, settings_known=True)
    kinds = one_after_the_other({"profiling_steps": 4})
    each = one_after_the_other({"profiling_steps": 4, "profiling": "each_job"})

    lost_s = 240.0 - 60.0 * sum((limit / 250.0) ** 0.5 for limit in (100.0, 150.0, 200.0, 250.0))
    assert (told.columns.jct_s - 30.0).tolist() == pytest.approx([7_200.0, 7_200.0])
    assert (kinds.columns.jct_s - told.columns.jct_s).tolist() == pytest.approx([lost_s, 0.0])
    assert (each.columns.jct_s - told.columns.jct_s).tolist() == pytest.approx([lost_s, lost_s])


def test_unused_nodes_are_powered_down_and_boot_when_needed() -> None:
    """Three nodes of four GPUs: between the jobs all are off but the spare ones, and the second job waits for one."""
    on, off, spare = (
        one_after_the_other({"power_down": down, "spare_nodes": spare, "profiling": "never"}, boot_s=300.0)
        for down, spare in ((False, 0), (True, 0), (True, 1))
    )

    whole_h = (on.columns.ended_s[-1] - on.columns.submitted_s[0]) / 3_600.0
    assert on.idle_energy_kwh == pytest.approx(0.07 * (12 * whole_h - 2 * 7_230.0 / 3_600.0))
    assert (off.columns.jct_s - on.columns.jct_s).tolist() == pytest.approx([0.0, 300.0])
    assert spare.columns.jct_s.tolist() == pytest.approx(on.columns.jct_s.tolist())
    assert off.idle_energy_kwh < spare.idle_energy_kwh < on.idle_energy_kwh
