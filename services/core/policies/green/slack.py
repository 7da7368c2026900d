"""Beyond the paper: whether a job can wait for greener hours while GPUs are idle.

GREEN never leaves a GPU idle that a job could use, so on a cluster with room it shifts nothing. With slack that users
grant, a job in the lower queue runs in the greenest hours before its time is up, as ``wait-awhile`` runs every job; new
jobs still start at once, and jobs whose time is up compete as usual.
"""

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.policies.greener_hours import should_run


def can_wait(snapshot: Snapshot, which: Ints, gangs: Ints, slack_s: float, slack_share: float | None) -> Bools:
    """Return which of these jobs have more greener time ahead than they need: (n,).

    Args:
        which: (n,) indices into the job table.
        gangs: (n,) the sizes they would run at.
        slack_s: The most a job may be delayed, >= 0.
        slack_share: The same, as a share of the time it needs; None: no such limit.
    """
    return ~should_run(snapshot, which, *left_and_deadline_s(snapshot, which, gangs, slack_s, slack_share))


def left_and_deadline_s(
    snapshot: Snapshot, which: Ints, gangs: Ints, slack_s: float, slack_share: float | None
) -> tuple[Floats, Floats]:
    """Return what these jobs still need, seconds, and when they must be done, UTC seconds: (n,) each.

    A job without a deadline may end later than if it had run since its submission, but by no more than the slack. The
    arguments are those of ``can_wait``.
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
