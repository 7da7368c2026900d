"""What it takes to move a job's checkpoint from one zone to another."""

import math
from dataclasses import dataclass

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Transfer:
    """The price of one move; the gang that waits for its checkpoint holds its GPUs meanwhile."""

    checkpoint_gb: float = 10.0  #: Size of a checkpoint, GB: some 800 million parameters with their optimizer's state
    gbps: float = 1.0  #: Bandwidth between zones, Gb/s
    kwh_per_gb: float = 0.01
    """Energy of networks and storage, kWh per GB. Aslan et al. (J. Ind. Ecol. 22, 2018) have 0.06 for 2015, halved
    every two years; this is five times what follows for 2025."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.checkpoint_gb + self.kwh_per_gb) and min(self.checkpoint_gb, self.kwh_per_gb) >= 0):
            raise DomainError("a checkpoint's size and the energy of its transfer are at least 0")
        if not self.gbps > 0:
            raise DomainError("the bandwidth between zones is above 0")

    @property
    def seconds(self) -> float:
        return self.checkpoint_gb * 8.0 / self.gbps

    @property
    def energy_kwh(self) -> float:
        """What networks and storage use for it, without the GPUs that wait."""
        return self.checkpoint_gb * self.kwh_per_gb
