"""What the cluster holds, by GPU model: free, being released, in use."""

from functools import cached_property

import numpy as np

from services.core.cycle.rounds import is_uniform, stopping
from services.core.cycle.sizes import model_gpus
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Ints


class Capacity:
    """Devices on schedulable nodes, and who holds them."""

    def __init__(self, snapshot: Snapshot) -> None:
        nodes, jobs = snapshot.nodes, snapshot.jobs
        self._snapshot = snapshot
        self._uniform = is_uniform(snapshot)
        self.total: Ints = model_gpus(snapshot)  #: (n_gpu_models,) number of devices of each model
        goes = stopping(snapshot)
        if self._uniform:
            self.free: list[int] = [nodes.free_total]
            self.releasing: list[int] = [int(jobs.gpus[goes].sum()) if goes.size else 0]
            return
        taking, n_models = nodes.schedulable, self.total.size
        free = np.bincount(nodes.gpu_model[taking], weights=nodes.free_gpus[taking], minlength=n_models)
        self.free = free.astype(np.int64).tolist()  #: Devices that no job holds, by model
        self.releasing = [0] * n_models  #: Devices of jobs that are stopping, by model; they will soon be free
        if goes.size:
            goes = goes[self.held[goes] > 0]
            releasing = np.bincount(self.model[goes], weights=self.held[goes], minlength=n_models)
            self.releasing = releasing.astype(np.int64).tolist()

    @property
    def room(self) -> list[int]:
        """Devices available now or soon without stopping any job, by model."""
        return [free + soon for free, soon in zip(self.free, self.releasing, strict=True)]

    @property
    def model(self) -> Ints:
        """(n_jobs,) index of the GPU model the job holds, -1 if it holds none on a known node."""
        return self._located[0]

    @property
    def held(self) -> Ints:
        """(n_jobs,) number of devices the job holds on schedulable nodes: what stopping it would free."""
        return self._located[1]

    @property
    def movable(self) -> Bools:
        """(n_jobs,) False for a job that is, even in part, on a drained or unknown node.

        Such a job is never resized, since it could not be placed there again.
        """
        return self._located[2]

    @cached_property
    def _located(self) -> tuple[Ints, Ints, Bools]:
        nodes, jobs = self._snapshot.nodes, self._snapshot.jobs
        if self._uniform:
            return np.where(jobs.gpus > 0, 0, -1), jobs.gpus, np.ones(len(jobs), dtype=np.bool_)
        where = nodes.index
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
