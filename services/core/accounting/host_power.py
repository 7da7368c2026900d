"""What a host draws beside its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class CpuPowerModel:
    """CPU power as a piecewise linear function of utilisation, for hosts without a power meter.

    GREEN refers to a published model of this shape and prints no coefficients; two points, idle and peak, are the
    least it takes (``between``), and more can be measured per host.

    Attributes:
        utilisation: (k,) shares of all cores in use, from 0 to 1, strictly increasing, k >= 2.
        power_w: (k,) watts at those points, not decreasing.

    Source: GREEN section 4.1.
    """

    utilisation: tuple[float, ...]
    power_w: tuple[float, ...]

    def __post_init__(self) -> None:
        points, watts = np.array(self.utilisation), np.array(self.power_w)
        if points.shape != watts.shape or points.size < 2 or points[0] != 0.0 or points[-1] != 1.0:
            raise DomainError("a CPU power model needs one power per utilisation, from utilisation 0 to 1")
        if not (np.diff(points) > 0).all() or not (np.diff(watts) >= 0).all() or not watts[0] >= 0:
            raise DomainError("a CPU power model needs ascending utilisations and powers that do not fall")

    @classmethod
    def between(cls, idle_w: float, peak_w: float) -> CpuPowerModel:
        """Return the straight line from idle to peak watts."""
        return cls((0.0, 1.0), (idle_w, peak_w))

    def at(self, utilisation: float) -> float:
        """Return the power at a utilisation, watts; readings a little outside 0..1 count as the nearer end."""
        return float(np.interp(utilisation, self.utilisation, self.power_w))


def job_power_w(gpu_w: float, cpu_w: float, static_w: float) -> float:
    """Return ``P_job = P_gpu + P_cpu + P_static``, watts; of shared hosts, the job's share of each.

    Source: GREEN section 4.1.
    """
    return gpu_w + cpu_w + static_w
