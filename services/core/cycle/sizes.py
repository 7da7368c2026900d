"""The sizes a gang may really take on this cluster."""

from __future__ import annotations

import numpy as np

from services.core.cycle.snapshot import Ints, Snapshot


def model_gpus(snapshot: Snapshot) -> Ints:
    """Return the GPUs on schedulable nodes of each model: (n_gpu_models,)."""
    nodes = snapshot.nodes
    if len(snapshot.gpu_models) == 1:
        return np.array([snapshot.total_gpus])
    taking = nodes.schedulable
    return np.bincount(nodes.gpu_model[taking], weights=nodes.gpus[taking], minlength=len(snapshot.gpu_models)).astype(
        np.int64
    )


def possible_sizes(snapshot: Snapshot, wanted_gpus: Ints) -> Ints:
    """Return the size nearest to ``wanted_gpus`` from below that each job could ever run at, and at least its minimum.

    The size lies on the job's grid ``min, min + step, ..., max``, within the largest model the job may use (a gang
    never spans models) and within its tenant's quota. A job whose minimum exceeds those keeps its minimum: it cannot
    run, and a round says so.

    Args:
        snapshot: The cluster.
        wanted_gpus: (n_jobs,) any integers.

    Returns:
        (n_jobs,) sizes of the jobs' grids.
    """
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) == 1:
        largest = jobs.eligible[:, 0] * snapshot.total_gpus
    else:
        largest = np.where(jobs.eligible, model_gpus(snapshot)[None, :], 0).max(axis=1, initial=0)
    if snapshot.tenant_gpu_quota:
        quota = snapshot.tenant_gpu_quota
        boundless = int(largest.max(initial=0))
        limits = np.fromiter((quota.get(tenant, boundless) for tenant in jobs.tenants), np.int64, len(jobs))
        largest = np.minimum(largest, limits)
    upper = np.minimum(np.minimum(wanted_gpus, jobs.max_gpus), largest)
    steps = np.maximum(upper - jobs.min_gpus, 0) // jobs.step_gpus
    return jobs.min_gpus + steps * jobs.step_gpus
