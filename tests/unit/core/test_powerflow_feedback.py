"""PowerFlow's correction of its models by the cluster's measured draw."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.plan import SetControl
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.policies.powerflow.profiling import PowerflowMemory
from services.core.policies.registry import build_policy
from tests.support.builders import a_job, a_node, a_snapshot

LIMITS = np.array([150.0, 200.0, 300.0])
CURVE = ControlCurve(LIMITS, np.array([0.6, 0.8, 1.0]), LIMITS)
GPUS = 4


def cluster(measured_w: float, set_to_w: float = float("nan")) -> Snapshot:
    """One gang of four GPUs whose models say 300 W each at the default."""
    snapshot = a_snapshot(
        [a_job("a", on={"n": tuple(range(GPUS))}, min_gpus=GPUS, max_gpus=GPUS)], [a_node("n", gpus=GPUS)]
    )
    jobs = replace(snapshot.jobs, control_curve=np.zeros(1, np.int64), power_limit_w=np.array([set_to_w]))
    return replace(
        snapshot,
        jobs=replace(jobs, gpu_power_w=np.array([300.0])),
        trigger=Trigger.PASSIVE,
        control_curves=({(0, ControlKind.POWER_LIMIT): CURVE},),
        settable=(frozenset([ControlKind.POWER_LIMIT]),),
        measured_w=measured_w,
    )


def decide(snapshot: Snapshot, correction: float, limit_w: float) -> tuple[list[float | None], float]:
    """Return the limits a round sets, and the correction it keeps."""
    policy = build_policy("powerflow", {"power_limit_w": limit_w})
    result = run_cycle(policy, snapshot, PowerflowMemory(correction=correction))
    actions = [action.value for action in result.plan.actions if isinstance(action, SetControl)]
    return actions, policy.load(policy.dump(result.memory)).correction


@pytest.mark.parametrize(
    ("measured_w", "known", "expected"),
    [
        (1_500.0, 1.0, 1.25),  # more than the models' 1,200 W counts at once
        (1_200.0, 1.5, 1.25),  # less, by half of the difference
        (float("nan"), 1.3, 1.3),  # nothing was measured
        (120.0, 1.0, 0.75),  # a tenth says more about the job than about the models
    ],
)
def test_the_ratio_rises_at_once_and_falls_by_halves(measured_w: float, known: float, expected: float) -> None:
    assert decide(cluster(measured_w), known, 5_000.0)[1] == pytest.approx(expected)


def test_a_cluster_that_draws_more_than_its_models_is_set_lower() -> None:
    """Under 1,200 W the models allow the default's 4 x 300 W; at a quarter more they allow 4 x 200 W."""
    assert decide(cluster(float("nan"), 200.0), 1.0, 1_200.0)[0] == [None]
    assert decide(cluster(1_500.0), 1.0, 1_200.0)[0] == [200.0]


def test_without_a_limit_nothing_is_corrected() -> None:
    policy = build_policy("powerflow", {})
    memory = run_cycle(policy, cluster(9_000.0), PowerflowMemory()).memory
    assert policy.load(policy.dump(memory)).correction == 1.0


def test_memory_is_stored_as_releases_read_it() -> None:
    policy = build_policy("powerflow", {})
    stored = {"targets": {"a": 2}, "measured": {"b": 1_700_000_060.0}, "profiled": {"a": [1, 2]}, "correction": 1.1}
    memory = PowerflowMemory(
        targets={JobId("a"): 2}, measured={JobId("b"): 1_700_000_060.0}, profiled={JobId("a"): (1, 2)}, correction=1.1
    )

    assert json.loads(json.dumps(policy.dump(memory))) == stored
    assert policy.load(stored) == memory
    assert policy.load({}) == policy.initial() == PowerflowMemory({}, {}, {}, 1.0)
