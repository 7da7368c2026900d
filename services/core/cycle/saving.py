"""What a stop costs a gang whose job tells when it saves its work (``Snapshot.saves``)."""

from collections import defaultdict
from typing import Any

import numpy as np

from services.core.cycle.snapshot import RUNNING, Snapshot
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId

LATE = 0.25  #: By how much a gang may be late with its next save, as a share of the interval or of the longest wait


def cost_of_stop(snapshot: Snapshot, job_id: JobId) -> tuple[float, float]:
    """Return what a stop of a gang loses of its run, and for how long it should wait for the next save, seconds.

    It waits, and loses nothing, if that save is due within ``Snapshot.save_wait_s``. Where nothing is known, and for
    gangs that do not run, both are 0.
    """
    jobs, saves = snapshot.jobs, snapshot.saves.get(job_id)
    if saves is None or (at := jobs.index.get(job_id)) is None or jobs.phase[at] != RUNNING:
        return 0.0, 0.0
    saved_s = max(saves.last_s, jobs.waiting_since_s.item(at))
    left_s, late_s = saved_s + saves.every_s - snapshot.now_s, LATE * min(saves.every_s, snapshot.save_wait_s)
    if -late_s < left_s <= snapshot.save_wait_s:
        return 0.0, left_s + late_s
    return snapshot.now_s - saved_s, 0.0


def dearest_first(snapshot: Snapshot, which: Ints, sizes: Ints, order: Ints, levels: Ints) -> Ints:
    """Return an order in which gangs that are alike change places: those whose stop costs most come first.

    Alike are running gangs of one level that keep their size, differ in nothing that decides what fits, and tell when
    they save. So as many of them go on as in the order given, and those that lose least are stopped.

    Args:
        which: (n,) indices of jobs. sizes: (n,) the sizes wanted. order: (n,) positions in both, best first. levels:
        (n,) the level of each; a policy holds jobs of one level equal but for their turn.
    """
    jobs, nodes = snapshot.jobs, snapshot.nodes
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    ranked: list[int] = order.tolist()
    for place, at in enumerate(ranked):
        job = int(which[at])
        job_id, placement = jobs.ids[job], jobs.placements[job]
        if job_id not in snapshot.saves or placement is None:
            continue
        node = nodes.index.get(placement.shares[0].node_id)
        if node is not None and jobs.phase[job] == RUNNING and jobs.preemptible[job] and sizes[at] == jobs.gpus[job]:
            size = sizes.item(at), jobs.min_gpus.item(job), jobs.max_gpus.item(job), jobs.step_gpus.item(job)
            where = nodes.gpu_model.item(node), jobs.eligible[job].tobytes()
            alike[levels.item(at), jobs.priority.item(job), jobs.tenants[job], size, where].append(place)
    changed = order.copy()
    for places in alike.values():
        costs = [(cost_of_stop(snapshot, jobs.ids[int(which[ranked[place]])]), place) for place in places]
        costs.sort(key=lambda cost: (-cost[0][0], -cost[0][1], cost[1]))
        changed[places] = order[np.array([place for _, place in costs])]
    return changed
