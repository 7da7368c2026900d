"""Power limits and clocks in the engine: figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Action, Plan, Preempt, ProfileControls, SetControl
from services.core.cycle.snapshot import Snapshot
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.simulator.engine import EngineOptions, Simulation, SimulationResult
from services.simulator.recipes.measured import tuning_profile
from services.simulator.workload import ANY_MODEL, Behaviour, ClusterSpec, JobProfile, Workload
from tests.support.workloads import START_S, a_trace, a_workload

LIMITS = ControlCurve(np.array([100.0, 200.0]), np.array([0.5, 1.0]), np.array([90.0, 200.0]))
CLOCKS = ControlCurve(np.array([600.0, 1200.0]), np.array([0.25, 1.0]), np.array([80.0, 200.0]))
J = JobId("j0000000")
LESS = SetControl(J, ControlKind.POWER_LIMIT, 100.0, Reason.LEAST_COST)


class Scripted(Fifo):
    """FIFO that adds actions to the plan of the first round at or after a time, in seconds from the beginning."""

    def __init__(self, script: Mapping[float, Sequence[Action]]) -> None:
        super().__init__(FifoConfig(backfill=True))
        self.name = "scripted"
        self.script = dict(script)
        self.seen: list[Snapshot] = []
        self.shown: dict[float, tuple[float, ...]] = {}

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return FIFO's plan with the next lines of the script."""
        plan, memory = super().decide(snapshot, memory)
        self.seen.append(snapshot)
        now_s = snapshot.now_s - START_S
        jobs = snapshot.jobs
        self.shown[now_s] = (jobs.power_limit_w[0], jobs.clock_mhz[0], jobs.waiting_since_s[0] - START_S)
        due = [at_s for at_s in self.script if at_s <= now_s]
        lines = [action for at_s in due for action in self.script.pop(at_s)]
        return Plan(plan.snapshot_version, (*plan.actions, *lines)), memory


def a_kind(**fields: Any) -> JobProfile:
    settings = {ControlKind.POWER_LIMIT: LIMITS, ControlKind.CLOCK: CLOCKS}
    behaviour = Behaviour(np.array([1, 2]), np.array([1.0, 2.0]), np.array([200.0, 200.0]), controls=settings)
    return JobProfile("k", {ANY_MODEL: behaviour}, **{"restart_s": 0.0, "checkpoint_s": 0.0, **fields})


def run(
    jobs: Workload, script: Mapping[float, Sequence[Action]], *, gpus: int = 2, **options: Any
) -> tuple[SimulationResult, Scripted]:
    policy = Scripted(script)
    engine = EngineOptions(**{"round_interval_s": 600.0, "host_idle_w": 0.0, **options})
    simulation = Simulation(policy, jobs, ClusterSpec.parse(f"1x{gpus}:RTX3090"), a_trace([100.0, 300.0]), engine)
    return simulation.run({}), policy


def test_a_limit_set_at_the_start_slows_the_gang_and_cools_it() -> None:
    result, _ = run(a_workload([(0.0, 3_600.0, 1)], [a_kind()]), {0: [LESS]}, gpus=1)

    assert result.avg_jct_s == pytest.approx(7_200.0)
    assert result.energy_kwh == pytest.approx(2 * 0.09)
    assert result.carbon_kg == pytest.approx(0.09 * 0.1 + 0.09 * 0.3)
    assert result.peak_power_w == pytest.approx(90.0)


def test_a_change_settles_what_was_done_before_it() -> None:
    jobs = a_workload([(0.0, 3_600.0, 1)], [a_kind()])

    result, policy = run(
        jobs, {1_200: [LESS], 1_800: [SetControl(J, ControlKind.POWER_LIMIT, None, Reason.DEFAULT_CONTROL)]}
    )

    assert result.avg_jct_s == pytest.approx(3_600.0 + 300.0)
    assert result.columns.energy_j[0] == pytest.approx(200 * 1_200 + 90 * 600 + 200 * 2_100)
    assert result.columns.carbon_gco2[0] == pytest.approx(
        ((200 * 1_200 + 90 * 600 + 200 * 1_800) * 100 + 200 * 300 * 300) / 3.6e6
    )
    assert result.energy_kwh * 3.6e6 == pytest.approx(result.columns.energy_j.sum() + result.idle_energy_kwh * 3.6e6)
    assert policy.shown[1_800][0] == 100.0
    assert np.isnan(policy.shown[2_400][0])
    assert policy.shown[2_400][2] == 0.0, "a setting is no new start"


def test_of_two_settings_the_slower_decides_and_both_are_shown() -> None:
    actions = [LESS, SetControl(J, ControlKind.CLOCK, 600, Reason.LEAST_COST)]

    result, policy = run(a_workload([(0.0, 3_600.0, 1)], [a_kind()]), {0: actions})

    assert result.avg_jct_s == pytest.approx(4 * 3_600.0)
    assert result.columns.energy_j[0] == pytest.approx(80 * 4 * 3_600)
    assert policy.shown[600][:2] == (100.0, 600.0)


def test_a_wider_gang_draws_in_proportion() -> None:
    result, _ = run(a_workload([(0.0, 3_600.0, 2)], [a_kind(host_power_w=10.0)]), {0: [LESS]})

    assert result.columns.energy_j[0] == pytest.approx(2 * 100 * 3_600)


def test_the_next_gang_of_a_job_begins_at_the_default() -> None:
    jobs = a_workload([(0.0, 3_600.0, 1)], [a_kind()])

    result, policy = run(jobs, {0: [LESS], 1_800: [Preempt(J, Reason.OUTRANKED, 1)]})

    assert np.isnan(policy.shown[2_400][0])
    assert result.avg_jct_s == pytest.approx(1_800.0 + 3_600.0 - 900.0)


def test_work_since_the_last_checkpoint_is_lost_across_settings() -> None:
    """Checkpoints at 1,000, 2,000, 3,000 s; set at 1,800 s (half speed) and at 3,300 s (back); killed at 3,600 s."""
    jobs = a_workload([(0.0, 7_200.0, 1)], [a_kind(checkpoint_s=500.0)])
    script: dict[float, list[Action]] = {
        1_800: [LESS],
        3_300: [SetControl(J, ControlKind.POWER_LIMIT, None, Reason.DEFAULT_CONTROL)],
        3_600: [Preempt(J, Reason.OUTRANKED, 1)],
    }

    result, _ = run(jobs, script, checkpoint_every_s=1_000.0, grace_s=120.0, round_interval_s=300.0)

    kept = 1_800.0 + (3_000.0 - 1_800.0) * 0.5
    assert result.avg_jct_s == pytest.approx(3_600.0 + 120.0 + 7_200.0 - kept)


def test_profiling_costs_its_windows_and_then_the_curve_is_known() -> None:
    """Five seconds at 200 W do 5 s of work, five at 100 W 2.5 s; the round after them sees the curve."""
    jobs = a_workload([(0.0, 3_600.0, 1), (600.0, 60.0, 1)], [a_kind(restart_s=30.0)])

    result, policy = run(jobs, {0: [ProfileControls(J, ControlKind.POWER_LIMIT, 5.0)]})

    assert result.columns.jct_s[0] == pytest.approx(30.0 + 3_600.0 + 2.5)
    assert result.columns.energy_j[0] == pytest.approx(200 * (30 + 3_597.5) + 90 * 5)
    learned = policy.seen[1]
    assert learned.now_s - START_S == pytest.approx(40.0)
    assert policy.seen[0].control_curve(0, 0, ControlKind.POWER_LIMIT) is None
    assert learned.control_curve(0, 0, ControlKind.POWER_LIMIT) is LIMITS
    assert learned.control_curve(0, 0, ControlKind.CLOCK) is None
    later = next(each for each in policy.seen if len(each.jobs.gpus) == 2)
    assert later.control_curve(1, 0, ControlKind.POWER_LIMIT) is LIMITS, "of every job of the kind"


def test_a_decision_ends_a_measurement_and_another_may_begin() -> None:
    profile_it = ProfileControls(J, ControlKind.CLOCK, 100.0)
    jobs = a_workload([(0.0, 3_600.0, 1)], [a_kind()])
    script: dict[float, list[Action]] = {
        0: [profile_it],
        150: [SetControl(J, ControlKind.CLOCK, None, Reason.DEFAULT_CONTROL)],
        180: [profile_it],
    }

    result, policy = run(jobs, script, round_interval_s=30.0)

    # 50 s of the first measurement's second window, then the whole of the second's, at a quarter of the speed
    assert result.avg_jct_s == pytest.approx(3_600.0 + 0.75 * (50.0 + 100.0))
    assert policy.seen[-1].control_curve(0, 0, ControlKind.CLOCK) is CLOCKS


def test_a_stopped_gang_is_not_measured_on() -> None:
    jobs = a_workload([(0.0, 3_600.0, 1)], [a_kind()])
    script: dict[float, list[Action]] = {
        0: [ProfileControls(J, ControlKind.CLOCK, 500.0)],
        600: [Preempt(J, Reason.OUTRANKED, 1)],
    }

    result, policy = run(jobs, script)

    assert result.avg_jct_s == pytest.approx(3_600.0 + 0.75 * 100.0)
    assert policy.seen[-1].control_curve(0, 0, ControlKind.CLOCK) is None


def test_predictions_are_shown_where_they_are_known_from_the_beginning() -> None:
    guess = ControlCurve(np.array([150.0]), np.array([0.9]), np.array([140.0]))
    true = a_kind()
    told = Behaviour(np.array([1]), np.array([1.0]), np.array([200.0]), controls={ControlKind.POWER_LIMIT: guess})
    kind = JobProfile("k", true.true, predicted={ANY_MODEL: told}, restart_s=0.0, checkpoint_s=0.0)

    result, policy = run(a_workload([(0.0, 3_600.0, 1)], [kind]), {0: [LESS]}, settings_known=True)

    assert policy.seen[0].control_curve(0, 0, ControlKind.POWER_LIMIT) is guess
    assert result.avg_jct_s == pytest.approx(7_200.0)


def test_measured_models_answer_to_limits_of_every_board() -> None:
    for board, model in GPU_MODELS.items():
        kind = tuning_profile("resnet50", 115).truth(board)
        assert kind is not None
        curve = kind.controls[ControlKind.POWER_LIMIT]
        assert curve.values[-1] == pytest.approx(model.peak_w)
        assert curve.speed[-1] == 1.0
        if model.chip != "P100":
            assert curve.power_w[-1] == pytest.approx(kind.gpu_power_w[0])
        speed, power = kind.factors_at({ControlKind.POWER_LIMIT: float(curve.values[0])})
        assert 0.4 < speed < 1.0
        assert 0.2 < power < 1.0
    unmeasured = tuning_profile("gpt2", 8).truth("H200-SXM-141GB")
    assert unmeasured is not None
    assert unmeasured.factors_at({ControlKind.POWER_LIMIT: 300.0}) == (1.0, 1.0)
