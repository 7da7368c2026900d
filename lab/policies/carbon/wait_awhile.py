"""Let's wait awhile: an interruptible job runs in the greenest hours of its window.

Which hours those are, ``services.core.policies.greener_hours`` says. A job without a deadline gets one: when it would
have ended had it started at once, plus ``window_s``.

Source: Wiesner et al., Let's Wait Awhile, Middleware'21, interruptible scheduling. There jobs are alone; here a job
whose hour has come still queues for devices, by the slack it has left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.policies.carbon.left import left_and_due_s
from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.greener_hours import expected_start_s, should_run
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class WaitAwhileConfig:
    """Parameters of the interruptible policy."""

    window_s: float = parameter(
        86_400.0,
        "How much later a job without a deadline may end than if it had run at once. Default: ours, 24 hours, as "
        "GAIA runs it.",
        unit="s",
        minimum=0.0,
    )
    unknown_s: float = parameter(
        14_400.0, "Assumed time that a job without a prediction needs. Default: ours.", unit="s", minimum=60.0
    )
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
        jobs, config = snapshot.jobs, self.config
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        submitted_s = jobs.submitted_s[which]
        left_s, deadline_s = left_and_due_s(jobs, which, unknown_s=config.unknown_s, window_s=config.window_s)
        runs = should_run(snapshot, which, left_s, deadline_s)
        keys, why = ((deadline_s - left_s)[runs], submitted_s[runs]), Reason.GREENER_HOURS
        sizes = fixed_sizes(snapshot, config.gang, which[runs])
        ranking = rank(snapshot, which[runs], sizes, *keys, preemption=preemption, unranked=why)

        def expected() -> tuple[Ints, Floats]:
            """Return when the hours of those that wait come."""
            held = np.flatnonzero(~runs & (jobs.phase[which] == QUEUED))
            return which[held], expected_start_s(snapshot, which[held], left_s[held], deadline_s[held])

        return reconcile(snapshot, ranking.expecting(expected), preemption=preemption), memory
