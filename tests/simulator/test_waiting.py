"""What a simulation leaves out of its rounds changes no plan, and none of what policies remember."""

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
from services.core.cycle.snapshot import Snapshot
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs
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
    """Hold a round, and see that it decides and remembers the same where it gives reasons."""
    result = rounds.run_cycle(policy, snapshot, memory)
    told = rounds.run_cycle(policy, replace(snapshot, reasons=True), memory)
    assert tuple(action for action in told.plan.actions if type(action) is not Hold) == result.plan.actions
    assert told.memory == result.memory
    return result


@pytest.mark.parametrize(("name", "parameters"), POLICY_VARIANTS)
@settings(deadline=None)
@given(jobs=crowds(), cluster=st.sampled_from(CLUSTERS), mtbf_s=st.sampled_from([None, 4_000.0]))
def test_a_round_without_reasons_decides_the_same(
    name: str, parameters: dict[str, Any], jobs: Workload, cluster: str, mtbf_s: float | None
) -> None:
    options = EngineOptions(node_mtbf_s=mtbf_s, node_repair_s=1_000.0, until_s=float(jobs.submitted_s[0]) + 86_400.0)
    with patch("services.simulator.engine.simulation.run_under_orders", decided_the_same):
        simulate(name, jobs, ClusterSpec.parse(cluster), a_wave(2), parameters=parameters, options=options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("green", {}), ("green", {"theta": 0.0, "starvation_s": 7_200.0}), ("green", {"slack_s": 14_400.0}), ("las", {})],
)
def test_a_long_queue_is_decided_the_same(name: str, parameters: dict[str, Any]) -> None:
    """Longer than a queue that is sorted whole."""
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
    with patch("services.simulator.engine.simulation.run_under_orders", decided_the_same):
        simulate(name, jobs, ClusterSpec.parse("2x4:RTX3090"), a_wave(2), parameters=parameters, options=options)


@pytest.mark.parametrize("waiting", [100, 1_000])
def test_a_refresh_computes_what_changed(waiting: int) -> None:
    """Jobs that wait are computed once, when they began to: what is shown of them stays as it is."""
    jobs = a_workload([(0.0, 600.0, 1)] * waiting)
    live = LiveJobs(jobs, np.ones((waiting, 1), dtype=np.bool_), jobs.work_s)
    for row in range(waiting):
        live.arrive(row)
    live.refresh(START_S, [0.0], 0.0)
    live.ints[IntRow.GPUS, 7] = 1
    live.floats[FloatRow.SET_ATTAINED] = 60.0

    live.refresh(START_S + 10.0, [0.0], 0.0)

    assert np.flatnonzero(live.table().attained_gpu_s).tolist() == [7]
