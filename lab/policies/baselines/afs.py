"""AFS, apathetic future share: each GPU goes where it shortens the mean completion time, as far as pairs of jobs tell.

GPUs are given out one step after the other. Of two jobs the one that ends first, ``a``, would take the step for its own
sake; giving it to the longer one, ``b``, is better on average where

    (p'_b - p_b) / p'_b  >  (p'_a - p_a) / p_a

with ``p`` the throughput now and ``p'`` with the step: what follows from comparing the two mean completion times, if
nothing but this step is known of the future, hence the name. The job that wins against all
others takes the step. A job without GPUs counts a full gain: jobs that scale without loss have two GPUs before a longer
one has its first, and jobs that scale badly one.

The throughputs are ``Snapshot.speed_curves``; a job without one is taken to scale without loss. The length is the
predicted remaining time; of a job without a prediction, or of all with ``lengths=attained``, the service it has had so
far. A step of several GPUs counts its gain per GPU, and one that gains nothing is given to no job.

The paper shares out anew at each arrival and end, in a system that resizes a job in seconds. Here a resize is a
checkpoint and a restart, so that sizes change in active rounds only, and not where that does not pay: a running job
grows where it saves ``resize_gain`` restarts, and shrinks where another job needs what it gives up (PowerFlow's rule).
``resize_gain`` 0 resizes at every round, whatever it costs. Gangs are powers of two, as in the paper's system: others
would lie across nodes.

Source: Hwang et al., Elastic Resource Sharing for Distributed Deep Learning, NSDI'21, section 4 (AFS-L and AFS-P).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import numpy as np

from services.core.cycle.capacity import possible_sizes, powers_of_two
from services.core.cycle.plan import Plan
from services.core.cycle.ranking import Ranking, rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.sorting import order_by, wishes_first
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class AfsConfig:
    """Parameters of AFS."""

    sizes: Literal["powers_of_two", "any"] = parameter(
        "powers_of_two", "Sizes a gang may have: powers of two (the paper), or any."
    )
    lengths: Literal["predicted", "attained"] = parameter(
        "predicted",
        "What tells short jobs from long ones: their predicted remaining time (AFS-L), or the service they have "
        "had so far, as if lengths were unknown (AFS-P).",
    )
    restart_s: float = parameter(
        60.0, "Time a gang loses when it is stopped and started again. Default: ours.", unit="s", minimum=0.0
    )
    resize_gain: float = parameter(
        2.0,
        "A running job grows only if that saves this many times the cost of its restart; 0: whenever its share "
        "grows. Default: ours, as for PowerFlow.",
        minimum=0.0,
    )

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class AfsMemory:
    """The sizes that the last active round gave, by job: a job stopped to be resized comes back at its own."""

    targets: Mapping[JobId, int] = field(default_factory=dict[JobId, int])


class Afs:
    """Elastic shares by marginal throughput between shorter and longer jobs; users' priorities come first."""

    name = "afs"

    def __init__(self, config: AfsConfig) -> None:
        self.config = config

    def initial(self) -> AfsMemory:
        """Return the memory of a policy that has shared out nothing."""
        return AfsMemory()

    def decide(self, snapshot: Snapshot, memory: AfsMemory) -> tuple[Plan, AfsMemory]:
        """Return the shares of all jobs in an active round; in between, free GPUs go to the shortest that wait."""
        jobs = snapshot.jobs
        length = attained_s(snapshot) if self.config.lengths == "attained" else lengths(snapshot)
        if snapshot.trigger is Trigger.PASSIVE:
            which = contenders(snapshot, Preemption.LATER)
            ids = map(jobs.ids.__getitem__, which.tolist())
            targets = np.fromiter(map(memory.targets.get, ids, repeat(0)), np.int64, which.size)
            keys, sizes = (length[which], jobs.submitted_s[which]), possible_sizes(snapshot, targets, which)
            ranking = rank(snapshot, which, sizes, *keys, preemption=Preemption.LATER)
            return reconcile(snapshot, ranking, preemption=Preemption.LATER), memory
        order = wishes_first(order_by(jobs.ids, length, jobs.submitted_s), jobs.priority)
        sizes = self._shares(snapshot, order, length)
        targets = {jobs.ids[job]: int(sizes[job]) for job in np.flatnonzero(sizes).tolist()}
        # A job that gets nothing stands behind the others at its least size, for what the grid of sizes leaves over.
        order = np.concatenate((order[sizes[order] > 0], order[sizes[order] == 0]))
        sizes = np.maximum(sizes, jobs.min_gpus)
        return reconcile(snapshot, Ranking(order, sizes[order]), preemption=Preemption.NOW), AfsMemory(targets)

    def dump(self, memory: AfsMemory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        return {"targets": dict(memory.targets)}

    def load(self, stored: dict[str, Any]) -> AfsMemory:
        """Return the memory that ``dump`` wrote; what is missing is empty."""
        return AfsMemory({JobId(job_id): int(gpus) for job_id, gpus in stored.get("targets", {}).items()})

    def _shares(self, snapshot: Snapshot, order: Ints, length: Floats) -> Ints:
        """Return the GPUs of each job of the table, 0 for none: (n_jobs,).

        Shared out once with all that may move, and where some had better stay, again with those as they are.
        """
        jobs = snapshot.jobs
        runnable = order[jobs.eligible[order].any(axis=1) & _comes_back(snapshot)[order]]
        kept = int(jobs.gpus[~_comes_back(snapshot)].sum())
        total = max(snapshot.total_gpus - kept, 0)
        curves, choices = _speeds(snapshot, runnable), self._choices(snapshot, runnable)
        got = share_out(curves, length[runnable], choices, total)
        stays = self._stays(snapshot, runnable, curves, length[runnable], got, total)
        if stays.any():
            held = jobs.gpus[runnable]
            left = total - int(held[stays].sum())
            got[stays] = held[stays]
            moves = ~stays
            others = [sizes for sizes, move in zip(choices, moves.tolist(), strict=True) if move]
            got[moves] = share_out(curves[moves], length[runnable][moves], others, left)
        gpus = np.zeros(len(jobs), dtype=np.int64)
        gpus[runnable] = got
        return gpus

    def _choices(self, snapshot: Snapshot, which: Ints) -> list[list[int]]:
        """Return the sizes each of these jobs may have, ascending."""
        jobs = snapshot.jobs
        low, step = jobs.min_gpus[which], jobs.step_gpus[which]
        most = np.maximum(possible_sizes(snapshot, jobs.max_gpus)[which], low)
        if self.config.sizes == "any":
            rows = zip(low.tolist(), most.tolist(), step.tolist(), strict=True)
            return [list(range(first, last + 1, by)) for first, last, by in rows]
        return [[size for size in row if size] for row in powers_of_two(low, most, step).tolist()]

    def _stays(self, snapshot: Snapshot, which: Ints, speed: Floats, length: Floats, got: Ints, total: int) -> Bools:
        """Return which of these jobs had better keep what they hold than take what they got: (n_which,).

        A running one that would grow and save too little, or shrink where all others have room beside it as it is.
        """
        jobs = snapshot.jobs
        held = np.where(jobs.phase[which] == Phase.RUNNING, jobs.gpus[which], 0)
        if not self.config.resize_gain:
            return np.zeros(which.size, dtype=np.bool_)
        rows = np.arange(which.size)
        least, now, then = (speed[rows, size] for size in (jobs.min_gpus[which], held, got))
        grows = (held > 0) & (got > held)
        with np.errstate(divide="ignore", invalid="ignore"):
            saved_s = length * least / now * (1 - now / then)
        stays = grows & ~(saved_s >= self.config.resize_gain * self.config.restart_s)
        shrinks = (got > 0) & (got < held)
        if int(np.where(stays | shrinks, held, got).sum()) <= total:
            stays |= shrinks
        return stays


def lengths(snapshot: Snapshot) -> Floats:
    """Return how long each job still takes at its smallest gang: (n_jobs,) seconds; attained service where unknown."""
    left_s = snapshot.jobs.remaining_s
    return np.where(np.isnan(left_s), attained_s(snapshot), left_s)


def attained_s(snapshot: Snapshot) -> Floats:
    """Return the service each job has had so far, at its smallest gang: (n_jobs,) seconds."""
    jobs = snapshot.jobs
    return np.nan_to_num(jobs.attained_gpu_s, nan=0.0) / jobs.min_gpus


def _speeds(snapshot: Snapshot, which: Ints) -> Floats:
    """Return the speed of these jobs at 0, 1, 2, ... GPUs: (n_which, n_sizes)."""
    jobs = snapshot.jobs
    most = max(int(possible_sizes(snapshot, jobs.max_gpus).max(initial=1)), int(jobs.gpus.max(initial=0)))
    sizes = np.arange(most + 1)
    curves = np.empty((which.size, sizes.size))
    for at, row in enumerate(jobs.speed_curve[which].tolist()):
        known = snapshot.speed_curves[row] if row >= 0 else np.empty(0)
        curves[at] = sizes
        if known.size:
            curves[at, 1:] = known[np.minimum(sizes[1:], known.size) - 1]
    return curves


def _comes_back(snapshot: Snapshot) -> Bools:
    """Return which jobs want GPUs: all but those that keep what they have whatever is decided."""
    jobs = snapshot.jobs
    return jobs.preemptible | (jobs.phase == Phase.QUEUED)


def share_out(speed: Floats, length: Floats, choices: list[list[int]], total: int) -> Ints:
    """Return the GPUs of each job: (n_jobs,), 0 or one of its choices, together at most ``total``.

    Args:
        speed: (n_jobs, n_sizes) at 0, 1, 2, ... GPUs; ``speed[:, 0]`` is 0.
        length: (n_jobs,) time left at the least of the choices; ties go to the earlier row.
        choices: Per job the sizes it may have, ascending, at least one.
        total: GPUs to give out.

    Source: AFS, Algorithm 1 and its TopPriority.
    """
    tables: list[list[float]] = speed.tolist()
    work = [left_s * table[sizes[0]] for left_s, table, sizes in zip(length.tolist(), tables, choices, strict=True)]
    gpus, left = [0] * len(choices), total
    ahead = [sizes[::-1] for sizes in choices]
    needs, now, more, ends_s = ([0.0] * len(choices) for _ in range(4))

    def look_ahead(job: int) -> bool:
        """Note what a job needs for its next step and what that gives it; return whether it has one."""
        table, has, sizes = tables[job], gpus[job], ahead[job]
        if not sizes or table[sizes[-1]] <= table[has]:
            return False
        needs[job] = sizes[-1] - has
        now[job], ends_s[job] = table[has], work[job] / table[has or sizes[-1]]
        more[job] = table[has] + (table[sizes[-1]] - table[has]) / needs[job]
        return True

    takers = [job for job in range(len(choices)) if look_ahead(job)]
    while True:
        best = -1
        for job in takers:
            if needs[job] > left:
                continue
            if best < 0:
                best = job
                continue
            shorter, longer = (best, job) if ends_s[best] <= ends_s[job] else (job, best)
            best = longer if prefers_longer(now[shorter], more[shorter], now[longer], more[longer]) else shorter
        if best < 0:
            return np.array(gpus, dtype=np.int64)
        left -= int(needs[best])
        gpus[best] = ahead[best].pop()
        if not look_ahead(best):
            takers.remove(best)


def prefers_longer(p_a: float, more_a: float, p_b: float, more_b: float) -> bool:
    """Whether a step is better given to the longer job ``b``.

    Args:
        p_a, p_b: Throughputs now; 0 of a job without GPUs.
        more_a, more_b: Throughputs with the step, above 0.

    Source: AFS, section 4.1.
    """
    gain_b = (more_b - p_b) / more_b
    return p_a > 0 and gain_b > (more_a - p_a) / p_a
