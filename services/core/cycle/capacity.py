"""What the cluster holds, by GPU model: free, being released, in use; and the sizes that gangs can have on it."""

from collections.abc import Iterable
from functools import cached_property, lru_cache

import numpy as np

from services.core.cycle.plan import Action, Start
from services.core.cycle.rounds import is_uniform, stopping
from services.core.cycle.snapshot import JobTable, Snapshot
from services.core.domain.arrays import Bools, Ints


def model_gpus(snapshot: Snapshot) -> Ints:
    """Return the number of GPUs of each model on schedulable nodes: (n_gpu_models,)."""
    nodes = snapshot.nodes
    if len(snapshot.gpu_models) == 1:
        return np.array([snapshot.total_gpus])
    taking = np.where(nodes.schedulable, nodes.gpus, 0)
    return np.bincount(nodes.gpu_model, taking, len(snapshot.gpu_models)).astype(np.int64)


def left_free(snapshot: Snapshot, actions: Iterable[Action]) -> Ints:
    """Return how many devices starts leave free on schedulable nodes, by model: (n_gpu_models,)."""
    nodes = snapshot.nodes
    free = np.where(nodes.schedulable, nodes.free_gpus, 0)
    for start in (each for each in actions if isinstance(each, Start) and not each.shares):
        for share in start.placement.shares:
            free[nodes.index[share.node_id]] -= len(share.devices)
    return np.bincount(nodes.gpu_model, np.maximum(free, 0), len(snapshot.gpu_models)).astype(np.int64)


def possible_sizes(snapshot: Snapshot, wanted_gpus: Ints, which: Ints | None = None) -> Ints:
    """Return the largest size up to ``wanted_gpus`` that each job could ever run at, and at least its minimum.

    The size lies on the job's grid ``min, min + step, ..., max``, within the largest model the job may use (a gang
    never spans models) and within its tenant's quota. A job whose minimum exceeds these keeps it: it cannot run,
    and a round says so.

    Args:
        wanted_gpus: (n_jobs,) any integers; (n_which,) where ``which`` is given.
        which: (n_which,) indices of the jobs meant; None for all.
    """
    jobs = snapshot.jobs
    low, high, step, eligible = jobs.min_gpus, jobs.max_gpus, jobs.step_gpus, jobs.eligible
    if which is not None:
        low = low[which]
        more = np.flatnonzero(wanted_gpus > low)
        if more.size < which.size:  # of a long queue most wait at their minimum
            if more.size:
                low[more] = possible_sizes(snapshot, wanted_gpus[more], which[more])
            return low
        high, step, eligible = high[which], step[which], eligible[which]
    if len(snapshot.gpu_models) == 1:
        largest = eligible[:, 0] * snapshot.total_gpus
    else:
        largest = np.where(eligible, model_gpus(snapshot)[None, :], 0).max(axis=1, initial=0)
    if snapshot.tenant_gpu_quota:
        quota = snapshot.tenant_gpu_quota
        boundless = int(largest.max(initial=0))
        tenants = jobs.tenants if which is None else map(jobs.tenants.__getitem__, which.tolist())
        limits = np.fromiter((quota.get(tenant, boundless) for tenant in tenants), np.int64, largest.size)
        largest = np.minimum(largest, limits)
    upper = np.minimum(np.minimum(wanted_gpus, high), largest)
    steps = np.maximum(upper - low, 0) // step
    return low + steps * step


def resumed_size(jobs: JobTable, job: int) -> int:
    """Return the size at which a gang that is stopped waits again: its present one if its grid has it, or the least."""
    held, low, high, step = (column.item(job) for column in (jobs.gpus, jobs.min_gpus, jobs.max_gpus, jobs.step_gpus))
    return held if low <= held <= high and not (held - low) % step else low


def powers_of_two(low: Ints, high: Ints, step: Ints) -> Ints:
    """Return the powers of two on each job's grid ``low, low + step, ..., high``.

    A job whose grid has none, such as a rigid gang of three, gets only its smallest size.

    Returns:
        (n_jobs, n_sizes) sizes, ascending along a row; 0 beyond a job's last size.

    Source: PowerFlow section 5.3.
    """
    rows = list(map(_powers_on, low.tolist(), high.tolist(), step.tolist()))
    width = max(map(len, rows), default=1)
    table = [row + (0,) * (width - len(row)) for row in rows]
    return np.array(table, dtype=np.int64).reshape(len(rows), width)


@lru_cache(maxsize=1 << 12)
def _powers_on(low: int, high: int, step: int) -> tuple[int, ...]:
    """Return the powers of two on one grid; cached, since a workload has few grids and rounds reuse them."""
    powers = (1 << bit for bit in range(max(high, 1).bit_length()))
    return tuple(size for size in powers if low <= size <= high and not (size - low) % step) or (low,)


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
