"""A cluster in the middle of its work, from which a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.domain.arrays import Floats
from services.core.domain.placement import Placement


@dataclass(frozen=True)
class Beginning:
    """What there is when a run begins; columns are (n_jobs,), in the order of the workload.

    Attributes:
        now_s: When the run begins, UTC seconds; jobs that were submitted before wait from then on.
        next_active_s: When the first active round is held.
        held: The gangs that run, by workload row, on the engine's own node ids.
        since_s: Since when each job waits, or has held its GPUs, UTC seconds.
        progress: Share of each job's work that is done.
        attained_gpu_s, energy_j, carbon_gco2: What each job has had so far.
    """

    now_s: float
    next_active_s: float
    held: Mapping[int, Placement]
    since_s: Floats
    progress: Floats
    attained_gpu_s: Floats
    energy_j: Floats
    carbon_gco2: Floats
