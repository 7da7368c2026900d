"""Shortest job first, and shortest remaining time first: what perfect knowledge of durations could do for waiting.

Both rank by ``JobTable.remaining_s``. A simulation fills it from the trace, which makes them bounds that no scheduler
without an oracle reaches; live it holds predictions, and jobs without one come last, in order of submission.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import Ranking, rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class ShortestConfig:
    """Parameters of both."""

    gang: GangParameter = "min"
    backfill: bool = parameter(
        True, "Whether longer jobs may start while a shorter one waits for more GPUs than are free."
    )

    def __post_init__(self) -> None:
        check_parameters(self)


class Sjf(StatelessPolicy):
    """Shortest first, by the time a job still needs; users' priorities come first. Never preempts."""

    name = "sjf"

    def __init__(self, config: ShortestConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the starts that free devices allow, shortest job first."""
        ranking = by_remaining(snapshot, self.config, Preemption.NEVER)
        return reconcile(snapshot, ranking, preemption=Preemption.NEVER, backfill=self.config.backfill), memory


class Srtf(StatelessPolicy):
    """Shortest remaining time first: SJF that preempts in active rounds."""

    name = "srtf"

    def __init__(self, config: ShortestConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan that lets those run that will be done first."""
        preemption = Preemption.at(snapshot.trigger)
        ranking = by_remaining(snapshot, self.config, preemption)
        return reconcile(snapshot, ranking, preemption=preemption, backfill=self.config.backfill), memory


def by_remaining(snapshot: Snapshot, config: ShortestConfig, preemption: Preemption) -> Ranking:
    """Return the jobs to rank by the time they still need, then by submission; the unpredicted last."""
    which = contenders(snapshot, preemption)
    remaining, submitted = snapshot.jobs.remaining_s[which], snapshot.jobs.submitted_s[which]
    keys = np.where(np.isnan(remaining), np.inf, remaining), submitted
    sizes = fixed_sizes(snapshot, config.gang, which)
    return rank(snapshot, which, sizes, *keys, preemption=preemption, backfill=config.backfill)
