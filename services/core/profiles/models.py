"""The two fitted models: step times and energies by configuration, with the uncertainty of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.profiles.judging import Quality
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, Times, energy_j, times


@dataclass(frozen=True)
class _Model:
    axis: ControlKind
    covariance: Floats  #: (p, p) of the parameters, in their order
    quality: Quality
    fixed: Mapping[str, str]  #: For each parameter that was not fitted, why


@dataclass(frozen=True)
class ThroughputModel(_Model):
    """A fitted throughput model; its parameters are numbers."""

    parameters: ThroughputParameters

    def times(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> Times:
        """Return the parts of a step in a configuration; arguments broadcast."""
        return times(self.parameters, gpus, local_batch, control, nodes)


@dataclass(frozen=True)
class EnergyModel(_Model):
    """A fitted energy model, and the throughput model whose times it multiplies."""

    parameters: EnergyParameters
    throughput: ThroughputModel

    def energy_j(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> Any:
        """Return the energy of all the gang's GPUs in one step, J; arguments broadcast."""
        step = self.throughput.times(gpus, local_batch, control, nodes)
        return energy_j(self.parameters, step, gpus, local_batch, control)
