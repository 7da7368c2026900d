"""Batches that policies choose: within what users permit, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.recording import plan_to_json, snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Plan, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.validate import check_plan
from services.core.domain.errors import PlanError
from services.core.policies.registry import POLICIES, build_policy
from services.core.profiles.goodput import StepTable, best_batches, statistical_efficiency
from tests.support.builders import a_job, a_node, a_snapshot

SIZES = np.array([1, 2, 4, 8])
BATCHES = np.array([[[64, 100, 150, 200, 250, 300, 350, 400]] * 2], dtype=np.int64)
CURVES = np.array([[[1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 4.9, 5.2]] * 2])


def a_permitting_snapshot(low: int = 64, high: int = 1_024) -> Snapshot:
    """Return one in which `tuned` and `kept` wait for two GPUs each; the first lets policies choose its batch."""
    jobs = [a_job("tuned", min_gpus=2), a_job("kept", min_gpus=2)]
    seen = a_snapshot(jobs, [a_node(gpus=4)])
    table = replace(
        seen.jobs, batch_min=np.array([low, -1]), batch_max=np.array([high, -1]), goodput_curve=np.array([0, -1])
    )
    return replace(seen, jobs=table, goodput_curves=CURVES, goodput_batches=BATCHES)


def chosen(plan: Plan) -> dict[str, int | None]:
    return {action.job_id: action.batch_size for action in plan.actions if isinstance(action, Start)}


def decided(policy: str, seen: Snapshot) -> Plan:
    built = build_policy(policy, {})
    return run_cycle(built, seen, built.initial()).plan


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if entry.tunes_batch])
def test_a_policy_that_tunes_chooses_for_those_who_permit_it(policy: str) -> None:
    assert chosen(decided(policy, a_permitting_snapshot())) == {"tuned": 100, "kept": None}
    assert chosen(decided(policy, a_permitting_snapshot(low=128))) == {"tuned": 128, "kept": None}


def test_any_other_policy_leaves_batches_alone() -> None:
    assert chosen(decided("fifo", a_permitting_snapshot())) == {"tuned": None, "kept": None}


def test_a_batch_without_consent_or_beyond_it_is_refused() -> None:
    seen = a_permitting_snapshot()
    plan = decided("joint", seen)

    def with_batch(job_id: str, batch_size: int) -> Plan:
        actions = [
            replace(each, batch_size=batch_size) if isinstance(each, Start) and each.job_id == job_id else each
            for each in plan.actions
        ]
        return replace(plan, actions=tuple(actions))

    check_plan(seen, with_batch("tuned", 1_024))
    with pytest.raises(PlanError, match="job tuned cannot have a batch of 1025: 64 to 1024 samples"):
        check_plan(seen, with_batch("tuned", 1_025))
    with pytest.raises(PlanError, match="job kept cannot have a batch of 64: its batch is the user's"):
        check_plan(seen, with_batch("kept", 64))


def test_a_recorded_round_chooses_the_same_batches() -> None:
    seen = a_permitting_snapshot()
    again = snapshot_from_json(snapshot_to_json(seen))

    assert plan_to_json(decided("joint", again)) == plan_to_json(decided("joint", seen))
    assert [each.get("batch_size") for each in plan_to_json(decided("joint", again))].count(100) == 1


@pytest.mark.parametrize("noise", [10.0, 1e3, 1e5])
def test_the_best_batch_is_within_a_step_of_the_best_of_all(noise: float) -> None:
    """Steps of 10 ms and 1 ms per sample of a GPU: every batch between 64 and 2,048 is tried."""
    grid = np.geomspace(16, 4_096, 33)
    times = StepTable(SIZES, grid, 0.010 + 0.001 * grid[None, :] / SIZES[:, None] + 0.005 * (SIZES[:, None] > 1))
    batches, goodput, gain = best_batches(times, noise, 64, (64, 2_048), 8)

    assert gain[0] >= 1.0
    assert gain[7] == pytest.approx(goodput[7] / (64 / times.at(8, np.array([64.0]))[0]))
    every = np.arange(64, 2_049, dtype=np.float64)
    for gpus in SIZES.tolist():
        best = every / times.at(gpus, every) * statistical_efficiency(noise, every, 64)
        assert goodput[gpus - 1] >= 0.99 * best.max()
        assert batches[gpus - 1] % gpus == 0
        assert 64 <= batches[gpus - 1] <= 2_048
    assert (np.diff(batches[SIZES - 1]) >= 0).all(), "wider gangs take larger batches"


def test_a_range_that_no_gang_divides_evenly_is_kept() -> None:
    times = StepTable(np.array([1, 4]), np.array([1.0, 64.0]), np.array([[0.1, 0.2], [0.1, 0.15]]))
    batches, _, _ = best_batches(times, 100.0, 5, (5, 7), 4)

    assert batches.tolist() == [7, 6, 6, 7]
    assert best_batches(times, 100.0, 2, (2, 3), 4)[0].tolist()[2:] == [3, 3], "fewer samples than GPUs"
