"""What A-SRPT is compared with: queues by prediction, strict or work-conserving, with gangs placed by their graphs.

=============== ======================================== =================================================
policy          order                                    when the next gang does not fit
=============== ======================================== =================================================
spjf            predicted duration                       all wait for it
spwf            predicted duration times GPUs            all wait for it
wcs-duration    predicted duration                       those behind it that fit start
wcs-workload    predicted duration times GPUs            those behind it that fit start
wcs-subtime     submission                               those behind it that fit start
=============== ======================================== =================================================

Users' priorities come first, jobs without a prediction last. None preempts.

Source: A-SRPT section V-A, 1-d; the paper takes SPJF from Weng et al. (NSDI'22), SPWF from Tiresias (NSDI'19), and
work-conserving scheduling from Zheng et al. (INFOCOM'15). It calls SPJF rigid, which we read as strict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.core.cycle.placers import PLACERS
from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, waiting
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter

Key = Literal["duration", "workload", "submission"]


@dataclass(frozen=True)
class PredictedOrderConfig:
    """Parameters of all five."""

    placement: Literal["first-fit", "heavy-edge", "refined", "consolidated", "buddy"] = parameter(
        "first-fit",
        "How gangs are placed. Default: on the first servers with free GPUs, replicas mapped by Heavy-Edge, which "
        "is all that the paper says of its baselines; heavy-edge: on the servers that A-SRPT would take.",
    )
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


class PredictedOrder(StatelessPolicy):
    """One of the five, by its key and by whether it backfills."""

    def __init__(self, config: PredictedOrderConfig, name: str, key: Key, *, backfill: bool) -> None:
        self.config = config
        self.name = name
        self._key = key
        self._backfill = backfill

    @property
    def placement(self) -> str:
        """The way it places gangs."""
        return self.config.placement

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the starts that free devices allow, in order."""
        waits, jobs = waiting(snapshot), snapshot.jobs
        sizes = fixed_sizes(snapshot, self.config.gang, waits)
        submitted_s = jobs.submitted_s[waits]
        predicted_s = np.where(np.isnan(jobs.remaining_s[waits]), np.inf, jobs.remaining_s[waits])
        keys = {
            "duration": (predicted_s, submitted_s),
            "workload": (predicted_s * sizes, predicted_s, submitted_s),  # two lengths may round to one workload
            "submission": (submitted_s,),
        }[self._key]
        never, place = Preemption.NEVER, PLACERS[self.placement]
        ranking = rank(snapshot, waits, sizes, *keys, preemption=never, backfill=self._backfill)
        return reconcile(snapshot, ranking, preemption=never, place=place, backfill=self._backfill), memory


def in_order(name: str, key: Key, *, backfill: bool) -> Callable[[PredictedOrderConfig], PredictedOrder]:
    """Return what makes the policy of that name."""
    return lambda config: PredictedOrder(config, name, key, backfill=backfill)
