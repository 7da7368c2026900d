"""Let's wait awhile: an interruptible job runs in the greenest hours of its window.

A job that still needs ``r`` seconds and must be done by ``d`` runs now exactly if the time until ``d`` that is greener
than now is less than ``r``:

    sum over steps t in [now, d) with c[t] < c[now] of length(t)  <  r

which picks the same hours as sorting the window's slots by intensity and taking the first ``r``, and needs no plan to
be kept. A job without a deadline gets one: when it would have ended had it started at once, plus ``window_s``.

Source: Wiesner et al., Let's Wait Awhile, Middleware'21, interruptible scheduling. There jobs are alone; here a job
whose hour has come still queues for devices, by the slack it has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from services.core.cycle.plan import Plan, Reason
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import Preemption, contenders, rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.snapshot import QUEUED, Bools, Floats, Ints, Snapshot
from services.core.domain.carbon import CarbonCurve
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import Parameter, check_parameters


@dataclass(frozen=True)
class WaitAwhileConfig:
    """Parameters of the interruptible policy."""

    window_s: Annotated[
        float,
        Parameter(
            "How much later than at once a job without a deadline may end. Default: ours, 24 hours, as GAIA runs it.",
            unit="s",
            minimum=0.0,
        ),
    ] = 86_400.0
    unknown_s: Annotated[
        float, Parameter("Time a job without a prediction is taken to need. Default: ours.", unit="s", minimum=60.0)
    ] = 14_400.0
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


class WaitAwhile(StatelessPolicy):
    """Jobs run in the greenest hours before their deadlines. Preempts in active rounds."""

    name = "wait-awhile"

    def __init__(self, config: WaitAwhileConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan that runs the jobs whose hour it is, least slack first."""
        jobs, config, now_s = snapshot.jobs, self.config, snapshot.now_s
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        submitted_s, due_s = jobs.submitted_s[which], jobs.deadline_s[which]
        remaining_s, progress = jobs.remaining_s[which], jobs.progress[which]
        left_s = np.where(np.isnan(remaining_s), config.unknown_s, remaining_s)
        done = np.where(np.isnan(progress), 0.0, np.minimum(np.maximum(progress, 0.0), 0.999))
        whole_s = left_s / (1.0 - done)
        deadline_s = np.where(np.isfinite(due_s), due_s, submitted_s + whole_s + config.window_s)
        curve = snapshot.carbon.curve
        runs = hour_has_come(curve, now_s, left_s, deadline_s)
        keys, why = ((deadline_s - left_s)[runs], submitted_s[runs]), Reason.GREENER_HOURS
        sizes = fixed_sizes(snapshot, config.gang, which[runs])
        ranking = rank(snapshot, which[runs], sizes, *keys, preemption=preemption, unranked=why)

        def expected() -> tuple[Ints, Floats]:
            """Return when the hours of those that wait come."""
            held = np.flatnonzero(~runs & (jobs.phase[which] == QUEUED))
            return which[held], hour_comes_s(curve, now_s, left_s[held], deadline_s[held])

        return reconcile(snapshot, ranking.expecting(expected), preemption=preemption), memory


def hour_has_come(curve: CarbonCurve, now_s: float, left_s: Floats, deadline_s: Floats) -> Bools:
    """Return which jobs run now: those with less greener time ahead than they need: (n_jobs,).

    Args:
        curve: The grid as known.
        now_s: UTC seconds.
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
    """Return when each job's hour comes if the forecast holds, from now on, UTC seconds: (n_jobs,).

    That is now or the beginning of a step, for within a step the greener time ahead stays the same. NaN where it also
    depends on what follows the curve: were all of that greener, the hour would not have come.

    Args:
        curve: The grid as known.
        now_s: UTC seconds.
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
