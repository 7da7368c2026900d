"""Levels of the network in simulations: every job is done, within its rack where it must, and nothing changes without.

The same placing as live (``tests/properties/test_levels.py``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from services.core.cycle import reconcile
from services.core.cycle.packing import REST_S, moves
from services.core.cycle.plan import Preempt
from services.core.cycle.snapshot import Snapshot
from services.core.domain.placement import Placement
from services.core.domain.topology import read_topology
from services.core.parallel.graph import data_parallel
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.cluster import Nodes
from services.simulator.workload import ClusterSpec
from tests.support.workloads import a_profile, a_trace, a_workload

CLUSTER = ClusterSpec.parse("6x2:RTX3090")
RACKS = read_topology("rack a: n[0-1]\nrack b: n[2-3]\nrack c: n[4-5]\nblock x: a, b\n")


def a_week(jobs: int = 120) -> Any:
    random = np.random.default_rng(5)
    at_s = np.sort(random.uniform(0, 7 * 86_400.0, jobs))
    sizes = random.choice([1, 1, 2, 3, 4], jobs)
    return a_workload([(float(s), float(w), int(g)) for s, w, g in zip(at_s, random.uniform(600, 40_000, jobs), sizes,
                                                                       strict=True)])  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES])
def test_in_a_week_every_gang_lies_in_one_rack_where_all_must_and_every_job_is_done(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Placement] = []
    take = Nodes.take
    monkeypatch.setattr(
        Nodes, "take", lambda self, placement, *rest: (seen.append(placement), take(self, placement, *rest))[1]
    )
    week, options = a_week(), EngineOptions(rigid=not POLICIES[policy].elastic)

    plain = simulate(policy, week, CLUSTER, a_trace(), options=options)
    spread = sum(len({int(share.node_id[1:]) // 2 for share in each.shares}) > 1 for each in seen)
    seen.clear()
    confined = simulate(policy, week, CLUSTER, a_trace(), options=replace(options, topology=RACKS, within="rack"))

    assert spread > 0, "without levels, some span racks"
    assert all(len({int(share.node_id[1:]) // 2 for share in each.shares}) == 1 for each in seen)
    assert np.isfinite(plain.columns.jct_s).all()
    assert np.isfinite(confined.columns.jct_s).all()


def test_moves_that_make_room_help_and_never_go_back_and_forth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gangs of a higher priority lie in all racks; those that wait for a rack end sooner with moves than without."""
    made: list[tuple[float, str]] = []

    def noted(snapshot: Snapshot, *rest: Any) -> list[Preempt]:
        found = moves(snapshot, *rest)
        made.extend((snapshot.now_s, each.job_id) for each in found)
        return found

    week = a_week(200)
    week = replace(week, priority=np.where(week.requested_gpus < 3, 1, 0))
    options = EngineOptions(rigid=True, topology=RACKS, within="rack")
    monkeypatch.setattr(reconcile, "moves", lambda *_: [])
    without = simulate("las", week, CLUSTER, a_trace(), options=options)
    monkeypatch.setattr(reconcile, "moves", noted)
    result = simulate("las", week, CLUSTER, a_trace(), options=options)

    wide = week.requested_gpus >= 3
    assert made
    assert result.columns.jct_s[wide].mean() < without.columns.jct_s[wide].mean()
    for job in {job for _, job in made}:
        times = [at_s for at_s, each in made if each == job]
        assert all(later - sooner >= REST_S for sooner, later in pairwise(times))


@pytest.mark.parametrize("policy", [*POLICIES])
def test_one_level_of_single_nodes_changes_nothing(policy: str) -> None:
    """All levels are known, and say nothing: so every plan is the one without them."""
    each_alone = "".join(f"rack r{at}: n{at}\n" for at in range(6))
    options = EngineOptions(rigid=not POLICIES[policy].elastic)

    plain, levels = (
        simulate(policy, a_week(60), CLUSTER, a_trace(), options=replace(options, topology=read_topology(text)))
        for text in ("", each_alone)
    )

    assert levels.summary() | {"wall_s": 0} == plain.summary() | {"wall_s": 0}


def test_a_gang_runs_as_fast_as_its_rack_lets_it() -> None:
    """Two nodes of one rack exchange at 400 Gb/s, those of two at 10: the same gang takes longer over two racks."""
    graph = data_parallel(4, 4e9, 0.2)
    jobs = a_workload([(0.0, 3_600.0, 4)], [a_profile(graph=graph)])
    fast = "rack a: n[0-1]\nbandwidth rack 400\n"
    apart = "rack a: n0\nrack b: n1\nbandwidth rack 400\n"

    near, far, unsaid = (
        simulate(
            "a-srpt",
            jobs,
            ClusterSpec.parse("2x2:RTX3090"),
            a_trace(),
            options=EngineOptions(topology=read_topology(text)),
        )
        for text in (fast, apart, "")
    )

    assert near.avg_jct_s < 0.6 * far.avg_jct_s
    assert far.avg_jct_s == unsaid.avg_jct_s
