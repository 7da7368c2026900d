"""The least carbon any schedule could have reached with a trace's work, for the report beside what policies reached.

The linear programme of ``services.core.policies.bounds.carbon``: hours with perfect knowledge, work that may be cut at
will, every job at the gang size that takes the fewest joules, idle GPUs drawing what the engine has them draw. The
horizon of shifting is how much longer than its own duration a job may stay: it may run from its submission until
submission + duration + horizon; without one, until the end. No queue, gang, restart or checkpoint is paid for. It holds
for policies that leave the work as it is: one that tunes batch sizes or sets power limits may emit less.

Jobs of one power whose windows begin within the same ``bin_s`` and end within the same are one class, whose window is
the widest of theirs: that only lowers the bound. With ``tiers`` fewer powers are distinguished (their mean stands for
them), which keeps a year small and may raise the bound by the little that swapping within a tier would have saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.units import S_PER_HOUR
from services.core.policies.bounds.carbon import CarbonBound, CarbonBoundProblem, Work, carbon_bound
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

LARGEST = 3_000_000
"""Pairs of a class of work and an hour; more would take minutes and gigabytes."""


@dataclass(frozen=True)
class Need:
    """What each job takes at its most efficient size; (n_jobs,) GPU-hours, watts per GPU, seconds at one GPU."""

    gpu_hours: Floats
    power_w: Floats
    duration_s: Floats


def need_of(workload: Workload, cluster: ClusterSpec) -> Need:
    """Return each job's least need over the cluster's GPU models and the sizes it may have."""
    gpu_hours, power_w, duration_s = (np.full(len(workload), np.inf) for _ in range(3))
    energy = np.full(len(workload), np.inf)
    for model in {group.model.name for group in cluster.groups}:
        for index, profile in enumerate(workload.profiles):
            truth = profile.truth(model)
            rows = np.flatnonzero(workload.profile == index)
            if truth is None or not rows.size:
                continue
            for size in truth.gpus.tolist():
                at = np.array([size], dtype=np.int64)
                speed, watts = float(truth.speed_at(at)[0]), float(truth.power_w_at(at)[0]) + profile.host_power_w
                fits = rows[(workload.min_gpus[rows] <= size) & (size <= workload.max_gpus[rows])]
                hours = workload.work_s[fits] / speed * size / S_PER_HOUR
                better = hours * watts < energy[fits]
                chosen = fits[better]
                energy[chosen], gpu_hours[chosen], power_w[chosen] = hours[better] * watts, hours[better], watts
                duration_s[chosen] = workload.work_s[chosen] / speed
    return Need(gpu_hours, power_w, duration_s)


def bound_of(
    workload: Workload,
    cluster: ClusterSpec,
    grid: CarbonTrace,
    *,
    end_s: float,
    horizon_s: float | None,
    host_idle_w: float = 0.0,
    bin_s: float = 3_600.0,
    tiers: int | None = None,
) -> CarbonBound:
    """Return the bound of a workload.

    Args:
        workload: The jobs.
        cluster: What they may run on; idle power is the mean of its GPUs.
        grid: The intensities.
        end_s: Until when work may run and idle power is counted: the end of the run it is compared with, UTC seconds.
        horizon_s: Of shifting; None: until ``end_s``.
        host_idle_w: Of the host per idle GPU, watts.
        bin_s: Width of the classes' windows.
        tiers: At most this many powers are distinguished; None: all.

    Raises:
        DomainError: more than ``LARGEST`` unknowns, or jobs on slices.
    """
    if workload.slice_sevenths is not None:
        raise DomainError("there is no bound for jobs on slices")
    need = need_of(workload, cluster)
    power_w = _tiered(need, tiers)
    begin_s = float(workload.submitted_s[0]) // bin_s * bin_s
    release = np.floor(workload.submitted_s / bin_s) * bin_s
    if horizon_s is None:
        deadline = np.full(len(workload), end_s)
    else:
        last = workload.submitted_s + need.duration_s + horizon_s
        deadline = np.minimum(np.ceil(last / bin_s) * bin_s, end_s)
    classes, index = np.unique(np.stack([power_w, release, deadline]), axis=1, return_inverse=True)
    hours = np.bincount(index.reshape(-1), need.gpu_hours)
    work = [
        Work(float(amount), float(watts), release_s=float(first), deadline_s=float(last))
        for (watts, first, last), amount in zip(classes.T, hours, strict=True)
    ]
    gpus = float(cluster.gpus)
    idle_w = sum(group.count * group.gpus * group.model.idle_w for group in cluster.groups) / gpus + host_idle_w
    problem = CarbonBoundProblem(grid.curve.cut(begin_s, end_s), np.array(gpus), work, idle_power_w=idle_w)
    if problem.cells > LARGEST:
        raise DomainError(
            f"a bound of {problem.cells} unknowns is too large to solve: choose a shorter horizon of shifting"
        )
    return carbon_bound(problem)


def _tiered(need: Need, tiers: int | None) -> Floats:
    levels = np.unique(need.power_w)
    if tiers is None or levels.size <= tiers:
        return need.power_w
    edges = np.quantile(need.power_w, np.linspace(0, 1, tiers + 1)[1:-1])
    tier = np.searchsorted(edges, need.power_w, side="left")
    energy, hours = np.bincount(tier, need.power_w * need.gpu_hours), np.bincount(tier, need.gpu_hours)
    return (energy / np.maximum(hours, 1e-12))[tier]
