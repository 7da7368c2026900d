"""What the cluster holds, by GPU model: free, being released, in use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.cycle.sizes import model_gpus
from services.core.cycle.snapshot import Bools, Ints, Phase, Snapshot

PREEMPTING = int(Phase.PREEMPTING)


@dataclass(frozen=True)
class Capacity:
    """Devices on schedulable nodes, and who has them.

    Attributes:
        total: (n_gpu_models,) all devices of each model.
        free: (n_gpu_models,) devices nobody holds.
        releasing: (n_gpu_models,) devices of jobs that are stopping; soon free.
        model: (n_jobs,) GPU model of what the job holds, -1 where it holds nothing on a known node.
        held: (n_jobs,) devices the job holds on schedulable nodes: what stopping it would free.
        movable: (n_jobs,) False for a job that sits, even in part, on a drained or unknown node. Such a job is never
            resized, since it could not come back there.
    """

    total: Ints
    free: Ints
    releasing: Ints
    model: Ints
    held: Ints
    movable: Bools


def capacity_of(snapshot: Snapshot) -> Capacity:
    """Return the cluster's capacity as the snapshot shows it."""
    nodes, jobs = snapshot.nodes, snapshot.jobs
    n_models = len(snapshot.gpu_models)
    if n_models == 1 and nodes.all_schedulable:
        held = jobs.gpus
        free = np.array([nodes.free_gpus.sum()])
        releasing = np.array([held[jobs.phase == PREEMPTING].sum()])
        return Capacity(
            model_gpus(snapshot), free, releasing, np.where(held > 0, 0, -1), held, np.ones(len(jobs), dtype=np.bool_)
        )
    sizes, taking = nodes.free_gpus, nodes.schedulable
    free = np.bincount(nodes.gpu_model[taking], weights=sizes[taking], minlength=n_models).astype(np.int64)
    model, held, movable = _located(snapshot)
    stopping = (jobs.phase == PREEMPTING) & (held > 0)
    releasing = np.bincount(model[stopping], weights=held[stopping], minlength=n_models).astype(np.int64)
    return Capacity(model_gpus(snapshot), free, releasing, model, held, movable)


def _located(snapshot: Snapshot) -> tuple[Ints, Ints, Bools]:
    nodes, jobs = snapshot.nodes, snapshot.jobs
    where = {node_id: index for index, node_id in enumerate(nodes.ids)}
    models: list[int] = nodes.gpu_model.tolist()
    takes: list[bool] = nodes.schedulable.tolist()
    model = np.full(len(jobs), -1, dtype=np.int64)
    held = np.zeros(len(jobs), dtype=np.int64)
    movable = np.ones(len(jobs), dtype=np.bool_)
    for job in np.flatnonzero(jobs.gpus > 0).tolist():
        placement = jobs.placements[job]
        for share in placement.shares if placement else ():
            node = where.get(share.node_id)
            if node is None or not takes[node]:
                movable[job] = False
            else:
                held[job] += len(share.devices)
            if node is not None:
                model[job] = models[node]
    return model, held, movable
