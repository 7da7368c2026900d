"""Other accounts of what jobs draw of their hosts than a meter would give."""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.simulator.engine import EngineOptions


@dataclass(frozen=True)
class LabOptions(EngineOptions):
    """The engine's options, with two that charge hosts by job.

    Attributes:
        host_per_job_w: If given, what a job is charged for every node it runs on, watts, in place of its profile's
            host power per GPU; jobs that share a node are then each charged for it.
        host_per_job_once: Whether a job is charged ``host_per_job_w`` once, however many nodes it runs on: GREEN
            section 4.1 to the letter, ``P_job = P_gpu + P_cpu + P_static``. No meter would read this: a gang over four
            nodes keeps four hosts on.
    """

    host_per_job_w: float | None = None
    host_per_job_once: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_per_job_once and self.host_per_job_w is None:
            raise DomainError("host_per_job_once needs host_per_job_w: the watts that a job is charged")
        if not (self.host_per_job_w or 0.0) >= 0:
            raise DomainError("what a job is charged for its hosts is at least 0 W")

    def host_w(self, per_gpu_w: float, gpus: Ints, nodes: Ints) -> Floats:
        """Return what gangs are charged for their hosts, watts: (n,); arguments as for the engine's own."""
        if self.host_per_job_w is None:
            return super().host_w(per_gpu_w, gpus, nodes)
        charges = np.ones_like(nodes) if self.host_per_job_once else nodes
        return np.multiply(charges, self.host_per_job_w, dtype=np.float64)
