"""What a control value costs: energy and time in one number.

Source: You et al., Zeus: Understanding and Optimizing GPU Energy Consumption of DNN Training, NSDI'23.
"""

from __future__ import annotations

from services.core.domain.arrays import Floats
from services.core.domain.control_curves import ControlCurve


def cost_per_work(curve: ControlCurve, eta: float) -> Floats:
    """Return what a unit of work costs at each control value: (n_values,) joules of one GPU at default speed.

    ``(eta * AvgPower(p) + (1 - eta) * MAXPOWER) / Throughput(p)``, where MAXPOWER is the highest power limit of the
    board: the highest value of the curve. Over a whole job that is ``eta * energy + (1 - eta) * MAXPOWER * time``.

    Args:
        curve: By power limit.
        eta: 1 counts energy alone, 0 time alone.

    Source: Zeus, equations 2 and 7.
    """
    return (eta * curve.power_w + (1.0 - eta) * curve.values[-1]) / curve.speed


def least_cost(curve: ControlCurve, eta: float) -> float | None:
    """Return the power limit of least cost, of equals the highest; None where that is the default."""
    costs = cost_per_work(curve, eta)[::-1]
    best = int(costs.argmin())
    return float(curve.values[::-1][best]) if best else None
