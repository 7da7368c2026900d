"""EcoVisor's carbon threshold, as GREEN extends it to a shared cluster: jobs queue while the grid is dirty.

Source: Souza et al., Ecovisor, ASPLOS'23, batch jobs under a carbon threshold; GREEN section 8.1 for the threshold and
the queue. What runs goes on: GREEN speaks of jobs that are queued, not of jobs that are stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.cycle.grids import eligible_curves
from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, waiting
from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class EcovisorConfig:
    """Parameters of the threshold policy."""

    percentile: float = parameter(
        10.0,
        "Jobs start while the intensity is at most this percentile of the curve. Default: GREEN section 8.1.",
        unit="%",
        minimum=0.0,
        maximum=100.0,
    )
    curve_window_s: float = parameter(
        86_400.0, "Length of the curve ahead. Default: GREEN section 8.1, 24 hours.", unit="s", minimum=60.0
    )
    longest_wait_s: float | None = parameter(
        43_200.0,
        "A job that has waited this long starts at any intensity; null: no job does. Default: ours, 12 hours as "
        "for GAIA; otherwise a tenth of the hours would have to start all jobs of a busy cluster.",
        unit="s",
        minimum=0.0,
    )
    gang: GangParameter = "min"
    backfill: bool = parameter(
        True, "Whether later jobs may start while an earlier one waits for more GPUs than are free."
    )

    def __post_init__(self) -> None:
        check_parameters(self)


class Ecovisor(StatelessPolicy):
    """Jobs start in order of submission while the grid is below a threshold. Never preempts."""

    name = "ecovisor"

    def __init__(self, config: EcovisorConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the starts that the threshold and free devices allow."""
        jobs, config, now_s = snapshot.jobs, self.config, snapshot.now_s
        waits = waiting(snapshot)
        longest_s = np.inf if config.longest_wait_s is None else config.longest_wait_s
        curves, until_s = eligible_curves(snapshot, waits), now_s + config.curve_window_s
        dirty = curves.each(lambda curve: curve.at(now_s) > percentile(curve, now_s, until_s, config.percentile))
        starts = waits
        if np.any(dirty):
            may = (jobs.phase[waits] != QUEUED) | (now_s - jobs.submitted_s[waits] >= longest_s)
            starts = waits[may | np.logical_not(dirty)]
        sizes, backfill = fixed_sizes(snapshot, config.gang, starts), config.backfill
        keys, why = jobs.submitted_s[starts], Reason.GREENER_HOURS
        never = Preemption.NEVER
        ranking = rank(snapshot, starts, sizes, keys, preemption=never, backfill=backfill, unranked=why)

        def latest_s() -> tuple[Ints, Floats]:
            """Return when the others start at the latest: later thresholds depend on hours not yet predicted."""
            later = np.setdiff1d(waits, starts)
            return later, jobs.submitted_s[later] + longest_s

        ranking = ranking.expecting(latest_s)
        return reconcile(snapshot, ranking, preemption=never, backfill=backfill), memory


def percentile(curve: CarbonCurve, start_s: float, end_s: float, percent: float) -> float:
    """Return the lowest value at or below which the grid spends ``percent`` of a window's time, gCO2/kWh."""
    begins, ends, intensity = curve.steps(start_s, end_s)
    order = np.argsort(intensity, kind="stable")
    spent: Floats = np.cumsum((ends - begins)[order])
    at = int(np.searchsorted(spent, percent / 100.0 * float(spent[-1])))
    return float(intensity[order][min(at, order.size - 1)])
