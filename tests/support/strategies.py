"""Clusters as Hypothesis draws them: small, crowded, with every phase and oddity a snapshot may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, hourly_curve

MODELS = ("A100", "V100")

times = st.integers(0, 200_000).map(lambda seconds: NOON_S - seconds)
amounts = st.sampled_from([float("nan"), 0.0, 1.0, 2.0, 40.0, 3_250.0, 90_000.0])
efficiencies = st.sampled_from([float("nan"), 0.0, 0.5, 0.8, 0.9, 0.96, 1.0, 1.1])


@st.composite
def node_rows(draw: st.DrawFn) -> list[NodeRow]:
    """Draw one to four nodes of up to two models, some drained."""
    models = draw(st.sampled_from([MODELS[:1], MODELS]))
    drained = st.sampled_from([True, True, True, True, False])
    return [
        a_node(f"n{at}", gpus=draw(st.integers(1, 6)), model=draw(st.sampled_from(models)), schedulable=draw(drained))
        for at in range(draw(st.integers(1, 4)))
    ]


@st.composite
def job_rows(
    draw: st.DrawFn, name: str, nodes: list[NodeRow], free: dict[str, set[int]], phases: Sequence[Phase] = tuple(Phase)
) -> JobRow:
    """Draw a job; one that holds devices takes them off ``free``."""
    low, step = draw(st.sampled_from([1, 1, 1, 2, 3, 6])), draw(st.sampled_from([1, 1, 2]))
    high = low + step * draw(st.integers(0, 3))
    job = a_job(
        name,
        min_gpus=low,
        max_gpus=high,
        step_gpus=step,
        asked_gpus=low + step * draw(st.integers(0, (high - low) // step)),
        models=draw(st.sampled_from([None, None, MODELS[:1], MODELS[1:], ("H100",)])),
        tenant=draw(st.sampled_from(["red", "blue"])),
        preemptible=draw(st.sampled_from([True, True, True, False])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        submitted_s=draw(times),
        waiting_since_s=draw(times),
        attained_gpu_s=draw(amounts),
        carbon_gco2=draw(amounts),
        gpu_power_w=draw(st.sampled_from([float("nan"), 100.0, 200.0, 250.0, 350.0])),
        efficiency_base=draw(efficiencies),
        efficiency_now=draw(efficiencies),
        shareable=True,
    )
    phase = draw(st.sampled_from(phases))
    if phase == Phase.QUEUED:
        return job
    size = draw(st.sampled_from(range(low, high + 1, step)))
    model = draw(st.sampled_from([node.model for node in nodes]))
    devices = [(node.name, at) for node in nodes if node.model == model for at in sorted(free[node.name])][:size]
    if len(devices) < size or (job.models is not None and model not in job.models):
        return job
    on: dict[str, tuple[int, ...]] = {}
    for node, device in devices:
        free[node].remove(device)
        on[node] = (*on.get(node, ()), device)
    return replace(job, phase=phase, gpus=size, on=on)


@st.composite
def snapshots(draw: st.DrawFn, trigger: Trigger | None = None, *, max_jobs: int = 10) -> Snapshot:
    """Draw a snapshot of a cluster that could be."""
    nodes = draw(node_rows())
    free = {node.name: set(range(node.gpus)) for node in nodes}
    jobs = [draw(job_rows(f"j{at}", nodes, free)) for at in range(draw(st.integers(0, max_jobs)))]
    hours = draw(st.lists(st.integers(-50, 600), min_size=1, max_size=48))
    return a_snapshot(
        draw(st.permutations(jobs)),
        nodes,
        trigger=trigger or draw(st.sampled_from(list(Trigger))),
        curve=hourly_curve(hours, start_s=NOON_S - 3600.0 * draw(st.integers(0, 30))),
        quota=draw(st.sampled_from([{}, {}, {"red": 3}, {"red": 0, "blue": 7}])),
    )


@st.composite
def trees(draw: st.DrawFn, n_nodes: int) -> Ints:
    """Draw the domains of a cluster's nodes, racks within blocks, as ``NodeTable.domains``."""
    rack_of = np.array([draw(st.integers(0, 2)) for _ in range(n_nodes)], dtype=np.int64)
    block_of = np.array([draw(st.integers(0, 1)) for _ in range(3)], dtype=np.int64)
    return np.stack((np.arange(n_nodes), rack_of, block_of[rack_of]), axis=1)


@st.composite
def with_levels(draw: st.DrawFn, snapshot: Snapshot) -> Snapshot:
    """Draw the same snapshot on a tree of racks and blocks, on which some jobs require a level, and others prefer one.

    Some require a level that there is not.
    """
    nodes = replace(snapshot.nodes, domains=draw(trees(len(snapshot.nodes))))
    within, near = dict[JobId, int](), dict[JobId, int]()
    for job_id in snapshot.jobs.ids:
        level, kind = draw(st.sampled_from([0, 1, 1, 2, -1])), draw(st.sampled_from([None, within, near]))
        if kind is within or (kind is near and level >= 0):
            kind[job_id] = level
    return replace(snapshot, nodes=nodes, levels=("node", "rack", "block"), within=within, near=near)
