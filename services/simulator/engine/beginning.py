"""A cluster already at work, from which a run continues."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.domain.arrays import Floats
from services.core.domain.placement import Placement


@dataclass(frozen=True)
class Beginning:
    """The state in which a run begins; columns are (n_jobs,), in the order of the workload.

    Attributes:
        attained_gpu_s, energy_j, carbon_gco2: What each job has used and emitted so far.
    """

    now_s: float  #: When the run begins, UTC seconds; jobs that were submitted earlier wait from then on
    next_active_s: float  #: When the first active round is due
    held: Mapping[int, Placement]  #: The running gangs by workload row, on the engine's own node ids
    since_s: Floats  #: Since when each job has waited, or held its GPUs, UTC seconds
    progress: Floats  #: The share of each job's work that is done
    attained_gpu_s: Floats
    energy_j: Floats
    carbon_gco2: Floats
