"""The two fitted models: step times and energies by configuration, with the uncertainty of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Self

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.profiles.judging import Quality
from services.core.profiles.residuals import Residuals
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, Times, energy_j, times


@dataclass(frozen=True)
class _Model:
    """What both models share. ``parameters`` are numbers; ``covariance`` is (p, p) in their order.

    ``fixed`` gives, for each term that was not fitted, the reason; ``residuals`` corrects what the form predicts, if
    requested.
    """

    axis: ControlKind
    covariance: Floats
    quality: Quality
    fixed: Mapping[str, str]
    residuals: Residuals | None = field(default=None, kw_only=True)

    def vector(self) -> Floats:
        """Return the parameters, (p,)."""
        raise NotImplementedError

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return predictions (k, n) of candidates (k, p) at (gpus, local_batch, control, nodes), (n,) each."""
        raise NotImplementedError

    def expected(self, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return what is predicted at (gpus, local_batch, control, nodes), (n,) each, with the correction: (n,)."""
        form = self.predict(self.vector()[None], points)[0]
        return form if self.residuals is None else form * self.residuals.factor(*points)

    def with_quality(self, quality: Quality) -> Self:
        """Return the same model with what is now known of the fit."""
        return replace(self, quality=quality)

    def with_residuals(self, residuals: Residuals | None) -> Self:
        """Return the same model with this correction."""
        return replace(self, residuals=residuals)

    def errors(self) -> dict[str, float]:
        """Return the standard error of each parameter; 0 for one that was not fitted."""
        names: Sequence[str] = getattr(self, "parameters")._fields  # noqa: B009
        return dict(zip(names, np.sqrt(np.maximum(np.diag(self.covariance), 0.0)).tolist(), strict=True))

    def interval(
        self, gpus: Any, local_batch: Any, control: Any, nodes: Any, confidence: float = 0.9
    ) -> tuple[Floats, Floats]:
        """Return the predicted bounds of a measurement, (n,) each.

        Relative errors are taken as normal, combining the parameters' uncertainty (to first order) with the noise about
        the fit. The bounds are wide where there are no points.
        """
        shaped = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, float)) for x in (gpus, local_batch, control, nodes))
        )
        points = (shaped[0], shaped[1], shaped[2], shaped[3])
        at = self.vector()
        moving = np.flatnonzero(np.diag(self.covariance) > 0)
        step = 1e-4 * np.sqrt(np.diag(self.covariance)[moving])
        moved = np.repeat(at[None], len(moving) + 1, axis=0)
        moved[np.arange(1, len(moving) + 1), moving] += step
        logs = np.log(np.maximum(self.predict(moved, points), 1e-300))
        slope = (logs[1:] - logs[0]) / step[:, None]
        variance = np.einsum("pn,pq,qn->n", slope, self.covariance[np.ix_(moving, moving)], slope)
        reach = NormalDist().inv_cdf((1 + confidence) / 2) * np.sqrt(variance + self.quality.noise**2)
        middle = np.exp(logs[0])
        if self.residuals is not None:
            middle = middle * self.residuals.factor(*points)
        return middle * np.exp(-reach), middle * np.exp(reach)


@dataclass(frozen=True)
class ThroughputModel(_Model):
    """A fitted throughput model."""

    parameters: ThroughputParameters

    def times(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> Times:
        """Return the parts of a step in a configuration; arguments broadcast."""
        return times(self.parameters, gpus, local_batch, control, nodes)

    def vector(self) -> Floats:
        """Return the parameters, (15,)."""
        return np.array(self.parameters, dtype=np.float64)

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return step times (k, n)."""
        return times(ThroughputParameters(*vectors.T[..., None]), *points).iter_s


@dataclass(frozen=True)
class EnergyModel(_Model):
    """A fitted energy model, and the throughput model whose times it multiplies."""

    parameters: EnergyParameters
    throughput: ThroughputModel

    def energy_j(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> Any:
        """Return the energy of all the gang's GPUs in one step, J; arguments broadcast."""
        step = self.throughput.times(gpus, local_batch, control, nodes)
        return energy_j(self.parameters, step, gpus, local_batch, control)

    def vector(self) -> Floats:
        """Return the parameters, (21,)."""
        return np.array(self.parameters, dtype=np.float64)

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return energies (k, n)."""
        gpus, local_batch, control, nodes = points
        step = self.throughput.times(gpus, local_batch, control, nodes)
        return energy_j(EnergyParameters(*vectors.T[..., None]), step, gpus, local_batch, control)
