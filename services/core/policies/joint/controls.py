"""Power limits with the least cost."""

from typing import Any

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.control_curves import ControlCurve
from services.core.policies.joint.worth import Worth
from services.core.policies.limits import LIMIT


def least_cost_at(
    curve: ControlCurve,
    gpus: int | Ints,
    host_w: float,
    hour_w: float | Floats,
    lost_w: float | Floats = 0.0,
    lead: float | Floats = np.inf,
) -> Ints:
    """Return the position of the limit with the least ``(P + w / c) / speed``; ties go to the highest.

    Args:
        gpus: Size of the gang; this and all below may be columns, (n_gangs, 1).
        hour_w: What time is worth, as power; see ``worth``.
        lost_w: The additional worth of time beyond what the gang that the user asked for would take.
        lead: Its speed at the default limit relative to that of the gang asked for.
    """
    costs = (
        (curve.power_w + host_w) * gpus + hour_w + lost_w * np.maximum(1.0 - lead * curve.speed, 0.0)
    ) / curve.speed
    return curve.speed.size - 1 - costs[..., ::-1].argmin(axis=-1)


def limit_at(
    worth: Worth, job: int | Ints, curve: ControlCurve, gpus: int | Ints, host_w: float, crowd: float = 1.0
) -> Ints:
    """Return the position of a gang's least-cost limit; ``crowd`` multiplies what its time is worth.

    For several gangs at once, pass columns of jobs and sizes, (n_gangs, 1).
    """
    full_w: Any = (curve.at(None)[1] + host_w) * gpus
    hour_w = crowd * worth.gang_w(job, full_w)
    return least_cost_at(curve, gpus, host_w, hour_w, *worth.lost(job, gpus, hour_w))


def slowdowns(snapshot: Snapshot, models: Ints, gpus: Ints, hosts_w: Floats, worth: Worth) -> Floats:
    """Return the speed of all jobs under their least-cost limits, as a share of that at the default: (n_jobs,).

    1 where nothing is known. ``models`` and ``gpus`` are (n_jobs,): indices of GPU models, and sizes.
    """
    factors = np.ones(models.size)
    kind = snapshot.jobs.control_curve * len(snapshot.gpu_models) + models
    order = kind.argsort(kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1) if order.size else ():
        model = models.item(rows[0])
        curve = snapshot.control_curve(rows.item(0), model, LIMIT)
        if curve is not None:
            at = limit_at(worth, rows[:, None], curve, gpus[rows, None], hosts_w.item(model))
            factors[rows] = curve.speed[at]
    return factors


def present_slowdowns(snapshot: Snapshot, models: Ints) -> Floats:
    """Return the speed of all jobs under their present limits, as a share of that at the default: (n_jobs,)."""
    limits_w = snapshot.jobs.power_limit_w
    factors = np.ones(limits_w.size)
    for job in np.flatnonzero(np.isfinite(limits_w)).tolist():
        curve = snapshot.control_curve(job, int(models[job]), LIMIT)
        if curve is not None:
            factors[job] = curve.at(float(limits_w[job]))[0]
    return factors
