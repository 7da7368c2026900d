"""Shortest job first, and shortest remaining time first: what perfect knowledge of durations could do for waiting.

Both rank by ``JobTable.remaining_s``. A simulation fills it from the trace, which makes them bounds that no scheduler
without an oracle reaches; live it holds predictions, and jobs without one come last, in order of submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from services.core.cycle.plan import Plan
from services.core.cycle.ranking import Ranking, every_job, rank, rank_waiting, waiting
from services.core.cycle.reconcile import Preemption, reconcile
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import Parameter, check_parameters


@dataclass(frozen=True)
class ShortestConfig:
    """Parameters of both."""

    gang: GangParameter = "min"
    backfill: Annotated[
        bool, Parameter("Whether longer jobs may start while a shorter one waits for more GPUs than are free.")
    ] = True

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class NoMemory:
    """What is remembered by policies that remember nothing."""


class Forgetful:
    """The memory methods of a policy without memory."""

    def initial(self) -> NoMemory:
        """Return the empty memory."""
        return NoMemory()

    def dump(self, memory: NoMemory) -> dict[str, Any]:
        """Return the memory as JSON values: none."""
        del memory
        return {}

    def load(self, stored: dict[str, Any]) -> NoMemory:
        """Return the empty memory, whatever was stored."""
        del stored
        return NoMemory()


class Sjf(Forgetful):
    """Shortest first, by the time a job still needs; users' priorities come first. Never preempts."""

    name = "sjf"

    def __init__(self, config: ShortestConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: NoMemory) -> tuple[Plan, NoMemory]:
        """Return the starts that free devices allow, shortest job first."""
        ranking = by_remaining(snapshot, self.config, only_waiting=True)
        return reconcile(snapshot, ranking, preemption=Preemption.NEVER, backfill=self.config.backfill), memory


class Srtf(Forgetful):
    """Shortest remaining time first: SJF that preempts in active rounds."""

    name = "srtf"

    def __init__(self, config: ShortestConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: NoMemory) -> tuple[Plan, NoMemory]:
        """Return the plan that lets those run that will be done first."""
        passive = snapshot.trigger is Trigger.PASSIVE and not snapshot.reasons
        ranking = by_remaining(snapshot, self.config, only_waiting=passive)
        preemption = Preemption.at(snapshot.trigger)
        return reconcile(snapshot, ranking, preemption=preemption, backfill=self.config.backfill), memory


def by_remaining(snapshot: Snapshot, config: ShortestConfig, *, only_waiting: bool) -> Ranking:
    """Return all jobs, or those that wait, by the time they still need, then by submission; the unpredicted last."""
    which = waiting(snapshot) if only_waiting else every_job(snapshot)
    remaining, submitted = snapshot.jobs.remaining_s[which], snapshot.jobs.submitted_s[which]
    keys = np.where(np.isnan(remaining), np.inf, remaining), submitted
    sizes = fixed_sizes(snapshot, config.gang, which)
    if only_waiting:
        return rank_waiting(snapshot, which, sizes, *keys, backfill=config.backfill)
    return rank(snapshot, which, sizes, *keys)
