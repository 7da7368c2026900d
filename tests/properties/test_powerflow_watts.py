"""The starts a power limit leaves, held against dropping the last one and counting everything anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle.buddy import buddy
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Hold, Plan, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.ids import NodeId
from services.core.domain.reasons import Reason
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.view import Tables
from services.core.policies.powerflow.watts import set_within
from tests.support.powerflow_clusters import IDLE_W, an_hour_on, fitted_models, gangs_of, waiting_cluster

N_JOBS, NODES = 14, 6
GANGS = gangs_of(fitted_models(np.random.default_rng(8), 4))


def starts_of(snapshot: Snapshot, sizes: list[int]) -> list[Start]:
    """Return starts of the jobs that wait, in blocks, as many as find one."""
    free = FreeDevices(snapshot.nodes)
    waiting = np.flatnonzero(snapshot.jobs.gpus == 0).tolist()
    placed = ((job, buddy(snapshot, job, gpus, 0, free)) for job, gpus in zip(waiting, sizes, strict=False))
    return [Start(snapshot.jobs.ids[job], each, Reason.IN_ORDER) for job, each in placed if each is not None]


def plainly(snapshot: Snapshot, starts: list[Start], limit_w: float, spare_nodes: int) -> tuple[int, set[str]]:
    """Return how many starts the limit leaves, and which nodes are powered down then."""
    tables, jobs, nodes = Tables(snapshot, PowerflowConfig()), snapshot.jobs, snapshot.nodes
    down: list[NodeId] = []
    for n_starts, spare in [(len(starts), spare_nodes), *((each, 0) for each in range(len(starts), -1, -1))]:
        gangs = [(job, int(jobs.gpus[job])) for job in np.flatnonzero(jobs.gpus).tolist()]
        gangs += [(jobs.index[start.job_id], start.gpus) for start in starts[:n_starts]]
        free = dict(zip(nodes.ids, nodes.free_gpus.tolist(), strict=True))
        for share in (share for start in starts[:n_starts] for share in start.placement.shares):
            free[share.node_id] -= len(share.devices)
        wake = {share.node_id for start in starts[:n_starts] for share in start.placement.shares}
        sleeping = {node for node, asleep in zip(nodes.ids, nodes.asleep, strict=True) if asleep and node not in wake}
        empty = [node for at, node in enumerate(nodes.ids) if free[node] == nodes.gpus[at] and node not in sleeping]
        down = [node for node in empty if nodes.may_sleep[nodes.index[node]]][spare:]
        idle_w = sum(IDLE_W * gpus for node, gpus in free.items() if node not in sleeping and node not in down)
        if idle_w + sum(float(tables.gang(job, 0, gpus)[1].min()) for job, gpus in gangs) <= limit_w:
            return n_starts, set(down)
    return 0, set(down)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8, 12]), min_size=2 * N_JOBS, max_size=2 * N_JOBS),
    runs=st.integers(0, 6),
    share=st.floats(0.05, 1.0),
    spare_nodes=st.integers(0, 2),
)
def test_the_last_starts_wait_until_the_lowest_settings_fit(
    seed: int, sizes: list[int], runs: int, share: float, spare_nodes: int
) -> None:
    rng = np.random.default_rng(seed)
    snapshot = waiting_cluster(N_JOBS, 8 * NODES, GANGS, seed=seed)
    snapshot = an_hour_on(snapshot, Plan(snapshot.version, tuple(starts_of(snapshot, sizes[:runs]))), ended=0.0)
    asleep = (snapshot.nodes.free_gpus == snapshot.nodes.gpus) & (rng.random(NODES) < 0.3)
    snapshot = replace(
        snapshot, nodes=replace(snapshot.nodes, asleep=asleep, may_sleep=asleep | (rng.random(NODES) < 0.7))
    )
    starts = starts_of(snapshot, sizes[N_JOBS:])
    limit_w = share * 8 * NODES * 200.0
    config = PowerflowConfig(spare_nodes=spare_nodes)

    plan, unmeasured = set_within(
        snapshot, Plan(snapshot.version, tuple(starts)), Tables(snapshot, config), limit_w, config, (), all_placed=True
    )

    assert not unmeasured
    n_starts, down = plainly(snapshot, starts, limit_w, spare_nodes)
    assert [action for action in plan.actions if isinstance(action, Start)] == starts[:n_starts]
    holds = [action for action in plan.actions if isinstance(action, Hold)]
    assert holds == [Hold(start.job_id, Reason.POWER_LIMIT) for start in starts[n_starts:]]
    assert {node.node_id for node in plan.nodes} == down
