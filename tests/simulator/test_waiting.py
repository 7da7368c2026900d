"""Leaving out the jobs that cannot start changes no plan, and none of what policies remember."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle import run_cycle as rounds
from services.core.cycle.plan import Hold
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import NO_HINTS, Snapshot, Trigger
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs
from services.simulator.engine.waiting import Waiting
from services.simulator.workload import ClusterSpec, Workload
from tests.support.workloads import START_S, a_profile, a_wave, a_workload

POLICY_VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in POLICIES] + [
    ("fifo", {"backfill": True, "gang": "max"}),
    ("las", {"promote_knob": 1.0, "gang": "max"}),
    ("green", {"theta": 0.0}),
    ("green", {"fixed_gpus": 2}),
]
CLUSTERS = ("1x4:RTX3090", "2x1:RTX3090,1x8:RTX3090", "2x2:RTX3090,1x4:A100")


@st.composite
def crowds(draw: st.DrawFn) -> Workload:
    """Return more jobs than fit, many of them alike, some urgent, some for one GPU model only."""
    n = draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    arrivals = np.sort(random.integers(0, 8, n)) * 900.0
    rows = zip(arrivals.tolist(), (random.integers(1, 72, n) * 100.0).tolist(), strict=True)
    sizes: list[int] = random.choice([1, 1, 2, 3, 6], n).tolist()
    jobs = a_workload(
        [(at, work, size) for (at, work), size in zip(rows, sizes, strict=True)],
        [a_profile(scaling=0.9)],
        most=draw(st.sampled_from([None, 8])),
    )
    wishes = draw(st.sampled_from([1, 3]))
    return replace(
        jobs,
        priority=random.integers(0, wishes, n),
        preemptible=random.random(n) < 0.9,
        gpu_model=tuple(random.choice(["", "", "RTX3090"], n).tolist()),
        predicted_work_s=np.where(random.random(n) < 0.2, np.nan, jobs.work_s),
    )


def decided_the_same(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
    """Hold a round, and see that it decides and remembers the same where nothing is left out."""
    result = rounds.run_cycle(policy, snapshot, memory)
    everybody = rounds.run_cycle(policy, replace(snapshot, hints=replace(snapshot.hints, contenders=None)), memory)
    told = rounds.run_cycle(policy, replace(snapshot, hints=NO_HINTS), memory)
    assert everybody == result
    assert tuple(action for action in told.plan.actions if type(action) is not Hold) == result.plan.actions
    assert told.memory == result.memory
    return result


@pytest.mark.parametrize(("name", "parameters"), POLICY_VARIANTS)
@settings(deadline=None)
@given(jobs=crowds(), cluster=st.sampled_from(CLUSTERS), mtbf_s=st.sampled_from([None, 4_000.0]))
def test_a_round_of_contenders_is_a_round_of_all(
    name: str, parameters: dict[str, Any], jobs: Workload, cluster: str, mtbf_s: float | None
) -> None:
    options = EngineOptions(node_mtbf_s=mtbf_s, node_repair_s=1_000.0, until_s=float(jobs.submitted_s[0]) + 86_400.0)
    with patch("services.simulator.engine.simulation.run_cycle", decided_the_same):
        simulate(name, jobs, ClusterSpec.parse(cluster), a_wave(2), parameters=parameters, options=options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("green", {}), ("green", {"theta": 0.0, "starvation_s": 7_200.0}), ("green", {"slack_s": 14_400.0}), ("las", {})],
)
def test_a_long_queue_is_decided_the_same(name: str, parameters: dict[str, Any]) -> None:
    """Longer than a queue that is sorted whole: more of it is found as it is walked down."""
    random = np.random.default_rng(4)
    rows = zip(
        np.sort(random.integers(0, 20, 900) * 900.0).tolist(),
        (random.integers(1, 72, 900) * 100.0).tolist(),
        random.choice([1, 1, 1, 2, 3], 900).tolist(),
        strict=True,
    )
    profiles = [a_profile(scaling=0.9, gpu_w=each) for each in (150.0, 250.0)]
    jobs = a_workload(list(rows), profiles, most=4)
    jobs = replace(jobs, profile=random.integers(0, 2, 900), preemptible=random.random(900) < 0.95)
    options = EngineOptions(until_s=float(jobs.submitted_s[0]) + 40_000.0)
    with patch("services.simulator.engine.simulation.run_cycle", decided_the_same):
        simulate(name, jobs, ClusterSpec.parse("2x4:RTX3090"), a_wave(2), parameters=parameters, options=options)


@pytest.mark.parametrize("name", [name for name, entry in POLICIES.items() if entry.waits_by])
def test_a_long_queue_is_not_ranked(name: str) -> None:
    """A hundred jobs of two sizes wait for two GPUs: three of the single ones, two of the pairs and no other matter."""
    seen: list[int] = []

    def counting(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
        assert snapshot.hints.contenders is not None
        seen.append(snapshot.hints.contenders.size)
        return rounds.run_cycle(policy, snapshot, memory)

    jobs = a_workload([(0.0, 600.0, size) for size in [1] * 50 + [2] * 50])
    with patch("services.simulator.engine.simulation.run_cycle", counting):
        result = simulate(name, jobs, ClusterSpec.parse("1x2:RTX3090"), a_wave(2))

    assert result.completed == 100
    assert max(seen) == 3 + 2


def test_a_passive_round_ranks_no_more_jobs_of_a_longer_queue() -> None:
    """Under a policy that ranks ahead: as many as there is room for, however many wait."""
    options = EngineOptions(rigid=True, until_s=START_S + 43_200.0)

    def ranked(jobs: int) -> float:
        """Return how many jobs a passive round ranks in the mean, and at least one."""
        seen: list[int] = []

        def counting(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
            if snapshot.trigger is Trigger.PASSIVE:
                assert snapshot.hints.contenders is not None
                seen.append(snapshot.hints.contenders.size)
            return rounds.run_cycle(policy, snapshot, memory)

        work = np.random.default_rng(1).integers(300, 5_000, jobs).tolist()
        with patch("services.simulator.engine.simulation.run_cycle", counting):
            crowd = a_workload([(0.0, each, 1) for each in work])
            simulate("green", crowd, ClusterSpec.parse("1x4:RTX3090"), a_wave(2), options=options)
        return sum(seen) / len(seen)

    assert ranked(2_000) <= 1.1 * ranked(500)


@pytest.mark.parametrize("waiting", [100, 1_000])
def test_a_refresh_computes_what_changed(waiting: int) -> None:
    """Jobs that wait are computed once, when they began to: what is shown of them stays as it is."""
    jobs = a_workload([(0.0, 600.0, 1)] * waiting)
    live = LiveJobs(jobs, np.ones((waiting, 1), dtype=np.bool_), jobs.work_s)
    for row in range(waiting):
        live.arrive(row)
    live.refresh(START_S, 0.0, 0.0)
    live.ints[IntRow.GPUS, 7] = 1
    live.floats[FloatRow.SET_ATTAINED] = 60.0

    live.refresh(START_S + 10.0, 0.0, 0.0)

    assert np.flatnonzero(live.table().attained_gpu_s).tolist() == [7]


def test_jobs_that_lost_work_stand_behind_those_that_are_now_shorter() -> None:
    jobs = a_workload([(0.0, work, 1) for work in (100.0, 200.0, 300.0, 400.0)])
    live = LiveJobs(jobs, np.ones((4, 1), dtype=np.bool_), jobs.work_s)
    waiting = Waiting(live, ("remaining_s",))
    for row in range(4):
        waiting.add(live.arrive(row))
    assert waiting.contenders(1) == pytest.approx([0, 1])

    for slot in (0, 1):
        waiting.remove(slot)
        waiting.stops(slot)
        waiting.comes_back(slot)
    live.floats[FloatRow.REMAINING, :2] = 900.0
    waiting.refreshed()

    assert waiting.contenders(1) == pytest.approx([2, 3])
