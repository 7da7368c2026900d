"""Rounds of ``joint``; the package says what it minimises.

An active round decides order and sizes anew, and which jobs wait for greener hours. A passive round fills free GPUs in
that order; jobs that arrived since then go first, as wide as is best for them as long as all waiting jobs find room.
"""

from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np

from services.core.cycle.bound import Widening, bound_among
from services.core.cycle.capacity import Capacity, possible_sizes
from services.core.cycle.grids import eligible_curves
from services.core.cycle.plan import Plan
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, Snapshot, Trigger
from services.core.cycle.sorting import order_by, wishes_first
from services.core.cycle.zones import Zones
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.control_curves import ControlCurve
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.batches import with_batches
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.controls import limit_at, present_slowdowns, slowdowns
from services.core.policies.joint.costs import counted
from services.core.policies.joint.hours import column_now, starts_s
from services.core.policies.joint.levers import Known, effects
from services.core.policies.joint.memory import JointMemory, dump_memory, load_memory
from services.core.policies.joint.modes import Modes, hosts_w, models_of, modes_of
from services.core.policies.joint.moves import with_moves
from services.core.policies.joint.placing import UNKNOWN_LEFT_S, Seating, sleeping
from services.core.policies.joint.quantiles import Left, at_quantile, left_of, length_factors
from services.core.policies.joint.worth import Worth
from services.core.policies.levers import Effect
from services.core.policies.limits import Going, with_limits

STAY = 2.0  #: How many times a step of a gang counts that the job has already, where GPUs are short


class Joint:
    """Width, order, hours, limits and sleep by one cost. Preempts and resizes in active rounds."""

    name = "joint"
    initial, dump, load = staticmethod(JointMemory), staticmethod(dump_memory), staticmethod(load_memory)

    def __init__(self, config: JointConfig) -> None:
        self.config = config

    @property
    def placement(self) -> str:
        """The way it places gangs whose graphs are known; other gangs are placed the cluster's own way."""
        return "consolidated" if self.config.placement == "cluster" else self.config.placement

    def decide(self, snapshot: Snapshot, memory: JointMemory) -> tuple[Plan, JointMemory]:
        """Return the plan of least cost, or, in a passive round, one that fills free GPUs by the last active round."""
        snapshot = counted(snapshot, self.config.tonne_price)
        config, preemption, worth = self.config, Preemption.at(snapshot.trigger), Worth(snapshot, self.config)
        if snapshot.trigger is Trigger.ACTIVE:
            memory = _following(snapshot, memory, worth, config)
        elif held := _held_at_once(snapshot, memory, worth, config):
            memory = replace(memory, held=memory.held | held)
        which = contenders(snapshot, preemption)
        ranking = _ranking(snapshot, memory, which, worth, config) if which.size else Ranking(which, which)
        if snapshot.graphs and config.placement != "cluster":
            seating = Seating(snapshot, config, memory.declined_since_s)
            plan, memory = seating.planned(ranking, preemption), replace(memory, declined_since_s=seating.since_s())
        else:
            plan = reconcile(snapshot, ranking, preemption=preemption)
        if config.move and preemption is Preemption.NOW and which.size and (zones := Zones.of(snapshot)) is not None:
            plan = with_moves(snapshot, plan, _known(snapshot, worth, config), zones, config, memory.held)
        plan = with_batches(snapshot, plan)
        if config.limits:
            choose = _Limits(snapshot, memory, worth, config).choose
            anew = snapshot.trigger is Trigger.ACTIVE
            plan, measured = with_limits(snapshot, plan, memory.measured, config.profile_window_s, choose, anew=anew)
            if measured != memory.measured:
                memory = replace(memory, measured=measured)
        if config.sleep_after_s is not None:
            down, since_s = sleeping(snapshot, plan, memory.empty_since_s, config.sleep_after_s)
            if down or since_s:
                again_s = min(since_s.values(), default=np.inf) + config.sleep_after_s
                again_s = min(again_s, plan.look_again_s or np.inf)
                plan = replace(plan, nodes=down, look_again_s=again_s if np.isfinite(again_s) else None)
            if since_s != memory.empty_since_s:
                memory = replace(memory, empty_since_s=since_s)
        return plan, memory

    def levers(self, snapshot: Snapshot, memory: JointMemory, job_id: JobId) -> tuple[Effect, ...]:
        """Return what each lever does for a waiting or running job; see ``ExplainsLevers``."""
        if not snapshot.gpu_models:
            return ()
        costs = counted(snapshot, self.config.tonne_price)
        known = _known(costs, Worth(costs, self.config), self.config)
        return effects(snapshot, memory, self.config, known, snapshot.jobs.index[job_id])


class _Limits:
    """Chooses power limits: the more jobs wait for GPUs, the more speed is worth."""

    def __init__(self, snapshot: Snapshot, memory: JointMemory, worth: Worth, config: JointConfig) -> None:
        self._phase, self._n_held = snapshot.jobs.phase, len(memory.held)
        self._worth, self._snapshot, self._config = worth, snapshot, config

    @cached_property
    def _hosts_w(self) -> Floats:
        return hosts_w(self._snapshot, self._config)

    @cached_property
    def _crowd(self) -> float:
        waits = max(int(np.count_nonzero(self._phase == QUEUED)) - self._n_held, 0)
        return 1.0 + waits / max(int(np.count_nonzero(self._phase != QUEUED)), 1)

    def choose(self, gangs: list[Going], curve: ControlCurve) -> list[float | None]:
        """Return the least-cost limits for gangs of one kind, watts; None: the default, which is the highest."""
        jobs, gpus = np.array([(gang.job, gang.gpus) for gang in gangs]).T[..., None]
        at = limit_at(self._worth, jobs, curve, gpus, self._hosts_w.item(gangs[0].model), self._crowd)
        limits_w: list[float | None] = [*curve.values[:-1].tolist(), None]
        return [limits_w[each] for each in at.tolist()]


def _ranking(snapshot: Snapshot, memory: JointMemory, which: Ints, worth: Worth, config: JointConfig) -> Ranking:
    """Return the jobs to run: new ones first, then in the order of the last active round; held ones wait."""
    jobs = snapshot.jobs
    rows: list[int] = which.tolist()
    if memory.held:
        rows = [job for job in rows if jobs.ids[job] not in memory.held]
        which = np.array(rows, dtype=np.int64)
    ids = [jobs.ids[job] for job in rows]
    given = np.fromiter(map(memory.sizes.get, ids, repeat(0)), np.int64, which.size)
    at = np.fromiter(map(memory.place.get, ids, repeat(-1)), np.int64, which.size)
    holds = (jobs.gpus[which] > 0) & ((given == 0) | (given == jobs.gpus[which]))
    gpus = np.where(holds, jobs.gpus[which], possible_sizes(snapshot, given, which))
    by = (at,) if config.order == "shortest" else ()
    order = wishes_first(order_by(jobs.ids, *by, jobs.submitted_s[which], which=which), jobs.priority[which])
    which, gpus, is_new = which[order], gpus[order], (at < 0)[order] & (jobs.phase[which] == QUEUED)[order]
    if is_new.any():
        gpus = _widened_new(snapshot, which, gpus, is_new, worth, config)
    ranking = Ranking(which, gpus, Reason.GREENER_HOURS)
    return ranking.expecting(lambda: _released_s(snapshot, memory, worth, config)) if memory.held else ranking


def _released_s(snapshot: Snapshot, memory: JointMemory, worth: Worth, config: JointConfig) -> tuple[Ints, Floats]:
    """Return the waiting jobs that are held, and when they will be released, UTC seconds: (n,) each.

    An active round releases them, when the first hour comes that it would give them now.
    """
    jobs = snapshot.jobs
    held = np.flatnonzero((jobs.phase == QUEUED) & np.isin(jobs.ids, [*memory.held]))
    *_, start_s = _columns(snapshot, _known(snapshot, worth, config), config)
    return held, np.maximum(start_s[held], snapshot.next_active_s)


def _widened_new(snapshot: Snapshot, which: Ints, gpus: Ints, is_new: Bools, worth: Worth, config: JointConfig) -> Ints:
    """Return the sizes with those of new jobs raised to their best, as far as no waiting job goes without."""
    phase = snapshot.jobs.phase[which]
    waits = (phase == QUEUED) | (phase == PREEMPTING)
    left = np.array(Capacity(snapshot).free)
    new = np.flatnonzero(is_new & ~bound_among(snapshot, which))
    if not new.size or int(left.sum()) <= int(gpus[waits].sum()):
        return gpus
    seats, zones = np.zeros(which.size, dtype=np.int64), Zones.of(snapshot)
    if zones is None:
        left = np.array([left.sum() - gpus[waits].sum()])
    else:
        seats[waits] = zones.seats(which[waits], gpus[waits], left)
        if (seats < 0).any():
            return gpus
    modes = modes_of(snapshot, which[new], worth.hour_w(which[new]), config)
    best = modes.gpus[np.arange(new.size), modes.best]
    gpus = gpus.copy()
    for row, wanted in zip(new.tolist(), best.tolist(), strict=True):
        more = wanted - int(gpus[row])
        if 0 < more <= left[seats[row]]:
            gpus[row] += more
            left[seats[row]] -= more
    return gpus


def _following(snapshot: Snapshot, memory: JointMemory, worth: Worth, config: JointConfig) -> JointMemory:
    """Return the memory with an active round's order and sizes, and the jobs that wait for greener hours."""
    jobs = snapshot.jobs
    n_jobs = len(jobs)
    if not n_jobs or not snapshot.gpu_models:
        return replace(memory, sizes={}, held=frozenset())
    known = _known(snapshot, worth, config)
    modes, left_s = known.modes, known.left_s
    is_late = snapshot.now_s + known.at_best_s > np.where(np.isfinite(jobs.deadline_s), jobs.deadline_s, np.inf)
    column, planned, _ = _columns(snapshot, known, config)
    held = column < 0
    goes = np.flatnonzero(~held)
    least = np.where(np.isnan(left_s[goes]), 0.0, left_s[goes] * modes.gpus[goes, 0])
    by = (~is_late[goes], least) if config.order == "shortest" else ()
    order = order_by(jobs.ids, *by, jobs.submitted_s[goes], which=goes)
    goes = goes[wishes_first(order, jobs.priority[goes])]
    gpus = _sizes(snapshot, goes, known, column[goes], planned[goes], config)
    return replace(
        memory,
        sizes={jobs.ids[job]: size for job, size in zip(goes.tolist(), gpus.tolist(), strict=True)},
        held=frozenset(jobs.ids[job] for job in np.flatnonzero(held).tolist()),
    )


def _held_at_once(snapshot: Snapshot, memory: JointMemory, worth: Worth, config: JointConfig) -> frozenset[JobId]:
    """Return the jobs of predicted length that have come since the last active round and would wait by it."""
    jobs = snapshot.jobs
    may = (jobs.phase == QUEUED) & (jobs.remaining_s > 0) & (np.isfinite(jobs.deadline_s) | (config.slack_s > 0))
    waits = ((job, jobs.ids[job]) for job in np.flatnonzero(may).tolist())
    rows = [job for job, job_id in waits if job_id not in memory.place and job_id not in memory.held]
    if not rows or not snapshot.gpu_models:
        return frozenset()
    column, *_ = _columns(snapshot, _known(snapshot, worth, config), config, np.array(rows, dtype=np.int64))
    return frozenset(jobs.ids[job] for job in rows if column[job] < 0)


def _known(snapshot: Snapshot, worth: Worth, config: JointConfig) -> Known:
    everyone, models = np.arange(len(snapshot.jobs)), models_of(snapshot)
    modes, slower = modes_of(snapshot, everyone, worth.hour_w(everyone), config), np.ones(everyone.size)
    if config.limits:
        slower = slowdowns(snapshot, models, modes.gpus[everyone, modes.best], hosts_w(snapshot, config), worth)
    pace = _pace(snapshot, modes, models, slower)
    left = left_of(snapshot.jobs, pace, length_factors(snapshot, config.length_quantile))
    return Known(models, modes, slower, left.left_s, _deadlines(snapshot, left, config), worth)


def _pace(snapshot: Snapshot, modes: Modes, models: Ints, slower: Floats) -> Floats:
    """Return the work per GPU second of each job; jobs that hold no GPUs count as if at their best: (n_jobs,)."""
    jobs = snapshot.jobs
    rows = np.arange(models.size)
    holds = jobs.gpus > 0
    column = np.where(holds, modes.column_of(jobs.gpus), modes.best)
    factor = np.where(holds, present_slowdowns(snapshot, models), slower)
    return modes.ratio[rows, column] / modes.gpus[rows, column] * factor


def _deadlines(snapshot: Snapshot, left: Left, config: JointConfig) -> Floats:
    """Return when each job must be done, UTC seconds: the user's deadline, or its length plus slack; (n_jobs,)."""
    jobs, whole_s = snapshot.jobs, left.whole_s
    until_s = whole_s + np.minimum(config.slack_s, config.slack_share * whole_s)
    if config.oldest_s is not None:
        until_s = np.minimum(until_s, np.maximum(whole_s, config.oldest_s))
    return np.where(np.isfinite(jobs.deadline_s), jobs.deadline_s, jobs.submitted_s + until_s)


def _columns(
    snapshot: Snapshot, known: Known, config: JointConfig, which: Ints | None = None
) -> tuple[Ints, Bools, Floats]:
    """Return the size that each job is to run at now, a column, or -1 where it waits for greener hours: (n_jobs,).

    Those of unknown length, overdue and non-preemptible ones never wait, and have their best size. The second array,
    (n_jobs,), has the others, whose hours were planned, of ``which`` or of all; the third when each has its first, UTC
    seconds.
    """
    jobs, now_s, modes, at_best_s = snapshot.jobs, snapshot.now_s, known.modes, known.at_best_s
    may = np.isfinite(at_best_s) & (known.deadline_s - now_s > at_best_s) & jobs.preemptible
    if not config.slack_s:
        may &= np.isfinite(jobs.deadline_s)
    column, start_s = modes.best.copy(), np.full(len(jobs), now_s)
    rows = np.flatnonzero(may) if which is None else which[may[which]]
    if not rows.size:
        return column, may, start_s
    together = config.width_by_hour
    if together is None:
        together = int(modes.gpus.max(axis=1).sum()) <= snapshot.total_gpus
    holds = (jobs.phase == STARTING) | (jobs.phase == RUNNING)
    worth_g = known.worth.hour_g(np.arange(len(jobs)))
    curves = eligible_curves(at_quantile(snapshot, config.intensity_quantile), rows)

    def widest(curve: CarbonCurve, of: Any) -> Ints:
        mine = rows[of]
        has = np.where(holds[mine], modes.column_of(jobs.gpus)[mine], -1)
        speed = modes.ratio[mine] * known.slower[mine, None]
        watts = np.where(modes.gpus[mine] > 0, modes.watts[mine], np.inf)
        job = known.left_s[mine], known.deadline_s[mine], speed, watts, worth_g[mine], modes.best[mine]
        columns, start_s[mine] = column_now(curve, now_s, *job, has, config.stay_share, config.ahead_s)
        return columns

    def best(curve: CarbonCurve, of: Any) -> Ints:
        mine = rows[of]
        column = modes.best[mine]
        for stay_share, some in ((0.0, ~holds[mine]), (config.stay_share, holds[mine])):
            if not (each := mine[some]).size:
                continue
            job = at_best_s[each], known.deadline_s[each], modes.watts[each, modes.best[each]], worth_g[each]
            start_s[each] = starts_s(curve, now_s, *job, stay_share, config.ahead_s)
        return np.where(start_s[mine] <= now_s, column, -1)

    column[rows] = curves.by_curve(widest if together else best)
    return column, may & together, start_s


def _sizes(snapshot: Snapshot, goes: Ints, known: Known, best: Ints, planned: Bools, config: JointConfig) -> Ints:
    """Return the size of each job to run, best first: the smallest while any job has to wait, else towards its best.

    A running gang keeps its size unless another saves more than a restart costs, or its hours are ``planned``.
    ``best``, (n_goes,), is the column that each is to have where there is room.
    """
    jobs, modes, models, capacity = snapshot.jobs, known.modes, known.models, Capacity(snapshot)
    gpus = modes.gpus[goes, 0]
    zones, holding = Zones.of(snapshot), capacity.model[goes] >= 0
    if zones is None:
        room = capacity.total - np.bincount(models[goes], gpus, minlength=capacity.total.size).astype(np.int64)
    else:
        held = np.bincount(models[goes][holding], gpus[holding], minlength=capacity.total.size).astype(np.int64)
        room, models = capacity.total - held, models.copy()
        models[goes[~holding]] = zones.seats(goes[~holding], gpus[~holding], room)
    if (room < 0).any() or (models[goes] < 0).any():
        return gpus
    now = modes.column_of(jobs.gpus)[goes]
    left_s = np.where(np.isnan(known.left_s[goes]), UNKNOWN_LEFT_S, known.left_s[goes])

    def pays(column: Ints) -> Bools:
        """Return which jobs have enough work left to justify a restart at the size in this column: (n_goes,)."""
        gained = (modes.cost[goes, now] - modes.cost[goes, column]) * left_s
        return planned | (gained > config.restart_s * modes.cost[goes, column] * modes.ratio[goes, column])

    holds = (jobs.gpus[goes] > 0) & (jobs.phase[goes] != PREEMPTING)
    last, at = np.where(holds & ~pays(best), now, best), [0] * goes.size
    on_nodes, left = Widening(snapshot, goes, gpus), room.tolist()
    rows, steps = _steps(modes.gain[goes], np.where(holds, now, 0), last)
    job_of = goes[rows]
    more_gpus = modes.gpus[job_of, steps] - modes.gpus[job_of, steps - 1]
    taken = (each.tolist() for each in (rows, steps, job_of, models[job_of], more_gpus))
    for row, step, job, model, more in zip(*taken, strict=True):
        if at[row] == step - 1 and more <= left[model] and on_nodes.allows(job, more):
            on_nodes.take(job, more)
            at[row] = step
            left[model] -= more
    column = np.array(at, dtype=np.int64)
    gpus = modes.gpus[goes, column]
    return np.where(holds & (column > now) & ~pays(column), jobs.gpus[goes], gpus)


def _steps(gain: Floats, now: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return all steps of all gangs, as rows and the columns reached, in the order in which they are taken.

    First steps come before all others: those that jobs have already taken, then in the jobs' order. Later steps are
    ordered by what they save per GPU second; one that a job has already taken counts ``STAY`` times.

    Args:
        gain: ``Modes.gain`` of the jobs, best first.
        now: (n_jobs,) the present column of each.
        last: (n_jobs,) the column beyond which each has no steps.
    """
    columns: Ints = np.arange(1, gain.shape[1] + 1, dtype=np.int64)
    has: Bools = columns <= now[:, None]
    worth = np.minimum.accumulate(np.where(has, STAY * gain, gain), axis=1)
    worth[:, :1] = np.where(has[:, :1], np.inf, np.finfo(np.float64).max)
    rows, reached = np.nonzero(columns <= last[:, None])
    order = np.argsort(-worth[rows, reached], kind="stable")
    return rows[order], reached[order] + 1
