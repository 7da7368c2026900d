"""Whether a job should run now, or has greener hours ahead before it must be done.

A job that still needs ``r`` seconds and must be done by ``d`` runs now if and only if the time until ``d`` that is
greener than now is less than ``r``:

    sum over steps t in [now, d) with c[t] < c[now] of length(t)  <  r

which picks the same hours as sorting the window's slots by intensity and taking the first ``r`` seconds, and requires
no stored plan.

Source: Wiesner et al., Let's Wait Awhile, Middleware'21, interruptible scheduling.
"""

import numpy as np

from services.core.cycle.grids import eligible_curves, present_curves
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonCurve


def should_run(snapshot: Snapshot, which: Ints, left_s: Floats, deadline_s: Floats) -> Bools:
    """Return which of these jobs run now: (n,).

    In a cluster with several zones, a job that holds GPUs goes on if either the grids of its own nodes say so or those
    of all nodes that it may use. If its own alone could stop it, the others might start it again at once, on the same
    nodes, because placers do not look at zones.

    Args:
        which: (n,) indices into the job table.
        left_s: (n,) what each still needs.
        deadline_s: (n,) when each must be done, UTC seconds; finite.
    """

    def come(curve: CarbonCurve, rows: slice | Ints) -> Bools:
        return hour_has_come(curve, snapshot.now_s, left_s[rows], deadline_s[rows])

    runs = eligible_curves(snapshot, which).by_curve(come)
    if len(snapshot.outlooks) > 1:
        holds = np.array([snapshot.jobs.placements[job] is not None for job in which.tolist()], dtype=np.bool_)
        runs |= holds & present_curves(snapshot, which).by_curve(come)
    return runs


def expected_start_s(snapshot: Snapshot, which: Ints, left_s: Floats, deadline_s: Floats) -> Floats:
    """Return when the hour of each of these waiting jobs comes, as in ``hour_comes_s``, UTC seconds: (n,)."""
    return eligible_curves(snapshot, which).by_curve(
        lambda curve, rows: hour_comes_s(curve, snapshot.now_s, left_s[rows], deadline_s[rows])
    )


def hour_has_come(curve: CarbonCurve, now_s: float, left_s: Floats, deadline_s: Floats) -> Bools:
    """Return which jobs run now: those with less greener time ahead than they need: (n_jobs,).

    Args:
        left_s: (n_jobs,) what each still needs.
        deadline_s: (n_jobs,) when each must be done, UTC seconds; finite.
    """
    until_s = float(deadline_s.max(initial=now_s))
    if until_s <= now_s:
        return np.ones(left_s.shape, dtype=np.bool_)
    begins, ends, intensity = curve.steps(now_s, min(until_s, max(curve.end_s, now_s + 1.0)))
    greener = np.where(intensity < intensity[0], ends - begins, 0.0)
    edges, spent = np.append(begins, ends[-1]), np.append(0.0, np.cumsum(greener))
    return np.interp(deadline_s, edges, spent) < left_s


def hour_comes_s(curve: CarbonCurve, now_s: float, left_s: Floats, deadline_s: Floats) -> Floats:
    """Return when each job's hour comes, from now on, if the forecast holds, UTC seconds: (n_jobs,).

    That is now or the beginning of a step, since within a step the greener time ahead stays the same. NaN if it also
    depends on what follows the curve, i.e. if the hour would not come if all of that were greener.

    Args:
        left_s: (n_jobs,) what each still needs.
        deadline_s: (n_jobs,) when each must be done, UTC seconds; finite.
    """
    comes_s = np.full(left_s.shape, np.nan)
    unknown_s = np.maximum(deadline_s - max(curve.end_s, now_s), 0.0)
    ahead: list[float] = curve.times_s[curve.times_s > now_s].tolist()
    waits = np.arange(left_s.size)
    for begin_s in (now_s, *ahead):
        comes = hour_has_come(curve, begin_s, left_s[waits], deadline_s[waits])
        came, waits = waits[comes], waits[~comes]
        certain = hour_has_come(curve, begin_s, left_s[came] - unknown_s[came], deadline_s[came])
        comes_s[came[certain]] = begin_s
        if not waits.size:
            break
    return comes_s


def left_and_deadline_s(
    snapshot: Snapshot, which: Ints, gangs: Ints, slack_s: float, slack_share: float | None
) -> tuple[Floats, Floats]:
    """Return what these jobs still need, seconds, and when they must be done, UTC seconds: (n,) each.

    A job without a deadline may end later than if it had run since its submission, but by no more than the slack.

    Args:
        which: (n,) indices into the job table.
        gangs: (n,) the sizes they would run at.
        slack_s: The most a job may be delayed, >= 0.
        slack_share: The same, as a share of the time it needs; None: no such limit.
    """
    jobs = snapshot.jobs
    ran_s = np.nan_to_num(jobs.attained_gpu_s[which], nan=0.0) / gangs
    left_s = remaining_s(ran_s, jobs.progress[which])
    needed_s = ran_s + left_s
    allowed_s = slack_s if slack_share is None else np.minimum(slack_s, slack_share * needed_s)
    deadline_s = jobs.deadline_s[which]
    return left_s, np.where(np.isfinite(deadline_s), deadline_s, jobs.submitted_s[which] + needed_s + allowed_s)


def remaining_s(ran_s: Floats, progress: Floats) -> Floats:
    """Return how long jobs still need at their pace so far; without progress reports, as long as they ran: (n,).

    Args:
        ran_s: (n,) seconds they have run.
        progress: (n,) share of the work done, NaN where unknown.
    """
    done = np.where(np.isnan(progress), 0.5, np.clip(progress, 1e-3, 1.0))
    return ran_s * (1.0 - done) / done
