"""What each lever of ``joint`` does for one job, by its own modes and the forecast."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.grids import eligible_curves, present_curves
from services.core.cycle.snapshot import PREEMPTING, QUEUED, Snapshot
from services.core.cycle.zones import Zones
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.controls import limit_at
from services.core.policies.joint.costs import counted
from services.core.policies.joint.hours import hours_of
from services.core.policies.joint.memory import JointMemory
from services.core.policies.joint.modes import Modes, hosts_w
from services.core.policies.joint.quantiles import at_quantile
from services.core.policies.joint.worth import Worth
from services.core.policies.levers import Effect, Lever, Runs, Way, carbon_g, compared, nothing, unknown
from services.core.policies.limits import LIMIT


@dataclass(frozen=True)
class Known:
    """What a round knows of its jobs; see ``policy``."""

    models: Ints  #: (n_jobs,) index of the GPU model that each has or may have
    modes: Modes  #: The modes of all jobs
    slower: Floats  #: (n_jobs,) speed at its best size under the least-cost limit, as a share of that at the default
    left_s: Floats  #: (n_jobs,) what each still needs at its smallest gang, NaN where unknown
    deadline_s: Floats  #: (n_jobs,) when each must be done, UTC seconds
    worth: Worth  #: What time is worth

    @cached_property
    def at_best_s(self) -> Floats:
        """What each still needs at its best size, seconds: (n_jobs,)."""
        return self.left_s / (self.modes.ratio[np.arange(self.models.size), self.modes.best] * self.slower)


def effects(snapshot: Snapshot, memory: JointMemory, config: JointConfig, known: Known, job: int) -> tuple[Effect, ...]:
    """Return what each lever does for a waiting or running job."""
    jobs, now_s = snapshot.jobs, snapshot.now_s
    held = jobs.ids[job] in memory.held
    left_s = float(known.left_s[job])
    zones = Zones.of(snapshot)
    if not np.isfinite(left_s):
        why = "How long the job still needs is not known yet: it has reported no progress, and nothing predicts it."
        return tuple(unknown(lever, why) for lever in Lever if zones is not None or lever is not Lever.ZONE)
    column = _column(snapshot, memory, known, job)
    gpus, ratio, watts = (
        column_of[job, column] for column_of in (known.modes.gpus, known.modes.ratio, known.modes.watts)
    )
    slower, cooler_w = _limited(snapshot, config, known, job, gpus)
    speed, draw_w = float(ratio) * (slower or 1.0), float(watts) - (cooler_w or 0.0) * gpus
    curve = (present_curves if jobs.gpus[job] else eligible_curves)(snapshot, np.array([job])).of_job(0)
    runs: Runs = ((now_s, now_s + left_s / speed),)
    if held:
        worth, costs = known.worth.hour_g(np.array([job])).item(), counted(snapshot, config.tonne_price)
        ahead = eligible_curves(at_quantile(costs, config.intensity_quantile), np.array([job])).of_job(0)
        need = (left_s / speed, known.deadline_s.item(job), draw_w, worth)
        runs = hours_of(ahead, now_s, *need, config.stay_share, config.ahead_s)
    chosen = Way(draw_w, runs)
    hours = nothing(Lever.HOURS, "It does not wait for greener hours.")
    if held:
        hours = compared(Lever.HOURS, curve, chosen, chosen.at_once(now_s), "Against the same run at once.")
    return (
        _width(curve, chosen, known, job, column, ratio, cooler_w or 0.0),
        _batch(snapshot, curve, chosen, job, gpus),
        _power_limit(curve, chosen, config, slower, cooler_w, gpus),
        hours,
        _order(snapshot, memory, known, job, curve, chosen),
        _sleep(snapshot, config, known, job, curve, chosen, gpus),
        *((_zone(snapshot, zones, job, chosen),) if zones is not None else ()),
    )


def _column(snapshot: Snapshot, memory: JointMemory, known: Known, job: int) -> int:
    """Return the mode (a column) that a job has, was given, or would get."""
    jobs = snapshot.jobs
    given = int(jobs.gpus[job]) or memory.sizes.get(jobs.ids[job], 0)
    if not given:
        return int(known.modes.best[job])
    return int(known.modes.column_of(np.where(np.arange(len(jobs)) == job, given, 1))[job])


def _limited(
    snapshot: Snapshot, config: JointConfig, known: Known, job: int, gpus: int
) -> tuple[float | None, float | None]:
    """Return the speed under the job's limit relative to the default, and how many watts less a GPU draws.

    None, None if nothing is known of limits.
    """
    jobs, model = snapshot.jobs, known.models.item(job)
    curve = snapshot.control_curve(job, model, LIMIT)
    if curve is None:
        return None, None
    if jobs.gpus[job]:
        limit_w = float(jobs.power_limit_w[job])
        speed, power_w = curve.at(limit_w if np.isfinite(limit_w) else None)
    elif config.limits:
        at = limit_at(known.worth, job, curve, gpus, hosts_w(snapshot, config).item(model))
        speed, power_w = float(curve.speed[at]), float(curve.power_w[at])
    else:
        speed, power_w = curve.at(None)
    return speed, curve.at(None)[1] - power_w


def _width(
    curve: CarbonCurve, chosen: Way, known: Known, job: int, column: int, ratio: float, cooler_w: float
) -> Effect:
    smallest = int(known.modes.gpus[job, 0])
    if column == 0:
        return nothing(Lever.WIDTH, "It has its smallest gang.")
    narrow_w = float(known.modes.watts[job, 0]) - cooler_w * smallest
    without = chosen.slower(ratio, narrow_w)
    return compared(Lever.WIDTH, curve, chosen, without, f"Against a gang of {smallest}.")


def _batch(snapshot: Snapshot, curve: CarbonCurve, chosen: Way, job: int, gpus: int) -> Effect:
    jobs, gains = snapshot.jobs, snapshot.goodput_gains
    if jobs.batch_min[job] < 0:
        return nothing(Lever.BATCH, "Its batch is its user's.")
    row = int(jobs.goodput_curve[job])
    if row < 0 or not gains.size:
        return unknown(Lever.BATCH, "What its batch does is not known.")
    gain = float(gains[row, 0, min(gpus, int(gains.shape[-1])) - 1])
    detail = "Against the base batch on the same gang, which is taken to draw as much."
    return compared(Lever.BATCH, curve, chosen, chosen.slower(gain, chosen.watts), detail)


def _power_limit(
    curve: CarbonCurve, chosen: Way, config: JointConfig, slower: float | None, cooler_w: float | None, gpus: int
) -> Effect:
    if not config.limits:
        return nothing(Lever.POWER_LIMIT, "The policy sets no power limits.")
    if slower is None or cooler_w is None:
        return unknown(Lever.POWER_LIMIT, "Its kind has not been measured at other power limits yet.")
    if slower == 1.0 and not cooler_w:
        return nothing(Lever.POWER_LIMIT, "It has the default power limit.")
    without = chosen.slower(slower, chosen.watts + cooler_w * gpus)
    return compared(Lever.POWER_LIMIT, curve, chosen, without, "Against the default power limit.")


def _order(snapshot: Snapshot, memory: JointMemory, known: Known, job: int, curve: CarbonCurve, chosen: Way) -> Effect:
    jobs = snapshot.jobs
    if jobs.phase[job] not in (QUEUED, PREEMPTING):
        return unknown(Lever.ORDER, "It has its GPUs; how long it would have waited otherwise is not known.")
    place = memory.place
    mine = place.get(jobs.ids[job])
    if mine is None:
        return nothing(Lever.ORDER, "It has no place in the policy's order now.")
    waits = [at for at in np.flatnonzero(jobs.phase == QUEUED).tolist() if at != job and jobs.ids[at] in place]
    before = [at for at in waits if place[jobs.ids[at]] < mine]
    older = [at for at in waits if jobs.submitted_s[at] < jobs.submitted_s[job]]
    total = int(Capacity(snapshot).total.sum())
    work_s = known.left_s * jobs.min_gpus
    by_order_s, by_age_s = (float(work_s[ahead].sum()) / total if total else np.nan for ahead in (before, older))
    if not np.isfinite(by_order_s + by_age_s):
        return unknown(Lever.ORDER, "How long the jobs before it need is not known.")
    detail = "Against the order of submission, by the work ahead over the cluster's GPUs."
    return compared(Lever.ORDER, curve, chosen.later(by_order_s), chosen.later(by_age_s), detail)


def _zone(snapshot: Snapshot, zones: Zones, job: int, chosen: Way) -> Effect:
    which = np.array([job])
    if not snapshot.jobs.gpus[job]:
        to = int(zones.zone[np.where(snapshot.jobs.eligible[job], zones.grams(job), np.inf).argmin()])
        return unknown(
            Lever.ZONE, f"Of free GPUs it takes those where it emits least, now in {snapshot.outlooks[to].zone}."
        )
    here, mean = (carbon_g(of(snapshot, which).of_job(0), chosen) for of in (present_curves, eligible_curves))
    detail = "Against the mean of the zones of all GPUs that it may use, weighted by their GPUs."
    return Effect(Lever.ZONE, mean - here, 0.0, detail)


def _sleep(
    snapshot: Snapshot, config: JointConfig, known: Known, job: int, curve: CarbonCurve, chosen: Way, gpus: int
) -> Effect:
    model = known.models.item(job)
    mine = snapshot.nodes.gpu_model == model
    if config.sleep_after_s is None or not bool((snapshot.nodes.may_sleep & mine).any()):
        return nothing(Lever.SLEEP, "No node that it may use is powered down.")
    starts_s = chosen.runs[0][0]
    if snapshot.jobs.gpus[job] or starts_s <= snapshot.now_s:
        return nothing(Lever.SLEEP, "It leaves no GPUs unused.")
    if not snapshot.idle_w.size:
        return unknown(Lever.SLEEP, "What its GPUs draw while nobody uses them is not known.")
    idle = Way(float(snapshot.idle_w[model]) * gpus, ((snapshot.now_s, starts_s),))
    detail = "Against its GPUs idle until it starts, if nobody else uses them. How long a node boots is not known."
    return Effect(Lever.SLEEP, carbon_g(curve, idle), None, detail)
