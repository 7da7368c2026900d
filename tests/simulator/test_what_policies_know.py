"""What a simulation keeps from policies: lengths, and batches that users do not let go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.errors import DomainError
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions
from services.simulator.engine.behaviour import speed_curves, tuned_curves, who_tunes
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import ClusterSpec, Workload


@pytest.fixture(scope="module")
def jobs() -> Workload:
    return read_jobs("green-day", recipe="green", start="2023-08-08", days=0.1, seed=1)


def shown_in(jobs: Workload, **options: object) -> list[tuple[Trigger, dict[str, np.ndarray]]]:
    """Return what `joint` is shown in a short run: triggers, and some columns."""
    policy = build_policy("joint", {})
    seen: list[tuple[Trigger, dict[str, np.ndarray]]] = []
    decide = policy.decide

    def watched(snapshot: Snapshot, memory: object) -> object:
        columns = {name: np.copy(getattr(snapshot.jobs, name)) for name in ("remaining_s", "progress", "goodput_curve")}
        seen.append((snapshot.trigger, columns))
        return decide(snapshot, memory)

    policy.decide = watched  # type: ignore[method-assign]
    grid = read_carbon("GB", start="2023-08-08")
    Simulation(policy, jobs, ClusterSpec.parse("32x2:RTX3090"), grid, EngineOptions(**options)).run({})  # type: ignore[arg-type]
    return seen


def test_without_a_predictor_only_progress_tells_a_length(jobs: Workload) -> None:
    shown = shown_in(predicted("none", jobs))
    assert all(np.isnan(columns["remaining_s"]).all() for _, columns in shown)
    assert any((columns["progress"] > 0.1).any() for trigger, columns in shown if trigger is Trigger.ACTIVE)
    assert predicted("perfect", jobs) is jobs


@pytest.mark.parametrize(("tuning", "share"), [("all", 1.0), ("half", 0.5), ("none", 0.0)])
def test_whose_batch_follows_the_gang(jobs: Workload, tuning: str, share: float) -> None:
    options = EngineOptions(batch_tuning=tuning, seed=3)
    drawn = who_tunes(2_000, options)
    assert drawn.mean() == pytest.approx(share, abs=0.05)
    assert np.array_equal(drawn, who_tunes(2_000, options))
    curves = np.concatenate([columns["goodput_curve"] for _, columns in shown_in(jobs, batch_tuning=tuning)])
    assert (np.count_nonzero(curves >= 0) > 0, np.count_nonzero(curves < 0) > 0) == (share > 0, share < 1)


def test_an_unknown_tuning_is_one_error() -> None:
    with pytest.raises(DomainError, match="unknown batch tuning 'some'; known: all, half, none"):
        EngineOptions(batch_tuning="some")


def test_curves_end_with_the_cluster_however_wide_a_job_is(jobs: Workload) -> None:
    """Nothing larger can run, and a curve for every size that a file names takes a machine's memory."""
    wide = replace(jobs, max_gpus=np.full(len(jobs), 10**15))
    models = ("RTX3090",)
    assert speed_curves(wide, models, 64).shape == (len(jobs.profiles), 64)
    assert tuned_curves(wide, models, np.ones(len(jobs), dtype=bool), 64).goodput.shape[-1] == 64
