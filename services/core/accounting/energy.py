"""Energy from what devices report: power samples or a running counter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.errors import DomainError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Energy:
    """Energy over a window, and how much of the window was measured.

    Attributes:
        energy_j: Joules over the measured part.
        measured_s: Length of that part; the rest is unknown, and whoever fills it in marks the figure as estimated.
    """

    energy_j: float
    measured_s: float


def integrate_power(
    times_s: Floats, power_w: Floats, *, start_s: float, end_s: float, longest_gap_s: float = 90.0
) -> Energy:
    """Return the energy over ``[start_s, end_s)`` by the trapezoidal rule.

    Between samples power is taken to change linearly, so a window that begins or ends between two samples is cut there.
    Two samples further apart than ``longest_gap_s`` do not say what happened in between: that stretch is not measured.

    Args:
        times_s: (n,) UTC seconds, strictly increasing.
        power_w: (n,) finite watts, >= 0.
        start_s: Begin of the window, UTC seconds.
        end_s: End of the window, >= ``start_s``.
        longest_gap_s: Three of GREEN's 30 s steps by default, so that one or two lost samples do not leave a hole.

    Raises:
        DomainError: the arrays or the window do not fit this description.
    """
    if times_s.shape != power_w.shape or times_s.ndim != 1 or not (np.diff(times_s) > 0).all():
        raise DomainError("samples need one power per time, at strictly increasing times")
    if not np.isfinite(power_w).all() or bool((power_w < 0).any()) or not end_s >= start_s:
        raise DomainError("samples need finite powers >= 0 and a window that does not end before it begins")
    begins, ends = np.clip(times_s[:-1], start_s, end_s), np.clip(times_s[1:], start_s, end_s)
    measured = np.diff(times_s) <= longest_gap_s
    lengths_s = np.where(measured, ends - begins, 0.0)
    if not lengths_s.any():
        return Energy(0.0, 0.0)
    means_w = (np.interp(begins, times_s, power_w) + np.interp(ends, times_s, power_w)) / 2.0
    return Energy(float(means_w @ lengths_s), float(lengths_s.sum()))


def counter_energy_j(readings_j: Floats) -> float:
    """Return the energy between the first and the last reading of a counter that only ever grows, joules.

    A counter that falls was reset (a driver reload, a new host); what it shows since then is counted, what it lost is
    not.

    Args:
        readings_j: (n,) readings in order of time; fewer than two give 0.

    Raises:
        DomainError: a reading is negative or not finite.
    """
    if not np.isfinite(readings_j).all() or bool((readings_j < 0).any()):
        raise DomainError("an energy counter reads finite joules >= 0")
    steps = np.diff(readings_j)
    return float(np.where(steps >= 0, steps, readings_j[1:]).sum())


def idle_energy_j(devices_j: float, jobs_j: float) -> float:
    """Return what the devices spent on nobody: the devices' energy less the jobs'.

    Raises:
        DomainError: the jobs are said to have used more than their devices, beyond one part in a thousand.
    """
    if jobs_j > devices_j * 1.001:
        raise DomainError(f"jobs account for {jobs_j:.1f} J of the {devices_j:.1f} J their devices used")
    return max(devices_j - jobs_j, 0.0)


def idle_share(idle: float, total: float) -> float:
    """Return idle / total of two amounts in the same unit (joules, or GPU seconds); 0 where the total is 0."""
    return idle / total if total else 0.0
