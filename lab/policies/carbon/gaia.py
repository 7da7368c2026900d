"""GAIA's Carbon-Time: a job starts when a second of waiting saves the most carbon.

Among the starts ``t`` from submission ``a`` to ``a + W`` (at submission and at each step of the curve) it takes the one
of the highest carbon saving per completion time,

    CST(t) = (C(a) - C(t)) / (t - a + J)

where ``C(t)`` is the intensity summed over ``[t, t + J)`` and ``J`` the length of the job as far as it is known: GAIA
uses the mean of its queue. Among equals the earliest; where nothing is saved, at once.

Source: Hanafy et al., Going Green for Less Green (GAIA), ASPLOS'24; W = 12 h as in GREEN section 8.1. There a job has
the machines it asks for at its start; here, as GREEN extends it, it then queues for them, by its planned start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import numpy as np

from services.core.cycle.grids import eligible_curves
from services.core.cycle.plan import Plan
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, waiting
from services.core.cycle.snapshot import QUEUED, Snapshot, Trigger
from services.core.domain.arrays import Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class GaiaConfig:
    """Parameters of Carbon-Time."""

    longest_wait_s: float = parameter(
        43_200.0, "W: no start is planned later than this after submission. Default: GREEN section 8.1.", minimum=0.0
    )
    length: Literal["mean", "predicted"] = parameter(
        "mean", "J: the same for all jobs, as in GAIA, or each job's own prediction if there is one."
    )
    mean_length_s: float = parameter(
        10_800.0, "J of jobs whose own length is unused or unknown. Default: ours.", unit="s", minimum=60.0
    )
    gang: GangParameter = "min"
    backfill: bool = parameter(
        True, "Whether later jobs may start while an earlier one waits for more GPUs than are free."
    )

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class GaiaMemory:
    """Planned starts of waiting jobs, UTC seconds; those of jobs that are gone are dropped at active rounds."""

    start_s: Mapping[JobId, float] = field(default_factory=dict[JobId, float])


class Gaia:
    """Jobs start at their greenest moment per second of completion time. Never preempts."""

    name = "gaia"

    def __init__(self, config: GaiaConfig) -> None:
        self.config = config

    def initial(self) -> GaiaMemory:
        """Return the memory of a policy that has planned nothing."""
        return GaiaMemory()

    def decide(self, snapshot: Snapshot, memory: GaiaMemory) -> tuple[Plan, GaiaMemory]:
        """Plan the starts of jobs not seen before, and start those whose time has come."""
        jobs, config = snapshot.jobs, self.config
        waits = waiting(snapshot)
        memory = self._following(snapshot, memory, waits)
        ids = map(jobs.ids.__getitem__, waits.tolist())
        start_s = np.fromiter(map(memory.start_s.get, ids, repeat(-np.inf)), np.float64, waits.size)
        now = start_s <= snapshot.now_s
        due, backfill, why = waits[now], config.backfill, Reason.GREENER_HOURS
        sizes, keys = fixed_sizes(snapshot, config.gang, due), (start_s[now], jobs.submitted_s[due])
        never = Preemption.NEVER
        ranking = rank(snapshot, due, sizes, *keys, preemption=never, backfill=backfill, unranked=why)
        ranking = ranking.expecting(lambda: (waits[~now], start_s[~now]))
        return reconcile(snapshot, ranking, preemption=never, backfill=backfill), memory

    def dump(self, memory: GaiaMemory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        return {"start_s": dict(memory.start_s)}

    def load(self, stored: dict[str, Any]) -> GaiaMemory:
        """Return the memory that ``dump`` wrote; what is missing is empty."""
        return GaiaMemory({JobId(job_id): float(at) for job_id, at in stored.get("start_s", {}).items()})

    def _following(self, snapshot: Snapshot, memory: GaiaMemory, waits: Ints) -> GaiaMemory:
        jobs, config, known = snapshot.jobs, self.config, memory.start_s
        new = [job for job in waits.tolist() if jobs.ids[job] not in known and jobs.phase[job] == QUEUED]
        active = snapshot.trigger is Trigger.ACTIVE
        if not new and not active:
            return memory
        start_s = {i: known[i] for i in jobs.ids if i in known} if active else dict(known)
        curves = eligible_curves(snapshot, np.array(new, dtype=np.int64))
        for row, job in enumerate(new):
            length_s = float(jobs.remaining_s[job]) if config.length == "predicted" else np.nan
            length_s = config.mean_length_s if not length_s > 0 else length_s
            submitted_s = float(jobs.submitted_s[job])
            start_s[jobs.ids[job]] = best_start_s(curves.of_job(row), submitted_s, length_s, config.longest_wait_s)
        return GaiaMemory(start_s)


def best_start_s(curve: CarbonCurve, submitted_s: float, length_s: float, longest_wait_s: float) -> float:
    """Return the start of the highest carbon saving per completion time, UTC seconds.

    Args:
        curve: The grid as known when the job arrives.
        submitted_s: a, UTC seconds.
        length_s: J, seconds; > 0.
        longest_wait_s: W, seconds.
    """
    starts, _, _ = curve.steps(submitted_s, submitted_s + max(longest_wait_s, 1e-3))
    means = curve.means(starts, length_s)
    saving = (means[0] - means) * length_s / (starts - submitted_s + length_s)
    return float(starts[int(np.argmax(saving))])
