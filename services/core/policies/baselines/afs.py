"""AFS, apathetic future share: each GPU goes where it shortens the mean completion time, as far as pairs of jobs tell.

GPUs are given out one step after the other. Of two jobs the one that ends first, ``a``, would take the step for its own
sake; giving it to the longer one, ``b``, is better on average where

    (p'_b - p_b) / p'_b  >  (p'_a - p_a) / p_a

with ``p`` the throughput now and ``p'`` with the step: what follows from comparing the two mean completion times, if
nothing but this step is known of the future, hence the name. The job that wins against all
others takes the step. A job without GPUs counts a full gain: jobs that scale without loss have two GPUs before a longer
one has its first, and jobs that scale badly one.

The throughputs are ``Snapshot.speed_curves``; a job without one is taken to scale without loss. The length is the
predicted remaining time; of a job without a prediction, the service it has had so far. A job whose range moves by
several GPUs counts its gain per GPU. Sizes change in active rounds, each at the price of a restart.

Source: Hwang et al., Elastic Resource Sharing for Distributed Deep Learning, NSDI'21, sections 4.1 and 4.2 (AFS-L).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Plan
from services.core.cycle.ranking import Ranking, every_job, order_by, rank, rank_waiting, waiting, wishes_first
from services.core.cycle.reconcile import Preemption, reconcile
from services.core.cycle.sizes import possible_sizes
from services.core.cycle.snapshot import Bools, Floats, Ints, Phase, Snapshot, Trigger
from services.core.policies.baselines.shortest import Forgetful, NoMemory
from services.core.policies.parameters import check_parameters


@dataclass(frozen=True)
class AfsConfig:
    """AFS has no parameters."""

    def __post_init__(self) -> None:
        check_parameters(self)


class Afs(Forgetful):
    """Elastic shares by marginal throughput between shorter and longer jobs; users' priorities come first."""

    name = "afs"

    def __init__(self, config: AfsConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: NoMemory) -> tuple[Plan, NoMemory]:
        """Return the shares of all jobs in an active round; in between, free GPUs go to the shortest that wait."""
        jobs = snapshot.jobs
        length = lengths(snapshot)
        if snapshot.trigger is Trigger.PASSIVE:
            which = every_job(snapshot) if snapshot.reasons else waiting(snapshot)
            keys, sizes = (length[which], jobs.submitted_s[which]), jobs.min_gpus[which]
            ranking = (rank if snapshot.reasons else rank_waiting)(snapshot, which, sizes, *keys)
            return reconcile(snapshot, ranking, preemption=Preemption.LATER), memory
        order = wishes_first(order_by(jobs.ids, length, jobs.submitted_s), jobs.priority)
        sizes = _shares(snapshot, order, length)
        # Whoever gets nothing stands behind the others at its least size, for what the grid of sizes leaves over.
        order = np.concatenate((order[sizes[order] > 0], order[sizes[order] == 0]))
        sizes = np.maximum(sizes, jobs.min_gpus)
        return reconcile(snapshot, Ranking(order, sizes[order]), preemption=Preemption.NOW), memory


def lengths(snapshot: Snapshot) -> Floats:
    """Return how long each job still takes at its smallest gang: (n_jobs,) seconds; attained service where unknown."""
    jobs = snapshot.jobs
    attained_s = np.nan_to_num(jobs.attained_gpu_s, nan=0.0) / jobs.min_gpus
    return np.where(np.isnan(jobs.remaining_s), attained_s, jobs.remaining_s)


def _shares(snapshot: Snapshot, order: Ints, length: Floats) -> Ints:
    """Return the GPUs of each job of the table, 0 for none: (n_jobs,)."""
    jobs = snapshot.jobs
    most = possible_sizes(snapshot, jobs.max_gpus)
    runnable = order[jobs.eligible[order].any(axis=1) & _comes_back(snapshot)[order]]
    sizes = np.arange(int(most.max(initial=1)) + 1)
    curves = np.empty((len(jobs), sizes.size))
    for job in runnable.tolist():
        row = int(jobs.speed_curve[job])
        known = snapshot.speed_curves[row] if row >= 0 else np.empty(0)
        curves[job] = sizes
        if known.size:
            curves[job, 1:] = known[np.minimum(sizes[1:], known.size) - 1]
    gpus = np.zeros(len(jobs), dtype=np.int64)
    low, high, step = jobs.min_gpus[runnable], most[runnable], jobs.step_gpus[runnable]
    kept = int(jobs.gpus[~_comes_back(snapshot)].sum())
    total = max(snapshot.total_gpus - kept, 0)
    gpus[runnable] = share_out(curves[runnable], length[runnable], low, high, step, total)
    return gpus


def _comes_back(snapshot: Snapshot) -> Bools:
    """Return which jobs want GPUs: all but those that keep what they have whatever is decided."""
    jobs = snapshot.jobs
    return jobs.preemptible | (jobs.phase == Phase.QUEUED)


def share_out(speed: Floats, length: Floats, low: Ints, high: Ints, step: Ints, total: int) -> Ints:
    """Return the GPUs of each job: (n_jobs,), 0 or from ``low`` to ``high`` in steps, together at most ``total``.

    Args:
        speed: (n_jobs, n_sizes) at 0, 1, 2, ... GPUs; ``speed[:, 0]`` is 0.
        length: (n_jobs,) time left at ``low`` GPUs; ties go to the earlier row.
        low, high, step: (n_jobs,) the sizes each job may have.
        total: GPUs to give out.

    Source: AFS, Algorithm 1 and its TopPriority.
    """
    n_jobs = len(length)
    work = (length * speed[np.arange(n_jobs), np.minimum(low, speed.shape[1] - 1)] if n_jobs else length).tolist()
    tables: list[list[float]] = speed.tolist()
    lows, highs, steps = low.tolist(), high.tolist(), step.tolist()
    gpus, left = [0] * n_jobs, total

    def next_size(job: int) -> int:
        return gpus[job] + steps[job] if gpus[job] else lows[job]

    def throughputs(job: int) -> tuple[float, float]:
        """Return what a job does now and with one GPU of its next step."""
        now, then, more = tables[job][gpus[job]], tables[job][next_size(job)], next_size(job) - gpus[job]
        return now, now + (then - now) / more

    def ends_s(job: int) -> float:
        return work[job] / tables[job][gpus[job] or lows[job]]

    while True:
        takers = [job for job in range(n_jobs) if next_size(job) <= highs[job] and next_size(job) - gpus[job] <= left]
        if not takers:
            return np.array(gpus, dtype=np.int64)
        best = takers[0]
        for job in takers[1:]:
            shorter, longer = (best, job) if ends_s(best) <= ends_s(job) else (job, best)
            best = longer if prefers_longer(*throughputs(shorter), *throughputs(longer)) else shorter
        left -= next_size(best) - gpus[best]
        gpus[best] = next_size(best)


def prefers_longer(p_a: float, more_a: float, p_b: float, more_b: float) -> bool:
    """Whether a step is better given to the longer job ``b``.

    Args:
        p_a, p_b: Throughputs now; 0 of a job without GPUs.
        more_a, more_b: Throughputs with the step, above 0.

    Source: AFS, section 4.1.
    """
    gain_b = (more_b - p_b) / more_b
    return p_a > 0 and gain_b > (more_a - p_a) / p_a
