"""CarbonScaler: a job runs wide in green hours, narrow in others and not at all in the dirtiest, by its deadline.

Of all steps of its gang in all slots of the forecast before the deadline, a job takes those of the most work per carbon
until its work is done (Algorithm 1):

    key(i, j) = MC_j / c_i

where ``MC_j`` is the marginal capacity of step ``j``: the speed that it adds, per GPU that it adds, and ``c_i`` the
intensity of slot ``i``. Power per GPU is taken to be the same at every size. The plan is made anew in every round, so
that it follows new forecasts and what a job has really done.

======== ======================================== =========================================
symbol   paper                                    here
======== ======================================== =========================================
m, M     least and most servers of a job          its smallest and largest gang
MC_j     marginal capacity, not increasing        the same; a step counts at most what the
                                                  one before it did, where it adds more
l        length at ``m`` servers                  predicted time at the smallest gang
T        completion time that the user asks for   its deadline, or ``window_s`` later than
                                                  had it run at once; at least ``l`` ahead
======== ======================================== =========================================

Each job plans as if it were alone, as in a cloud. Where GPUs are short here, all get their smallest gangs first, by
slack, and then their wider ones. Gangs are powers of two, as elsewhere in this cluster.

Source: Hanafy et al., CarbonScaler: Leveraging Cloud Workload Elasticity for Optimizing Carbon-Efficiency,
Proc. ACM Meas. Anal. Comput. Syst. 7(3), 2023 (SIGMETRICS'24), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lab.policies.carbon.left import left_and_due_s
from services.core.cycle.capacity import Capacity, possible_sizes, powers_of_two
from services.core.cycle.grids import eligible_curves
from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import Ranking, rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import PREEMPTING, QUEUED, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.reasons import Reason
from services.core.policies.batches import goodput_of, with_batches
from services.core.policies.parameters import check_parameters, parameter

LEAST_INTENSITY = 0.1
"""Slots at or below this, gCO2/kWh, are alike: marginal intensities may be 0 or negative."""


@dataclass(frozen=True)
class CarbonScalerConfig:
    """Parameters of CarbonScaler."""

    window_s: float = parameter(
        86_400.0,
        "How much later a job without a deadline may end than if it had run at once. Default: ours, 24 hours, as "
        "for Wait Awhile.",
        unit="s",
        minimum=0.0,
    )
    unknown_s: float = parameter(
        14_400.0, "Assumed time that a job without a prediction needs. Default: ours.", unit="s", minimum=60.0
    )

    def __post_init__(self) -> None:
        check_parameters(self)


class CarbonScaler(StatelessPolicy):
    """Jobs scale with the grid, each by its marginal work per carbon. Preempts and resizes in active rounds."""

    name = "carbon-scaler"

    def __init__(self, config: CarbonScalerConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan that runs each job at the size that this slot has in its own plan, least slack first."""
        jobs, config = snapshot.jobs, self.config
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        if not which.size:
            return reconcile(snapshot, Ranking(which, which), preemption=preemption), memory
        left_s, due_s = left_and_due_s(jobs, which, unknown_s=config.unknown_s, window_s=config.window_s)
        gpus, speed = _speeds(snapshot, which)
        curves = eligible_curves(snapshot, which)

        def steps(curve: CarbonCurve, rows: slice | Ints) -> Ints:
            return steps_now(curve, snapshot.now_s, left_s[rows], due_s[rows], gpus[rows], speed[rows])

        taken = curves.by_curve(steps)
        runs = np.flatnonzero(taken)
        ranking = rank(
            snapshot,
            which[runs],
            gpus[runs, 0],
            (due_s - left_s)[runs],
            jobs.submitted_s[which[runs]],
            preemption=preemption,
            unranked=Reason.GREENER_HOURS,
        )
        wanted = np.zeros(len(jobs), dtype=np.int64)
        wanted[which[runs]] = gpus[runs, taken[runs] - 1]
        plan = reconcile(snapshot, _widened(snapshot, ranking, wanted, preemption), preemption=preemption)
        return with_batches(snapshot, plan), memory


def steps_now(curve: CarbonCurve, now_s: float, left_s: Floats, due_s: Floats, gpus: Ints, speed: Floats) -> Ints:
    """Return how many of its steps each job takes in the present slot, 0: it waits; (n_jobs,).

    Hours between the end of the forecast and the deadline count as one slot at the forecast's mean.

    Args:
        curve: The grid as known.
        now_s: UTC seconds.
        left_s: (n_jobs,) l, what each still needs at its smallest gang.
        due_s: (n_jobs,) T, UTC seconds.
        gpus: (n_jobs, n_sizes) its sizes, ascending; 0 beyond the last.
        speed: (n_jobs, n_sizes) at those, in units of that at the smallest.

    Source: CarbonScaler, Algorithm 1.
    """
    known_until_s = max(curve.end_s, now_s + 1.0)
    begins, ends, intensity = curve.steps(now_s, known_until_s)
    begins, ends = np.append(begins, known_until_s), np.append(ends, np.inf)
    intensity = np.maximum(np.append(intensity, curve.mean(now_s, known_until_s)), LEAST_INTENSITY)
    until_s = np.maximum(due_s, now_s + left_s)
    lengths_s = np.maximum(np.minimum(ends, until_s[:, None]) - begins, 0.0)
    more_gpus = np.diff(gpus, axis=1, prepend=0)
    more_speed = np.where(more_gpus > 0, np.diff(speed, axis=1, prepend=0.0), 0.0)
    marginal = np.minimum.accumulate(more_speed / np.maximum(more_gpus, 1), axis=1)
    useful = marginal > 0
    with np.errstate(divide="ignore"):
        carbon = np.where(useful[:, None, :], intensity[:, None] / marginal[:, None, :], np.inf)
    work_s = lengths_s[:, :, None] * np.where(useful, more_speed, 0.0)[:, None, :]
    flat = (left_s.size, -1)
    order = carbon.reshape(flat).argsort(axis=1, kind="stable")
    sorted_s = np.take_along_axis(work_s.reshape(flat), order, axis=1)
    missing_s = left_s[:, None] - (sorted_s.cumsum(axis=1) - sorted_s)
    takes = (missing_s > 0) & (sorted_s > 0) & (order < gpus.shape[1])  # steps of the first slot stand first
    return np.count_nonzero(takes, axis=1).astype(np.int64)


def _speeds(snapshot: Snapshot, which: Ints) -> tuple[Ints, Floats]:
    """Return the sizes of each job, and its speed there in units of that at the smallest: (n_which, n_sizes) each."""
    jobs = snapshot.jobs
    low = jobs.min_gpus[which]
    gpus = powers_of_two(low, possible_sizes(snapshot, jobs.max_gpus[which], which), jobs.step_gpus[which])
    speed, _ = goodput_of(snapshot, which, int(gpus.max()), int(snapshot.nodes.gpus.max(initial=1)))
    speed = np.take_along_axis(speed, np.maximum(gpus, 1) - 1, axis=1)
    return gpus, speed / speed[:, :1]


def _widened(snapshot: Snapshot, ranking: Ranking, wanted: Ints, preemption: Preemption) -> Ranking:
    """Return the ranking with the sizes that jobs want, best first, as far as nobody else goes without.

    Args:
        snapshot: The cluster.
        ranking: At the smallest sizes.
        wanted: (n_jobs,) of the job table.
        preemption: Of the round.
    """
    jobs, capacity = snapshot.jobs, Capacity(snapshot)
    models = np.where(capacity.model >= 0, capacity.model, jobs.eligible.argmax(axis=1))
    now = preemption is Preemption.NOW
    waits = (jobs.phase == QUEUED) | (jobs.phase == PREEMPTING)
    shares = np.array([now or waits[job] for job in ranking.order.tolist()], dtype=np.bool_)
    room = capacity.total.copy() if now else np.array(capacity.room)
    room -= np.bincount(models[ranking.order[shares]], ranking.gpus[shares], minlength=room.size).astype(np.int64)
    gpus = ranking.gpus.copy()
    for at in np.flatnonzero(shares).tolist():
        job = int(ranking.order[at])
        while gpus[at] < wanted[job]:
            more = int(gpus[at])
            if more > room[models[job]]:
                break
            gpus[at] += more
            room[models[job]] -= more
    return replace(ranking, gpus=gpus)
