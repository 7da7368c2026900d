"""The two fitted models, step times and energies by configuration, and how far a fit can be trusted.

Models tell the uncertainty of their parameters, fits their error on their points and which points contradict others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.profiles.observations import Observations, PointError
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, Times, energy_j, times

MIN_CONFIGURATIONS = 3
WRONG_BY = 30.0
"""A point further from all others' model than this factor is in another unit, or of another job."""


@dataclass(frozen=True)
class Quality:
    """How far a fit can be trusted."""

    measurements: int  #: How many were given
    configurations: int  #: How many distinct ones they cover; each is one point of the fit
    free: int  #: How many parameters were fitted
    mape: float = float("nan")  #: Mean absolute percentage error on the points fitted, as a share


def mape(predicted: Floats, observed: Floats) -> float:
    """Return the mean absolute percentage error, as a share; NaN if there are no points.

    Source: PowerFlow, section 6.3.
    """
    return float(np.mean(np.abs(predicted / observed - 1.0))) if len(observed) else float("nan")


def refuse_strangers(predicted: Floats, measured: Floats, what: str) -> None:
    """Refuse points, (n,), that are off by more than a factor of ``WRONG_BY``; NaN means not measured.

    Raises:
        PointError: there is such a point; the error names its row.
    """
    error = np.nan_to_num(np.abs(np.log(predicted / measured)))
    if error.max() > np.log(WRONG_BY):
        row = int(np.argmax(error))
        factor = np.exp(error[row])
        raise PointError(
            row, f"{what} is {measured[row]:g}, {factor:.0f} times off what the other points say; wrong units?"
        )


def where_of(of: Observations) -> tuple[Floats, Floats, Floats, Floats]:
    """Return gpus, local batch, control and nodes, (n,) each."""
    return of.gpus, of.local_batch, of.control, of.nodes


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
