"""Tiresias' discretised two-dimensional LAS: jobs that have had the least GPU time go first.

Attained service is GPUs x time. It is compared by a few queues rather than exactly, so that two jobs that have had
about the same do not keep preempting each other. Within a queue jobs keep the order in which they first started;
those that never ran follow in order of submission.

Source: Gu et al., Tiresias, NSDI'19. The default threshold and the promotion rule are those of the authors' published
simulator, whose two-queue set-up ends the first queue at 3,250 GPU seconds and leaves promotion off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from services.core.cycle.plan import Plan
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders, every_job, last_index
from services.core.cycle.snapshot import QUEUED, RUNNING, STARTING, Snapshot, Trigger
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import PolicyConfigError
from services.core.domain.ids import JobId
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class LasConfig:
    """Parameters of discretised 2D-LAS."""

    queue_thresholds_gpu_s: tuple[float, ...] = parameter(
        (3250.0,),
        "Attained service at which a job leaves each queue for the next, ascending; n thresholds make n + 1 "
        "queues. Default: the published Tiresias simulator.",
        unit="GPU s",
        minimum=1.0,
    )
    promote_knob: float = parameter(
        0.0,
        "A waiting job returns to the first queue once it has waited this many times as long as it ran since "
        "it was last there; 0 switches promotion off, as in the published Tiresias simulator.",
        minimum=0.0,
    )
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)
        thresholds = self.queue_thresholds_gpu_s
        for at in range(1, len(thresholds)):
            if thresholds[at] <= thresholds[at - 1]:
                raise PolicyConfigError("thresholds must ascend", pointer=f"/queue_thresholds_gpu_s/{at}")


@dataclass(frozen=True, eq=False)
class LasMemory:
    """What LAS remembers of the jobs that were live in the last active round."""

    jobs: tuple[JobId, ...] = ()  #: The jobs of that round's table
    started_s: Floats = field(default_factory=lambda: np.array([np.inf]))
    """(n_jobs + 1,) when each first had GPUs, UTC seconds; inf: not yet, as the last entry, at -1, for later jobs."""
    promoted: Mapping[JobId, tuple[float, float]] = field(default_factory=dict[JobId, tuple[float, float]])
    """For each promoted job, (service attained by then in GPU seconds, when)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LasMemory) and _dumped(self) == _dumped(other)

    @cached_property
    def index(self) -> Mapping[JobId, int]:
        return dict(zip(self.jobs, range(len(self.jobs)), strict=True))


def _dumped(memory: LasMemory) -> dict[str, Any]:
    started = zip(memory.jobs, memory.started_s.tolist(), strict=False)
    promoted = {job_id: list(entry) for job_id, entry in memory.promoted.items()}
    return {"started_s": {job_id: at for job_id, at in started if at < np.inf}, "promoted": promoted}


class Las:
    """Least attained service first, by queue; users' priorities take precedence. Preempts in active rounds."""

    name = "las"
    initial, dump = staticmethod(LasMemory), staticmethod(_dumped)

    def __init__(self, config: LasConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: LasMemory) -> tuple[Plan, LasMemory]:
        """Return the plan of discretised LAS; jobs are promoted only in active rounds."""
        jobs = snapshot.jobs
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        sizes = fixed_sizes(snapshot, self.config.gang, which)
        started = memory.started_s[last_index(snapshot, memory.index, which)]
        if snapshot.trigger is Trigger.ACTIVE:
            new = np.isinf(started) & ((jobs.phase == STARTING) | (jobs.phase == RUNNING))
            started[new] = jobs.waiting_since_s[new]
            memory = self._following(snapshot, memory, started, sizes)
        served = served_since_promotion(snapshot, memory, which)
        keys = queue_of(served, self.config.queue_thresholds_gpu_s), started, jobs.submitted_s[which]
        ranking = rank(snapshot, which, sizes, *keys, preemption=preemption)
        return reconcile(snapshot, ranking, preemption=preemption), memory

    def load(self, stored: dict[str, Any]) -> LasMemory:
        started = {JobId(job_id): float(at) for job_id, at in stored.get("started_s", {}).items()}
        return LasMemory(
            jobs=tuple(started),
            started_s=np.array([*started.values(), np.inf]),
            promoted={
                JobId(job_id): (float(served), float(at)) for job_id, (served, at) in stored.get("promoted", {}).items()
            },
        )

    def _following(self, snapshot: Snapshot, memory: LasMemory, started: Floats, sizes: Ints) -> LasMemory:
        """Return the memory of the live jobs, given when each started: (n_jobs,) UTC seconds, inf if not yet."""
        jobs = snapshot.jobs
        promoted = {job_id: entry for job_id, entry in memory.promoted.items() if job_id in jobs.index}
        if self.config.promote_knob:
            for job in np.flatnonzero(self._starving(snapshot, memory, started, sizes)).tolist():
                promoted[jobs.ids[job]] = (float(jobs.attained_gpu_s[job]), snapshot.now_s)
        return LasMemory(tuple(jobs.ids), np.concatenate((started, (np.inf,))), promoted)

    def _starving(self, snapshot: Snapshot, memory: LasMemory, started: Floats, sizes: Ints) -> Bools:
        """Return which jobs have waited ``promote_knob`` times as long as they ran since they were last promoted."""
        jobs = snapshot.jobs
        served = served_since_promotion(snapshot, memory, every_job(snapshot))
        ran_s = served / sizes
        on_top = np.fromiter((memory.promoted.get(i, (0.0, -np.inf))[1] for i in jobs.ids), np.float64, len(jobs))
        since = np.maximum(started, on_top)
        waited_s = np.where(np.isfinite(since), snapshot.now_s - since - ran_s, 0.0)
        demoted = queue_of(served, self.config.queue_thresholds_gpu_s) > 0
        return (jobs.phase == QUEUED) & demoted & (waited_s >= self.config.promote_knob * ran_s)


def served_since_promotion(snapshot: Snapshot, memory: LasMemory, which: Ints) -> Floats:
    """Return the service that counts for these jobs' queues: (n_which,) GPU seconds since their last promotion."""
    jobs = snapshot.jobs
    attained = jobs.attained_gpu_s[which]
    served = np.where(np.isnan(attained), 0.0, attained)
    if memory.promoted:
        ids = map(jobs.ids.__getitem__, which.tolist())
        before = np.fromiter((memory.promoted.get(i, (0.0, 0.0))[0] for i in ids), np.float64, which.size)
        served = np.maximum(served - before, 0.0)
    return served


def queue_of(served_gpu_s: Floats, thresholds_gpu_s: tuple[float, ...]) -> Ints:
    """Return the queue of each job, 0 first: how many thresholds its service has reached, (n,) to (n,)."""
    return np.searchsorted(np.array(thresholds_gpu_s, dtype=np.float64), served_gpu_s, side="right").astype(np.int64)
