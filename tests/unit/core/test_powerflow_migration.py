"""PowerFlow's moves: they pay for themselves, or do not happen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.plan import Preempt
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot
from services.core.domain.reasons import Reason
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot

NODES = [a_node(name, gpus=4) for name in ("a", "b")]


def running(name: str, node: str, *devices: int, submitted_s: float = NOON_S - 7_200.0) -> JobRow:
    return a_job(name, on={node: devices}, max_gpus=len(devices), submitted_s=submitted_s, waiting_since_s=submitted_s)


def moved(jobs: list[JobRow], left_s: dict[str, float], *, sleeps: bool, **parameters: object) -> list[str]:
    """Return the jobs an active round moves; ``left_s``: how long those that run still take."""
    snapshot: Snapshot = a_snapshot(jobs, NODES)
    remaining = np.array([left_s.get(job.name, 600.0) for job in jobs])
    nodes = replace(snapshot.nodes, may_sleep=np.full(2, sleeps))
    snapshot = replace(
        snapshot, jobs=replace(snapshot.jobs, remaining_s=remaining), nodes=nodes, idle_w=np.array([70.0])
    )
    policy = build_policy("powerflow", {"migration": True, "restart_s": 60.0, "resize_gain": 2.0, **parameters})
    plan = run_cycle(policy, snapshot, policy.initial()).plan
    return [
        action.job_id
        for action in plan.actions
        if isinstance(action, Preempt) and action.reason is Reason.DEFRAGMENTATION
    ]


SCATTERED = [running("x", "a", 0), running("y", "b", 0, 1), a_job("w", min_gpus=4, max_gpus=4, submitted_s=NOON_S - 60)]


@pytest.mark.parametrize(("left_s", "expected"), [(119.0, []), (121.0, ["x"])])
def test_a_job_moves_off_a_block_for_a_gang_that_would_wait_longer_than_its_restarts(
    left_s: float, expected: list[str]
) -> None:
    """One restart of 60 s, twice; the gang of four would wait until ``x`` ends, before ``y`` does."""
    assert moved(SCATTERED, {"x": left_s, "y": 5_000.0}, sleeps=False) == expected


@pytest.mark.parametrize(("left_s", "expected"), [(128.0, []), (129.0, ["x"])])
def test_a_job_moves_off_a_node_that_would_idle_for_more_energy_than_its_restart(
    left_s: float, expected: list[str]
) -> None:
    """A restart draws 300 W for 60 s, twice: 36 kJ; the node idles at 280 W, so that 128.6 s of it are as much.

    ``y`` draws twice that on two GPUs and ends before it would pay.
    """
    assert moved(SCATTERED[:2], {"x": left_s, "y": 200.0}, sleeps=True) == expected


def test_nobody_moves_where_nodes_stay_on_or_there_is_no_room_or_it_is_switched_off() -> None:
    long = {"x": 50_000.0, "y": 50_000.0}
    full = [running("x", "a", 0), running("y", "b", 0, 1, 2, 3)]

    assert moved(SCATTERED[:2], long, sleeps=False) == []
    assert moved(full, long, sleeps=True) == []
    assert moved(SCATTERED, long, sleeps=True, migration=False) == []
