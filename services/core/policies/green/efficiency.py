"""GREEN's energy efficiency optimizer: how far a job's efficiency may fall before it stops growing.

Source: GREEN section 5.1.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.ids import JobId

LEAST_DEGRADATION = 1e-9  #: Below this a job makes no progress at all; the floor keeps priorities finite


class BeforeGrowth(NamedTuple):
    """A job's state when it last grew; ``energy_j`` and ``gpu_s``: the energy and GPU time it had used by then."""

    gpus: int  #: Its size before that step
    efficiency: float  #: Progress per joule at that size
    power_w: float  #: What it drew at that size, including hosts
    energy_j: float
    gpu_s: float


def degradation(efficiency_base: Floats, efficiency_now: Floats) -> Floats:
    """Return ``DEGRADATION = EFFICIENCY(now) / EFFICIENCY(t0)``, NaN where either is unobserved.

    1 means that the present gang makes as much progress per joule as the minimum gang did.

    Args:
        efficiency_base: (n_jobs,) progress per joule at the minimum gang.
        efficiency_now: (n_jobs,) progress per joule at the present gang.

    Returns:
        (n_jobs,) values >= ``LEAST_DEGRADATION``, or NaN.

    Source: GREEN, equation 4.
    """
    known = (efficiency_base > 0) & (efficiency_now >= 0)
    ratio = np.divide(efficiency_now, efficiency_base, out=np.full(efficiency_now.shape, np.nan), where=known)
    return np.maximum(ratio, LEAST_DEGRADATION)


def gamma_at(occupancy: float, gamma_empty: float, gamma_full: float) -> float:
    """Return the lowest degradation at which jobs still scale out.

    Our reading: the paper adapts gamma to the cluster's occupancy and to the job but prints no formula; here it rises
    linearly with occupancy between two configured ends and is the same for every job. Shown by
    ``tests/unit/core/test_green_scaling.py::test_a_full_cluster_asks_for_more_efficiency``.

    Args:
        occupancy: Share of the cluster's GPUs that are held, 0..1.
    """
    return gamma_empty + (gamma_full - gamma_empty) * occupancy


def occupancy_of(snapshot: Snapshot) -> float:
    """Return the share of schedulable GPUs that are held; 1 where there are none."""
    nodes = snapshot.nodes
    total = snapshot.total_gpus
    if not total:
        return 1.0
    return 1.0 - float(nodes.free_gpus[nodes.schedulable].sum()) / total


def largest_gang(min_gpus: Ints, max_gpus: Ints, job_cap_gpus: int) -> Ints:
    """Return the size beyond which each job never scales out: (n_jobs,).

    Our reading: the paper caps every job so that one that scales well does not take the whole cluster, but prints no
    value; here it is a single number of GPUs, raised to the minimum gang of wider jobs. Shown by
    ``tests/unit/core/test_green_scaling.py::test_no_job_grows_beyond_its_cap``.
    """
    return np.minimum(max_gpus, np.maximum(min_gpus, job_cap_gpus))


def last_step(snapshot: Snapshot, present: Ints, grown: Mapping[JobId, BeforeGrowth], *, marginal: bool) -> Floats:
    """Return the effect of each job's last step on its efficiency, NaN where unobserved, 1 where there was none.

    With ``EFF`` progress per joule and ``P`` watts at the sizes before (b) and now (n): ``EFF_n / EFF_b``, or, if
    ``marginal``, the efficiency of the added watts relative to the smallest gang's,

        (EFF_n * P_n - EFF_b * P_b) / (P_n - P_b) / EFFICIENCY(t0)

    A step that added no watts counts as one that lost nothing.

    Args:
        present: (n_jobs,) the size each job has.

    Returns:
        (n_jobs,) values >= ``LEAST_DEGRADATION``, or NaN.
    """
    jobs = snapshot.jobs
    known = (jobs.efficiency_base > 0) & (jobs.efficiency_now >= 0)
    ratio = np.where(known, 1.0, np.nan)
    for job in np.flatnonzero(known).tolist():
        before = grown.get(jobs.ids[job])
        if before is None or before.gpus == present[job]:
            continue
        now = float(jobs.efficiency_now[job])
        ratio[job] = now / before.efficiency
        gpu_s = float(jobs.attained_gpu_s[job]) - before.gpu_s
        if marginal and gpu_s > 0:
            power_w = (float(jobs.energy_j[job]) - before.energy_j) / gpu_s * float(present[job])
            added_w = power_w - before.power_w
            gained = now * power_w - before.efficiency * before.power_w
            ratio[job] = gained / added_w / float(jobs.efficiency_base[job]) if added_w > 0 else 1.0
    return np.maximum(ratio, LEAST_DEGRADATION)
