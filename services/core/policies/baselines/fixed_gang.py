"""One size per job for its whole life, as in schedulers without scaling."""

from typing import Annotated, Literal

from services.core.cycle.capacity import possible_sizes
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Ints
from services.core.policies.parameters import Parameter

Gang = Literal["min", "max"]
GangParameter = Annotated[Gang, Parameter("The size every job runs at: the smallest or the largest it may have.")]


def fixed_sizes(snapshot: Snapshot, gang: Gang, which: Ints) -> Ints:
    """Return the smallest or the largest size each of these jobs can have on this cluster: (n_which,)."""
    jobs = snapshot.jobs
    if gang == "min":
        return jobs.min_gpus[which]
    return possible_sizes(snapshot, jobs.max_gpus[which], which)
