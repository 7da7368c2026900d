"""A schedule that can be run, for jobs and a grid that are known: the other side of ``lab.bounds.modes``.

The bound says what no run is below. This finds a run close to it, and the simulator carries it out (``Following``), so
that starts, checkpoints, half-empty nodes and whole gangs cost what they cost any policy.

Each job is planned alone, at the bound's prices of GPU hours: of three ways the one of the least carbon is taken.

- *At a stretch*: any size and limit, from any begin or to any end of a step of the grid.
- *In the greenest hours*, at one size: in each step the limit ``l`` that makes ``mu s(g, l) - c P(g, l)`` greatest, if
  that is above 0, where ``mu`` is the least at which all is done. Every stretch pays for its start and its checkpoint.
- *The same* at any size in each step.

Stages of a job that tunes its batch follow each other, at their own speeds and draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.cycle.plan import Plan, Preempt, Start, set_to
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import RUNNING, STARTING, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.controls import ControlKind
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.batches import with_batches
from services.simulator.engine import EngineOptions
from services.simulator.workload import Behaviour, JobProfile, Workload

LIMIT = ControlKind.POWER_LIMIT
HALVINGS = 40
FULL = 0.95  #: The share of a step's GPU seconds from which on it is full: gangs do not fill them without gaps
CLOSED_G = 1e5  #: What a GPU hour of a full step costs, gCO2
MORE = 1e-3  #: By how much more work is planned for than there is, as events are rounded
AGAIN = 4  #: How often a plan whose stages go otherwise than their mean is made anew


@dataclass(frozen=True)
class Stretch:
    """A time in which a job is to hold a gang, UTC seconds; ``limit_w`` None: the default."""

    begin_s: float
    end_s: float
    gpus: int
    limit_w: float | None


@dataclass(frozen=True)
class Ways:
    """The gangs and limits of a kind of job; columns are (n_stages, n_sizes, n_limits)."""

    sizes: Ints
    limits_w: tuple[float | None, ...]
    speed: Floats  #: Work seconds per second
    watts: Floats  #: With the hosts
    restart_s: float
    checkpoint_s: float

    @cached_property
    def mean_speed(self) -> Floats:
        """(n_sizes, n_limits) over all stages, which are equal shares of the work."""
        return len(self.speed) / (1.0 / self.speed).sum(axis=0)

    @cached_property
    def mean_watts(self) -> Floats:
        """(n_sizes, n_limits) over the time that stages take."""
        return (self.watts / self.speed).sum(axis=0) / (1.0 / self.speed).sum(axis=0)


def ways_of(profile: JobProfile, sizes: Ints, place: Place, options: EngineOptions, *, tunes: bool) -> Ways:
    """Return the ways in which a kind of job runs; a gang pays for the GPUs that it leaves unused on its node."""
    model, widest = place.model, place.widest
    truth = profile.truth(model)
    assert truth is not None
    stages: Sequence[Behaviour] = profile.tuned(model) if tunes else (truth,)
    curves = [each.controls[LIMIT] for each in stages if LIMIT in each.controls]
    limits_w: tuple[float | None, ...] = (None, *(curves[0].values[:-1].tolist() if curves else ()))
    host_w = options.host_w(profile.host_power_w, sizes, np.maximum(-(-sizes // widest), 1))
    host_w = host_w + place.idle_w * (-sizes % widest)
    speed, watts = np.empty((2, len(stages), sizes.size, len(limits_w)))
    for at, each in enumerate(stages):
        wide = sizes > widest
        alone = np.where(wide, each.speed_at(sizes, spread=True), each.speed_at(sizes))
        board_w = np.where(wide, each.power_w_at(sizes, spread=True), each.power_w_at(sizes))
        for column, limit_w in enumerate(limits_w):
            slower, cooler = each.factors_at({} if limit_w is None else {LIMIT: limit_w})
            speed[at, :, column] = alone * slower
            watts[at, :, column] = sizes * board_w * cooler + host_w
    return Ways(sizes, limits_w, speed, watts, profile.restart_s, profile.checkpoint_s)


class Hours:
    """The steps of the grid that a job may use, and what drawing a watt or holding a GPU costs in them."""

    def __init__(self, curve: CarbonCurve, price: Floats, begin_s: float, end_s: float) -> None:
        """Take ``price``: (n_steps,) what a GPU hour is worth beyond its own carbon, gCO2."""
        first, last = np.searchsorted(curve.edges_s[1:], begin_s, side="right"), curve.times_s.size
        last = max(min(int(np.searchsorted(curve.times_s, end_s, side="left")), last), int(first) + 1)
        steps = slice(int(first), last)
        self.begins = np.maximum(curve.times_s[steps], begin_s)
        self.ends = np.minimum(curve.edges_s[1:][steps], end_s)
        self.lengths_s = self.ends - self.begins
        self.g_per_j = curve.intensity_gco2_per_kwh[steps] / J_PER_KWH
        self.gpu_g_per_s = price[steps] / S_PER_HOUR
        self._edges = np.append(self.begins, self.ends[-1])
        self._sums = np.zeros((2, self._edges.size))
        self._sums[:, 1:] = np.cumsum([self.lengths_s * self.g_per_j, self.lengths_s * self.gpu_g_per_s], axis=1)

    def upto(self, times_s: Floats) -> tuple[Floats, Floats]:
        """Return the integrals of both costs up to these moments."""
        carbon, gpus = (np.interp(times_s, self._edges, sums) for sums in self._sums)
        return carbon, gpus


@dataclass(frozen=True)
class Planned:
    """A job's stretches in order, and what they cost, gCO2."""

    cost_g: float
    stretches: tuple[Stretch, ...]


def planned(ways: Ways, work_s: float, hours: Hours) -> Planned:
    """Return the plan of the least cost for a job in its hours."""
    asked_s = work_s * (1 + MORE)
    found: Planned | None = None
    for _ in range(AGAIN):
        each = [_at_a_stretch(ways, asked_s, hours)]
        each += [_in_hours(ways, asked_s, hours, slice(size, size + 1)) for size in range(ways.sizes.size)]
        each.append(_in_hours(ways, asked_s, hours, slice(None)))
        best = min((plan for plan in each if plan is not None), key=lambda plan: plan.cost_g, default=None)
        if best is None:
            break
        found = best
        done = _done(ways, work_s, best)
        if done >= 1.0:
            break
        asked_s *= (1 + MORE) / max(done, 0.1)
    if found is None:  # there is no time for starts: as fast as it goes
        size, limit = np.unravel_index(ways.mean_speed.argmax(), ways.mean_speed.shape)
        begin_s, end_s = float(hours.begins[0]), float(hours.ends[-1])
        found = Planned(np.inf, (Stretch(begin_s, end_s, int(ways.sizes[size]), ways.limits_w[int(limit)]),))
    return found


def _at_a_stretch(ways: Ways, work_s: float, hours: Hours) -> Planned | None:
    lasts_s = work_s / ways.mean_speed + ways.restart_s
    begins = np.concatenate(
        (np.broadcast_to(hours.begins, (*lasts_s.shape, hours.begins.size)), hours.ends - lasts_s[..., None]), axis=2
    )
    ends = begins + lasts_s[..., None]
    fits = (begins >= hours.begins[0] - 1e-6) & (ends <= hours.ends[-1] + 1e-6)
    if not fits.any():
        return None
    (carbon, gpus), (carbon_0, gpus_0) = hours.upto(ends), hours.upto(begins)
    cost = ways.mean_watts[..., None] * (carbon - carbon_0) + ways.sizes[:, None, None] * (gpus - gpus_0)
    at = np.where(fits, cost, np.inf).argmin()
    size, limit, _ = np.unravel_index(at, cost.shape)
    begin_s, end_s = float(begins.reshape(-1)[at]), float(ends.reshape(-1)[at])
    stretch = Stretch(begin_s, end_s, int(ways.sizes[size]), ways.limits_w[int(limit)])
    return Planned(float(cost.reshape(-1)[at]), (stretch,))


def _in_hours(ways: Ways, work_s: float, hours: Hours, some: slice) -> Planned | None:
    speed, watts = ways.mean_speed[some], ways.mean_watts[some]
    n_limits = speed.shape[1]
    sizes = np.repeat(ways.sizes[some], n_limits)
    speed, watts = speed.reshape(-1), watts.reshape(-1)
    rate = hours.g_per_j[:, None] * watts + hours.gpu_g_per_s[:, None] * sizes

    def chosen(mu: float) -> tuple[Ints, float]:
        """Return the mode of each step, -1 for none, and the work that is done."""
        net = mu * speed - rate
        mode = net.argmax(axis=1)
        mode = np.where(net[np.arange(mode.size), mode] > 0, mode, -1)
        return mode, float((hours.lengths_s * np.where(mode >= 0, speed[mode], 0.0)).sum()) - _started(mode)

    def _started(mode: Ints) -> float:
        """Return the work that is not done while gangs start and checkpoint."""
        gpus = np.where(mode >= 0, sizes[mode], 0)
        starts = (gpus > 0) & (gpus != np.append(0, gpus[:-1]))
        stops = (gpus > 0) & (gpus != np.append(gpus[1:], 0))
        lost_s = ways.restart_s * starts + ways.checkpoint_s * stops
        return float((np.minimum(lost_s, hours.lengths_s) * np.where(mode >= 0, speed[mode], 0.0)).sum())

    low, high = 0.0, float((rate / speed).max()) * 1.5 + 1e-12
    for _ in range(HALVINGS):
        if chosen(high)[1] >= work_s:
            break
        high *= 2
    else:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if chosen(middle)[1] >= work_s else (middle, high)
    mode, done = chosen(high)
    begins, ends = hours.begins.copy(), hours.ends.copy()
    _cut(mode, done - work_s, begins, ends, sizes, speed, rate, ways)
    stretches: list[Stretch] = []
    cost_g = 0.0
    for step in np.flatnonzero(mode >= 0).tolist():
        at = int(mode[step])
        gpus, limit_w = int(sizes[at]), ways.limits_w[at % n_limits]
        cost_g += float(rate[step, at] * (ends[step] - begins[step]))
        stretches.append(Stretch(float(begins[step]), float(ends[step]), gpus, limit_w))
    for before, after in zip(stretches, [*stretches[1:], None], strict=True):  # its checkpoint, after it has stopped
        if after is not None and (after.begin_s > before.end_s or after.gpus != before.gpus):
            cost_g += ways.checkpoint_s * float(watts[0]) * float(hours.g_per_j.min())
    return Planned(cost_g, tuple(stretches))


def _cut(
    mode: Ints, spare: float, begins: Floats, ends: Floats, sizes: Ints, speed: Floats, rate: Floats, ways: Ways
) -> None:
    """Take what is more than enough from the dearest ends of stretches, in place."""
    while spare > 0:
        runs = np.flatnonzero(mode >= 0)
        gpus = np.where(mode >= 0, sizes[mode], 0)
        first, last = gpus != np.append(0, gpus[:-1]), gpus != np.append(gpus[1:], 0)
        may = [step for step in runs.tolist() if first[step] or last[step]]
        if not may:
            return
        step = max(may, key=lambda each: float(rate[each, mode[each]] / speed[mode[each]]))
        pace = float(speed[mode[step]])
        whole = pace * max(float(ends[step] - begins[step]) - ways.restart_s * bool(first[step] and last[step]), 0.0)
        if spare >= whole and runs.size > 1:
            spare -= whole
            mode[step] = -1
            continue
        by_s = min(spare, whole) / pace
        if last[step]:
            ends[step] -= by_s
        else:
            begins[step] += by_s
        return


def _done(ways: Ways, work_s: float, plan: Planned) -> float:
    """Return the share of a job's work that a plan does, stage by stage."""
    part_s, left, stage = work_s / len(ways.speed), work_s / len(ways.speed), 0
    place = {size: at for at, size in enumerate(ways.sizes.tolist())}
    before: Stretch | None = None
    for stretch in plan.stretches:
        lasts_s = stretch.end_s - stretch.begin_s
        if before is None or before.gpus != stretch.gpus or before.end_s < stretch.begin_s:
            lasts_s -= ways.restart_s
        before = stretch
        while lasts_s > 0:
            pace = float(ways.speed[stage, place[stretch.gpus], ways.limits_w.index(stretch.limit_w)])
            if left > lasts_s * pace:
                left -= lasts_s * pace
                break
            lasts_s -= left / pace
            left, stage = part_s, stage + 1
            if stage == len(ways.speed):
                return 1.0
    return (stage + 1 - left / part_s) / len(ways.speed)


class Following(StatelessPolicy):
    """Carries out plans: each job has the gang and the limit of its stretch; one that is not done goes on in its last.

    Those whose deadline is first go first where GPUs do not suffice.
    """

    name = "joint"  #: The engine treats it as that: elastic, tuning batches, setting limits

    def __init__(self, plans: Mapping[str, Sequence[Stretch]], deadline_s: Mapping[str, float]) -> None:
        self._plans, self._deadline_s = plans, deadline_s

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan of this moment, and when the next stretch of any job begins or ends."""
        jobs, now_s = snapshot.jobs, snapshot.now_s + 1e-6
        again_s, wanted = np.inf, dict[int, Stretch]()
        for job, job_id in enumerate(jobs.ids):
            stretches = self._plans[job_id]
            for at, stretch in enumerate(stretches):
                last = at == len(stretches) - 1
                if now_s < stretch.begin_s:
                    again_s = min(again_s, stretch.begin_s)
                    break
                if now_s < stretch.end_s or last:
                    wanted[job] = stretch
                    again_s = again_s if last else min(again_s, stretch.end_s)
                    break
        order = sorted(wanted, key=lambda job: (self._deadline_s[jobs.ids[job]], jobs.ids[job]))
        gpus = np.array([wanted[job].gpus for job in order], dtype=np.int64)
        ranking = Ranking(np.array(order, dtype=np.int64), gpus, Reason.GREENER_HOURS)
        plan = with_batches(snapshot, reconcile(snapshot, ranking, preemption=Preemption.NOW))
        stops = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
        starts = {action.job_id for action in plan.actions if isinstance(action, Start)}
        goes = {job for job in wanted if jobs.phase[job] in (STARTING, RUNNING) and jobs.ids[job] not in stops}
        goes |= {job for job in wanted if jobs.ids[job] in starts}
        controls = [
            set_to(jobs.ids[job], LIMIT, wanted[job].limit_w, Reason.LEAST_COST)
            for job in sorted(goes)
            if _limit_w(snapshot, job, starts=jobs.ids[job] in starts) != wanted[job].limit_w
        ]
        look_again_s = float(again_s) if np.isfinite(again_s) else None
        return Plan(plan.snapshot_version, (*plan.actions, *controls), plan.nodes, look_again_s), memory


def _limit_w(snapshot: Snapshot, job: int, *, starts: bool) -> float | None:
    limit_w = snapshot.jobs.power_limit_w.item(job)
    return None if starts or np.isnan(limit_w) else limit_w


@dataclass(frozen=True)
class Place:
    """A cluster of one GPU model over the time of a grid."""

    model: str
    gpus: int
    widest: int  #: GPUs of a node
    idle_w: float  #: Of an unused GPU with its share of the host
    curve: CarbonCurve
    price: Floats  #: (n_steps,) what a GPU hour is worth beyond its own carbon, gCO2


def plans_of(
    workload: Workload, place: Place, options: EngineOptions, tunes: Sequence[bool], due_s: Floats
) -> dict[str, tuple[Stretch, ...]]:
    """Return every job's plan, those of the most work first; hours that are full are closed to the others.

    Args:
        tunes: Which jobs tune their batch, (n_jobs,).
        due_s: (n_jobs,) when each must be done, UTC seconds.
    """
    ways: dict[tuple[int, ...], Ways] = {}
    found: dict[str, tuple[Stretch, ...]] = {}
    edges, room_s = place.curve.edges_s, FULL * place.gpus * place.curve.lengths_s
    used_s = np.zeros_like(room_s)
    for row in np.argsort(-workload.work_s, kind="stable").tolist():
        low, high, step = (each.item(row) for each in (workload.min_gpus, workload.max_gpus, workload.step_gpus))
        key = workload.profile.item(row), int(tunes[row]), low, high, step
        if key not in ways:
            sizes = np.arange(low, min(high, place.gpus) + 1, step, dtype=np.int64)
            ways[key] = ways_of(workload.profiles[key[0]], sizes, place, options, tunes=bool(tunes[row]))
        full = used_s + ways[key].sizes[-1] * place.curve.lengths_s > room_s
        price = np.where(full, place.price + CLOSED_G, place.price)
        hours = Hours(place.curve, price, workload.submitted_s.item(row), due_s.item(row))
        stretches = planned(ways[key], workload.work_s.item(row), hours).stretches
        for each in stretches:
            within_s = np.minimum(edges[1:], each.end_s) - np.maximum(edges[:-1], each.begin_s)
            used_s += each.gpus * np.maximum(within_s, 0.0)
        found[workload.ids[row]] = stretches
    return found
