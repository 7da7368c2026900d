"""Two jobs on one GPU in simulations: how fast each goes, what each pays, and what happens when one leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle import run_cycle as rounds
from services.core.cycle.plan import Start
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.domain.ids import NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.policies.registry import POLICIES
from services.core.profiles.sharing import SHARING_COST
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.beginning import Beginning
from services.simulator.workload import ClusterSpec, Workload
from tests.support.workloads import START_S, a_profile, a_wave, a_workload

HOUR_S = 3_600.0
PACE = 1 - SHARING_COST
LIGHT = a_profile("light", gpu_w=140.0, restart_s=0.0, checkpoint_s=0.0)
"""On a V100 (40 W idle, 300 W at most) busy for 100 / 260 of the time: two of them fit side by side."""
PLAIN = EngineOptions(round_interval_s=600.0, host_idle_w=0.0)


def run(jobs: Workload, cluster: str = "1x1:V100", options: EngineOptions = PLAIN, **more: Any) -> SimulationResult:
    return simulate("gandiva", jobs, ClusterSpec.parse(cluster), a_wave(4), options=options, **more)


def started_sharing(work_s: tuple[float, float]) -> tuple[Workload, Beginning]:
    """Return two light jobs that share a GPU as the run begins, with no round for long."""
    jobs = a_workload([(0.0, work_s[0], 1), (0.0, work_s[1], 1)], [LIGHT])
    none = np.zeros(2)
    here = Placement((NodeShare(NodeId("n0"), (0,)),))
    since_s = np.full(2, START_S)
    return jobs, Beginning(START_S, START_S + 99 * HOUR_S, {0: here, 1: here}, since_s, none, none, none, none)


def test_both_go_on_slower_until_one_ends_and_pay_for_the_whole_gpu_together() -> None:
    """Half an hour of work takes 1 / 0.81 as long; then the other one is alone."""
    jobs, beginning = started_sharing((HOUR_S / 2, HOUR_S))

    result = run(jobs, beginning=beginning)

    shared_s = HOUR_S / 2 / PACE
    ends_s = [shared_s, shared_s + HOUR_S / 2]
    assert result.columns.jct_s.tolist() == pytest.approx(ends_s)
    part_j = (20 + 100 * PACE) * shared_s
    assert result.columns.energy_j.tolist() == pytest.approx([part_j, part_j + 140 * HOUR_S / 2])
    assert result.energy_kwh * 3.6e6 == pytest.approx(result.columns.energy_j.sum(), rel=1e-12)
    assert result.idle_energy_kwh == pytest.approx(0.0, abs=1e-12)
    assert result.columns.gpu_s.sum() == pytest.approx(shared_s + ends_s[1])
    assert result.utilisation == pytest.approx(1.0)


def test_under_a_power_limit_a_pair_draws_no_more_than_it() -> None:
    jobs, beginning = started_sharing((HOUR_S, HOUR_S))

    result = run(jobs, options=replace(PLAIN, power_limit_w=100.0), beginning=beginning)

    ran_s = HOUR_S * 2 / PACE  # either would keep it busy, were there no other
    assert result.columns.jct_s.tolist() == pytest.approx([ran_s] * 2)
    assert result.peak_power_w == pytest.approx(40 + 60 * PACE)


def test_gandiva_packs_light_jobs_where_they_wait_and_all_end_sooner() -> None:
    jobs = a_workload([(0.0, 2 * HOUR_S, 1)] * 12, [replace(LIGHT, checkpoint_s=10.0, restart_s=30.0)])

    packed, apart = (run(jobs, "1x8:V100", parameters={"packing": packing}) for packing in (True, False))

    assert packed.avg_jct_s < 0.85 * apart.avg_jct_s
    assert packed.makespan_s < 0.9 * apart.makespan_s
    assert packed.energy_kwh < apart.energy_kwh
    assert packed.utilisation <= 1


def test_where_pairs_do_less_than_turns_they_are_undone() -> None:
    """Jobs that draw all a board may draw do 0.81 of one alone in pairs."""
    heavy = replace(a_profile("heavy", gpu_w=300.0), restart_s=0.0, checkpoint_s=0.0)
    jobs = a_workload([(0.0, 4 * HOUR_S, 1)] * 3, [heavy])
    seen: list[int] = []

    def watching(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
        seen.append(len(snapshot.shared))
        return rounds.run_cycle(policy, snapshot, memory)

    with patch("services.simulator.engine.simulation.run_under_orders", watching):
        result = run(jobs, "1x2:V100")

    assert 1 in seen
    assert seen[len(seen) // 2 :].count(1) == 0
    assert result.avg_jct_s <= 1.03 * run(jobs, "1x2:V100", parameters={"packing": False}).avg_jct_s


def checked(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
    """Hold a round, after a look at who holds what."""
    held = Counter(
        (share.node_id, device)
        for placement in snapshot.jobs.placements
        for share in (placement.shares if placement else ())
        for device in share.devices
    )
    free = {
        (node, device)
        for node, on in zip(snapshot.nodes.ids, snapshot.nodes.free_devices, strict=True)
        for device in on
    }
    assert not free & held.keys()
    assert sum(count == 2 for count in held.values()) == len(snapshot.shared)
    assert max(held.values(), default=0) <= (2 if policy.name == "gandiva" else 1)
    result = rounds.run_cycle(policy, snapshot, memory)
    if policy.name != "gandiva":
        assert not any(isinstance(action, Start) and action.shares for action in result.plan.actions)
    queued = np.flatnonzero(snapshot.jobs.phase == Phase.QUEUED)
    assert all(snapshot.jobs.placements[job] is None for job in queued.tolist())
    return result


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_but_gandiva_ever_puts_two_jobs_on_a_device(policy: str) -> None:
    kinds = [LIGHT, a_profile("heavy", gpu_w=280.0)]
    jobs = a_workload(
        [(600.0 * at, HOUR_S, 1 + at % 2) for at in range(14)], kinds, profile=[at % 2 for at in range(14)]
    )

    with patch("services.simulator.engine.simulation.run_under_orders", checked):
        simulate(policy, jobs, ClusterSpec.parse("1x2:V100"), a_wave(4), options=PLAIN)


@settings(max_examples=25)
@given(
    work_s=st.lists(st.integers(300, 20_000), min_size=1, max_size=12),
    watts=st.lists(st.integers(60, 300), min_size=1, max_size=3),
    gpus=st.integers(1, 3),
    fails=st.booleans(),
)
def test_energy_adds_up_and_all_work_is_done(work_s: list[int], watts: list[int], gpus: int, fails: bool) -> None:
    kinds = [a_profile(f"k{at}", gpu_w=float(each), restart_s=30.0) for at, each in enumerate(watts)]
    rows = [(200.0 * at, float(each), 1) for at, each in enumerate(work_s)]
    jobs = a_workload(rows, kinds, profile=[at % len(kinds) for at in range(len(rows))])
    options = replace(PLAIN, node_mtbf_s=HOUR_S, node_repair_s=600.0) if fails else PLAIN

    with patch("services.simulator.engine.simulation.run_under_orders", checked):
        result = run(jobs, f"1x{gpus}:V100", options)

    assert result.completed == len(rows)
    jobs_j = float(result.columns.energy_j.sum())
    assert result.energy_kwh * 3.6e6 == pytest.approx(jobs_j + result.idle_energy_kwh * 3.6e6, rel=1e-9)
    assert result.columns.carbon_gco2.sum() + result.idle_carbon_kg * 1_000 == pytest.approx(result.carbon_kg * 1_000)
    assert 0 < result.utilisation <= 1 + 1e-9
