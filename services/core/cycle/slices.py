"""Jobs on MIG slices: each gets one slice of its size before any policy decides, and no policy sees them.

Jobs are placed in the order of ``Snapshot.slice_jobs``. A job takes the free slice whose GPU has the most slices in
use, so that other GPUs become free and can be repartitioned. Nothing is stopped for a job on a slice, and no slice is
reserved for one: the next to become free goes to the first job that may have it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from services.core.cycle.plan import Action, Hold, Start
from services.core.cycle.rounds import with_holds
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason


@dataclass(frozen=True)
class SliceTable:
    """What jobs on slices may run on; every column is (n_units,), in the order of ``Snapshot.slice_units``.

    Attributes:
        sevenths, memory_gib: Size and memory of each slice.
    """

    sevenths: Ints
    memory_gib: Floats
    gpu_model: Ints  #: Index of its GPU's model in ``Snapshot.gpu_models``
    takes_work: Bools  #: Whether its node accepts new work and is awake

    def suits(self, sevenths: int, memory_gib: float, eligible: Bools) -> Bools:
        """Return which of the units a job may run on: (n_units,).

        Args:
            sevenths: The size that it asks for; no other will do.
            eligible: (n_gpu_models,) GPU models on which it may run.
        """
        return (
            (self.sevenths == sevenths) & (self.memory_gib >= memory_gib) & eligible[self.gpu_model] & self.takes_work
        )


def slice_turn(*, is_service: bool, priority: int, submitted_s: float, job_id: str) -> tuple[bool, int, float, str]:
    """Return the sort key of a job that waits for a slice: service instances first, then by priority, then by age."""
    return not is_service, -priority, submitted_s, job_id


def place_slices(snapshot: Snapshot) -> tuple[tuple[Action, ...], Snapshot]:
    """Return a start or a hold for every job that waits for a slice, and the snapshot without those jobs."""
    jobs, units = snapshot.jobs, snapshot.slice_units
    held, given = jobs.gpus_by_tenant(), Counter[str]()
    used = Counter((unit.node, unit.gpu) for unit in units if not unit.free)
    free = np.fromiter((unit.free for unit in units), np.bool_, len(units))
    starts: list[Start] = []
    holds: list[Hold] = []
    for each in snapshot.slice_jobs:
        tenant = jobs.tenants[jobs.index[each.job_id]]
        fits: list[int] = np.flatnonzero(each.units & free).tolist()
        if snapshot.within.get(each.job_id, 0) < 0 and each.job_id not in snapshot.bound:
            holds.append(Hold(each.job_id, Reason.NO_SUCH_DOMAIN))
        elif not each.units.any():
            holds.append(Hold(each.job_id, Reason.NO_SUCH_SLICE))
        elif held.get(tenant, 0) + given[tenant] >= snapshot.tenant_gpu_quota.get(tenant, math.inf):
            holds.append(Hold(each.job_id, Reason.TENANT_QUOTA))
        elif not fits:
            holds.append(Hold(each.job_id, Reason.NOT_ENOUGH_FREE_SLICES))
        else:
            at = min(fits, key=lambda at: (-used[units[at].node, units[at].gpu], units[at].node, units[at].device))
            free[at] = False
            used[units[at].node, units[at].gpu] += 1
            given[tenant] += 1
            share = NodeShare(snapshot.nodes.ids[units[at].node], (units[at].device,))
            starts.append(Start(each.job_id, Placement((share,)), Reason.IN_ORDER))
    return with_holds(snapshot, (*starts, *holds)), _without(snapshot, given)


def _without(snapshot: Snapshot, given: Mapping[str, int]) -> Snapshot:
    jobs = snapshot.jobs
    stays = np.ones(len(jobs), dtype=np.bool_)
    stays[[jobs.index[each.job_id] for each in snapshot.slice_jobs]] = False
    return replace(snapshot, jobs=jobs.rows(stays), slice_jobs=(), **snapshot.less(given))
