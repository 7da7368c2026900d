"""The power limit in force: eta, watts, and a curve by the hour.

Passive rounds stop no gang, so a limit that falls between two active rounds is already kept from the earlier one on:
what counts is the lowest limit until the next active round plus the grace period of the gangs it may stop.
"""

import math

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.orders import least_of as steps_least_of
from services.core.policies.powerflow.config import HOURS, PowerflowConfig

DAY_S = 86_400.0


def limit_w(snapshot: Snapshot, config: PowerflowConfig) -> float:
    """Return what the cluster may draw from now on besides service instances, watts; inf for no limit.

    ``eta * G * P_max`` if eta is below 1, as in eq. 19; at 1 eta sets no limit, since the hungriest jobs may exceed the
    mean. Services are left alone, so what they draw is subtracted.
    """
    limits = [math.inf if config.power_limit_w is None else config.power_limit_w]
    if config.eta < 1:
        limits.append(
            config.eta * float(snapshot.nodes.gpus.sum() + snapshot.services_gpus) * gpu_max_w(snapshot, config)
        )
    due_s = snapshot.next_active_s
    ahead_s = (due_s - snapshot.now_s if math.isfinite(due_s) else config.limit_ahead_s) + config.grace_s
    limits.append(least_of(config.power_limit_curve, snapshot.now_s, snapshot.now_s + ahead_s))
    return min(limits) - snapshot.services_w


def gpu_max_w(snapshot: Snapshot, config: PowerflowConfig) -> float:
    """Return P_max: the mean draw of a GPU in training at the default control value, including its host, watts."""
    if config.gpu_max_w is not None:
        return config.gpu_max_w
    draws = [
        float(table.power_w[0, -1] / table.gpus[0]) for gangs in snapshot.gangs for _, table in sorted(gangs.items())
    ]
    return float(np.mean(draws)) if draws else config.default_gpu_w


def least_of(curve: tuple[tuple[float, float], ...], begin_s: float, end_s: float) -> float:
    """Return the lowest limit of a step curve over ``begin_s <= t <= end_s``, watts; inf if none is in force.

    Times below 24 are hours of the day, UTC, and repeat; otherwise they are UTC seconds.
    """
    if not curve:
        return math.inf
    daily = all(when < HOURS for when, _ in curve)
    steps = list(curve)
    if daily:
        first = math.floor(begin_s / DAY_S) - 1
        days = range(first, math.floor(end_s / DAY_S) + 1)
        steps = [(day * DAY_S + hour * 3600.0, watts) for day in days for hour, watts in curve]
    return steps_least_of(tuple(steps), begin_s, end_s)
