"""Power limits of least cost."""

from __future__ import annotations

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.control_curves import ControlCurve
from services.core.policies.limits import LIMIT


def least_cost_at(curve: ControlCurve, gpus: int, host_w: float, hour_w: float) -> int:
    """Return the position of the limit of least ``(P + w / c) / speed``, of equals the highest.

    Args:
        curve: By power limit.
        gpus: Of the gang.
        host_w: Of the host per busy GPU.
        hour_w: ``worth.hour_w``.
    """
    costs = ((curve.power_w + host_w) * gpus + hour_w) / curve.speed
    return int(costs.size - 1 - costs[::-1].argmin())


def slowdowns(snapshot: Snapshot, which: Ints, models: Ints, gpus: Ints, host_w: float, hour_w: Floats) -> Floats:
    """Return the speed of these jobs under their limit of least cost, as a share of that at the default: (n_jobs,).

    1 where nothing is known. Args are columns (n_jobs,): GPU models by index, sizes, ``worth.hour_w``.
    """
    factors = np.ones(which.size)
    for row, job in enumerate(which.tolist()):
        curve = snapshot.control_curve(job, int(models[row]), LIMIT)
        if curve is not None:
            factors[row] = curve.speed[least_cost_at(curve, int(gpus[row]), host_w, float(hour_w[row]))]
    return factors


def present_slowdowns(snapshot: Snapshot, models: Ints) -> Floats:
    """Return the speed of all jobs under the limit they have, as a share of that at the default: (n_jobs,)."""
    limits_w = snapshot.jobs.power_limit_w
    factors = np.ones(limits_w.size)
    for job in np.flatnonzero(np.isfinite(limits_w)).tolist():
        curve = snapshot.control_curve(job, int(models[job]), LIMIT)
        if curve is not None:
            factors[job] = curve.at(float(limits_w[job]))[0]
    return factors
