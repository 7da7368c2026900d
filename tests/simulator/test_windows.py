"""Reservations and maintenance in a simulation: the same layer, under every policy of the product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from services.core.cycle.policy import Policy
from services.core.cycle.run_cycle import CycleResult
from services.core.cycle.snapshot import PREEMPTING, Snapshot
from services.core.domain.ids import NodeId
from services.core.domain.windows import Window
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ClusterSpec
from tests.support.workloads import a_profile, a_wave, a_workload


@pytest.mark.parametrize("name", POLICIES)
def test_windows_are_kept_and_what_is_left_of_them_is_used(name: str) -> None:
    jobs = a_workload([(600.0 * at, 9_000.0, 1 + at % 3) for at in range(24)], [a_profile(scaling=0.9)])
    jobs = replace(jobs, tenants=tuple("red" if at % 4 else "blue" for at in range(len(jobs))))
    cluster = ClusterSpec.parse("3x4:RTX3090")
    began_s = float(jobs.submitted_s[0])
    seen: set[str] = set()

    def watched(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> CycleResult[Any]:
        table = snapshot.jobs
        for window in snapshot.windows:
            if window.start_s > snapshot.now_s:
                continue
            own = [tenant == window.holder for tenant in table.tenants]
            for node_id, gpus in window.gpus.items():
                others = sum(
                    len(share.devices)
                    for at, placement in enumerate(table.placements)
                    if placement is not None and not own[at] and table.phase[at] != PREEMPTING
                    for share in placement.shares
                    if share.node_id == node_id
                )
                if window.holder is None or snapshot.now_s < window.start_s + 600:
                    assert others <= 4 - gpus
            seen.add(window.id)
        return run_under_orders(policy, snapshot, memory)

    nodes = [NodeId(f"n{at}") for at in range(3)]
    windows = (
        Window("w", began_s + 20_000, began_s + 40_000, {nodes[2]: 4}, None),
        Window("r", began_s + 9_000, began_s + 30_000, {nodes[0]: 4, nodes[1]: 2}, "blue"),
    )
    free = simulate(name, jobs, cluster, a_wave(4))
    with patch("services.simulator.engine.simulation.run_under_orders", watched):
        kept = simulate(name, jobs, cluster, a_wave(4), options=EngineOptions(windows=windows))
    assert seen == {"w", "r"}
    assert kept.completed == free.completed == len(jobs)
    assert kept.makespan_s <= free.makespan_s + 40_000
