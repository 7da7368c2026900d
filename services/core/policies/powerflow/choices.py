"""What each job could have: its gang sizes and control values, with the speed and the draw of each.

Rows are jobs in order of precedence (users' priorities, then submission), which breaks every tie.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Choices:
    """Speed and power of jobs by gang size and control value."""

    gpus: Ints  #: (n_jobs, n_sizes) gang sizes, ascending along a row; 0 beyond a job's last size
    speed: Floats  #: (n_jobs, n_sizes, n_values) seconds of work done per second; 0 where the job has no such choice
    power_w: Floats
    """The same shape: the whole gang's draw with its share of the hosts, watts; above 0 where ``speed`` is."""

    def __post_init__(self) -> None:
        if self.gpus.ndim != 2 or self.speed.shape[:2] != self.gpus.shape or self.speed.shape != self.power_w.shape:
            raise DomainError(
                "choices need one size per job and level, and a speed and a power per control value of each"
            )
        runs = self.speed > 0
        if not (np.isfinite(self.speed).all() and (self.power_w[runs] > 0).all()):
            raise DomainError("speeds are finite, and whatever runs draws power")
        if bool((runs.any(axis=2) != (self.gpus > 0)).any()):
            raise DomainError("a gang size has at least one control value, and none beyond a job's last size")

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def sizes(self) -> Ints:
        """How many gang sizes each job has: (n_jobs,)."""
        return np.count_nonzero(self.gpus, axis=1)

    @cached_property
    def most_efficient(self) -> Ints:
        """The control value with the least energy per work at each size (f0 of Algorithm 1): (n_jobs, n_sizes)."""
        energy = np.divide(self.power_w, self.speed, out=np.full(self.speed.shape, np.inf), where=self.speed > 0)
        return energy.argmin(axis=2)

    def at(self, sizes: Ints) -> tuple[Floats, Floats]:
        """Return speed and power by control value at one size of each job: (n_jobs,) to (n_jobs, n_values) each."""
        rows = np.arange(len(self))
        return self.speed[rows, sizes], self.power_w[rows, sizes]
