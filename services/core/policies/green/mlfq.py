"""GREEN's scheduler: two queues, one ranking.

An active round sorts the jobs into queues, sets their sizes and ranks them:

1. starving jobs, then the upper queue in order of submission as long as its gangs keep within theta of the cluster;
2. the lower queue, together with what theta kept out of the upper one, by PRIORITY (``carbon.lower_priority``).

If ``slack_s`` allows it, jobs of the lower queue that can still wait for greener hours are left out (``_held``).

A passive round fills free GPUs by the last active ranking; jobs that arrived since stand right behind the first group,
at their minimum gang, or at ``fixed_gpus``. A passive round stops no job, so theta does not limit them.

Source: GREEN section 6, Algorithm 1.
"""

from dataclasses import dataclass, field

import numpy as np

from services.core.cycle.capacity import possible_sizes
from services.core.cycle.grids import present_curves
from services.core.cycle.plan import Plan
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders, every_job, last_index
from services.core.cycle.snapshot import QUEUED, RUNNING, STARTING, Snapshot
from services.core.cycle.sorting import among_first, order_by
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.green.carbon import high_power, lower_priority, mean_intensity, shifting
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.efficiency import (
    BeforeGrowth,
    degradation,
    gamma_at,
    largest_gang,
    last_step,
    occupancy_of,
)
from services.core.policies.green.memory import AHEAD, BEHIND, STARVING, GreenMemory, dump_memory, load_memory
from services.core.policies.greener_hours import expected_start_s, left_and_deadline_s, should_run


class Green:
    """Carbon-efficient multi-level feedback queues. Preempts and resizes in active rounds."""

    name = "green"
    initial, dump, load = staticmethod(GreenMemory), staticmethod(dump_memory), staticmethod(load_memory)

    def __init__(self, config: GreenConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: GreenMemory) -> tuple[Plan, GreenMemory]:
        """Return Algorithm 1's plan in an active round; in a passive one, the plan that the last ranking implies."""
        preemption = Preemption.at(snapshot.trigger)
        if preemption is Preemption.NOW:
            memory = active_ranking(snapshot, memory, self.config)
            which, held = every_job(snapshot), memory.held
            keys, gangs = (memory.queue, memory.key), memory.gangs
        else:
            which = contenders(snapshot, preemption)
            keys, gangs, held = passive_ranking(snapshot, memory, self.config, which)
        if held is not None:
            free = np.flatnonzero(~held)
            which, gangs, keys = which[free], gangs[free], (keys[0][free], keys[1][free])
        ranking = rank(
            snapshot, which, gangs, *keys, snapshot.jobs.submitted_s[which], preemption=preemption,
            unranked=Reason.WAITING_FOR_ROUND if held is None else Reason.GREENER_HOURS,
        )  # fmt: skip
        if held is not None:
            ranking = ranking.expecting(lambda: _released_s(snapshot, memory, self.config))
        return reconcile(snapshot, ranking, preemption=preemption), memory


@dataclass(frozen=True)
class Scaling:
    """What the upper queue's rules decide for the jobs; every column is (n_jobs,)."""

    before: Ints  #: Where each job stood in the table of the last active round, -1 if it was not there
    present: Ints  #: The size each job has, or waits to have
    gangs: Ints  #: The size each job should have
    lower: Bools  #: Which jobs are in the lower queue from this round on
    degradation: Floats  #: Efficiency relative to the minimum gang, NaN where unobserved
    grown: dict[JobId, BeforeGrowth] = field(default_factory=dict[JobId, BeforeGrowth])
    """As ``GreenMemory.grown``, from this round on."""


def active_ranking(snapshot: Snapshot, memory: GreenMemory, config: GreenConfig) -> GreenMemory:
    """Return the rank of all jobs, their sizes, and what else to remember of this round."""
    jobs = snapshot.jobs
    scaling = scale(snapshot, memory, config)
    starves = starving(snapshot, config.starvation_s)
    counted_from = _counted_from(snapshot, memory, scaling.before, starves)
    lower, upper = scaling.lower & ~starves, ~scaling.lower & ~starves

    head, head_key, skipped = admit_upper(snapshot, scaling, upper, config.theta)
    queue = np.where(starves, STARVING, BEHIND)
    queue[head] = AHEAD
    priority = lower_priority(
        _counted(snapshot, counted_from, config),
        scaling.degradation,
        shifting(jobs.gpu_power_w, *_intensities(snapshot, config), config.mu),
    )
    key = np.where(starves, 0.0, priority)
    key[head] = head_key

    gangs = scaling.gangs.copy()
    gangs[skipped] = scaling.present[skipped]
    held = _held(snapshot, lower, gangs, config)
    return GreenMemory(
        jobs=tuple(jobs.ids),
        queue=queue,
        key=key,
        submitted_s=jobs.submitted_s.copy(),
        gangs=gangs,
        lower=scaling.lower,
        held=held if held.any() else None,
        counted_from=counted_from,
        grown=scaling.grown,
    )


def passive_ranking(
    snapshot: Snapshot, memory: GreenMemory, config: GreenConfig, which: Ints
) -> tuple[tuple[Ints, Floats], Ints, Bools | None]:
    """Return the rank keys of these jobs by the last active ranking, their sizes, and which are held; each (n_which,).

    The rank keys are ``GreenMemory``'s; held is None if no job is.

    Jobs that arrived since stand in order of submission behind those that were ahead of the lower queue. This is our
    reading of section 6.1, which puts new jobs at the end of the upper queue, and 6.3, which ranks in active rounds
    only. Shown by
    ``tests/unit/core/test_green_queues.py::test_arrivals_stand_right_behind_the_jobs_that_were_ahead_of_the_lower_queue``.
    """
    before = last_index(snapshot, memory.index, which)
    columns = memory.by_job
    gangs = _present_gangs(snapshot, which, _remembered_gangs(memory, config, before))
    held = None if memory.held is None else columns.held[before]
    return (columns.queue[before], columns.key[before]), gangs, held


def scale(snapshot: Snapshot, memory: GreenMemory, config: GreenConfig) -> Scaling:
    """Apply the upper queue's rules: who grows by a step, who has finished scaling and moves to the lower queue.

    A job grows if it runs and may be restarted, its degradation has been measured at its present size and is at least
    gamma, and a step keeps it within its cap. It leaves the upper queue, at its present size, when it runs and may not
    grow, or when its efficiency stays unmeasured for ``unmeasured_s``. Until it is measured it stays as it is. Unlike
    Algorithm 1 as printed, which stops at theta, every job of the queue is examined. With ``step_back`` a job whose
    last step proved too wide leaves at the size before it.

    Source: GREEN sections 5.1 and 6.1, Algorithm 1 lines 3-11.
    """
    jobs = snapshot.jobs
    before = last_index(snapshot, memory.index)
    present = _present_gangs(snapshot, every_job(snapshot), _remembered_gangs(memory, config, before))
    known_lower = memory.by_job.lower[before]
    degraded = degradation(jobs.efficiency_base, jobs.efficiency_now)
    runs = (jobs.phase == RUNNING) & ~known_lower
    if config.fixed_gpus is not None:
        fixed = possible_sizes(snapshot, np.full(len(jobs), config.fixed_gpus))
        return Scaling(before, present, fixed, known_lower | runs, degraded)
    gamma = gamma_at(occupancy_of(snapshot), config.gamma_empty, config.gamma_full)
    cap = possible_sizes(snapshot, largest_gang(jobs.min_gpus, jobs.max_gpus, config.job_cap_gpus))
    may_grow = jobs.preemptible & (present + jobs.step_gpus <= cap)
    kept = degraded
    if config.gamma_compares != "minimum":
        kept = last_step(snapshot, present, memory.grown, marginal=config.gamma_compares == "marginal")
    measured = np.isfinite(kept)
    holds = measured & (kept >= gamma)
    grows = runs & may_grow & holds
    wide = config.step_back & jobs.preemptible & (present > jobs.min_gpus)
    waits = runs & ~measured & (may_grow | wide)
    waits &= snapshot.now_s - jobs.waiting_since_s < config.unmeasured_s
    gangs = np.where(grows, present + jobs.step_gpus, present)
    gangs = np.where(runs & measured & ~holds & wide, present - jobs.step_gpus, gangs)
    lower = known_lower | (runs & ~grows & ~waits)
    return Scaling(before, present, gangs, lower, degraded, _grown(snapshot, memory, config, present, grows))


def _grown(
    snapshot: Snapshot, memory: GreenMemory, config: GreenConfig, present: Ints, grows: Bools
) -> dict[JobId, BeforeGrowth]:
    """Return, if gamma is compared with it, the state of jobs before their last growth step."""
    if config.gamma_compares == "minimum":
        return {}
    jobs, known = snapshot.jobs, memory.grown
    grown = {job_id: known[job_id] for job_id in jobs.ids if job_id in known}
    for job in np.flatnonzero(grows).tolist():
        energy_j, gpu_s = float(jobs.energy_j[job]), float(jobs.attained_gpu_s[job])
        before = known.get(jobs.ids[job])
        if before is not None and before.gpus == present[job]:  # asked for before, and not granted yet
            continue
        since = (0.0, 0.0) if before is None else (before.energy_j, before.gpu_s)
        power_w = (energy_j - since[0]) / max(gpu_s - since[1], 1.0) * float(present[job])
        grown[jobs.ids[job]] = BeforeGrowth(
            int(present[job]), float(jobs.efficiency_now[job]), power_w, energy_j, gpu_s
        )
    return grown


def _held(snapshot: Snapshot, lower: Bools, gangs: Ints, config: GreenConfig) -> Bools:
    """Return which jobs of the lower queue wait for greener hours, as they have more ahead than they need: (n_jobs,).

    Beyond GREEN, which never leaves a GPU idle that a job could use and so shifts nothing on a cluster with room: with
    slack that users grant, such a job runs in the greenest hours before its time is up. New jobs still start at once,
    and jobs whose time is up compete as usual.
    """
    jobs = snapshot.jobs
    held = np.zeros(len(jobs), dtype=np.bool_)
    if not config.slack_s:
        return held
    may = lower & jobs.preemptible
    if config.slack_of == "high_power":
        may &= high_power(jobs.gpu_power_w)
    which = np.flatnonzero(may)
    needs = left_and_deadline_s(snapshot, which, gangs[which], config.slack_s, config.slack_share)
    held[which] = ~should_run(snapshot, which, *needs)
    return held


def _released_s(snapshot: Snapshot, memory: GreenMemory, config: GreenConfig) -> tuple[Ints, Floats]:
    """Return the waiting jobs that are held, and when they will be released, UTC seconds: (n,) each.

    A job is released, by an active round, when its hour comes or it starves.
    """
    jobs = snapshot.jobs
    before = last_index(snapshot, memory.index)
    held = np.flatnonzero((jobs.phase == QUEUED) & memory.by_job.held[before])
    gangs = possible_sizes(snapshot, _remembered_gangs(memory, config, before[held]), held)
    needs = left_and_deadline_s(snapshot, held, gangs, config.slack_s, config.slack_share)
    comes_s = expected_start_s(snapshot, held, *needs)
    if config.starvation_s is not None:
        comes_s = np.minimum(comes_s, jobs.waiting_since_s[held] + config.starvation_s)
    return held, np.maximum(comes_s, snapshot.next_active_s)


def admit_upper(snapshot: Snapshot, scaling: Scaling, upper: Bools, theta: float) -> tuple[Ints, Floats | float, Ints]:
    """Return the upper queue's jobs ahead of the lower queue, their keys, and those theta keeps out; in any order.

    As long as all their gangs together keep within ``theta`` of the cluster, all are ahead, in order of submission:
    their key is 0. Otherwise they are taken by degradation, best first (unmeasured: 1), until their gangs exceed it;
    the job that crosses the line is still ahead, as in Algorithm 1 line 7. Those kept out are ranked with the lower
    queue: section 6.4 "skips the remaining upper queue and considers the lower queue".

    Source: GREEN section 6.4, Algorithm 1 lines 3-8.
    """
    limit = theta * snapshot.total_gpus
    queue = np.flatnonzero(upper)
    if int(scaling.gangs[queue].sum()) <= limit:
        return queue, 0.0, queue[:0]
    jobs = snapshot.jobs
    keys = np.where(np.isnan(scaling.degradation), -1.0, -scaling.degradation)[queue], jobs.submitted_s[queue]
    some = among_first(int(limit) + 1, *keys)  # no gang is smaller than one GPU
    some = some[order_by(jobs.ids, *(key[some] for key in keys), which=queue[some])]
    gangs = scaling.gangs[queue[some]]
    some = some[np.cumsum(gangs) - gangs <= limit]
    kept_out = upper.copy()
    kept_out[queue[some]] = False
    return queue[some], keys[0][some], np.flatnonzero(kept_out)


def starving(snapshot: Snapshot, starvation_s: float | None) -> Bools:
    """Return which jobs have waited for ``starvation_s`` or longer: (n_jobs,).

    Our reading: section 9 names a threshold that resets a job's priority, as in Tiresias; section 6.3 ranks jobs "for
    immediate execution" above both queues but does not say which. Here they are the same jobs. Shown by
    ``tests/unit/core/test_green_queues.py::test_a_starving_job_is_placed_first_and_its_footprint_is_forgotten``.
    """
    jobs = snapshot.jobs
    if starvation_s is None:
        return np.zeros(len(jobs), dtype=np.bool_)
    return (jobs.phase == QUEUED) & (snapshot.now_s - jobs.waiting_since_s >= starvation_s)


def _present_gangs(snapshot: Snapshot, which: Ints, remembered: Ints) -> Ints:
    """Return each of these jobs' present size, or else the size it waits for, as remembered: (n_which,)."""
    jobs, awaited = snapshot.jobs, possible_sizes(snapshot, remembered, which)
    gpus = jobs.gpus[which]
    if not np.count_nonzero(gpus):
        return awaited
    phase = jobs.phase[which]
    return np.where((phase == STARTING) | (phase == RUNNING), gpus, awaited)


def _remembered_gangs(memory: GreenMemory, config: GreenConfig, before: Ints) -> Ints:
    """Return the sizes that jobs at these positions of the last table had or were to have; -1 stands for a new job."""
    gangs = memory.by_job.gangs[before]
    return np.where(before < 0, config.fixed_gpus, gangs) if config.fixed_gpus is not None else gangs


def _intensities(snapshot: Snapshot, config: GreenConfig) -> tuple[float | Floats, float | Floats]:
    """Return the present intensity and its mean, for each job's own grids if there are several."""
    curves, now_s = present_curves(snapshot, every_job(snapshot)), snapshot.now_s
    means = curves.each(lambda curve: mean_intensity(curve, now_s, config.curve_window_s))
    return curves.each(lambda curve: curve.at(now_s)), means


def _counted_from(snapshot: Snapshot, memory: GreenMemory, before: Ints, starves: Bools) -> Floats | None:
    """Return what each job had emitted, gCO2, and held, GPU seconds, when it last starved; 0 if never: (2, n_jobs)."""
    jobs, counted = snapshot.jobs, None
    if memory.counted_from is not None:
        counted = np.where(before < 0, 0.0, np.take(memory.counted_from, before, axis=1))
    which = np.flatnonzero(starves)
    if which.size:
        counted = np.zeros((2, len(jobs))) if counted is None else counted
        counted[:, which] = np.nan_to_num((jobs.carbon_gco2[which], jobs.attained_gpu_s[which]), nan=0.0)
    return counted


def _counted(snapshot: Snapshot, counted_from: Floats | None, config: GreenConfig) -> Floats:
    """Return what counts against each job since it last starved: gCO2 or GPU seconds, (n_jobs,)."""
    jobs = snapshot.jobs
    amounts, at = (jobs.carbon_gco2, 0) if config.carbon_factor == "footprint" else (jobs.attained_gpu_s, 1)
    return amounts if counted_from is None else amounts - counted_from[at]
