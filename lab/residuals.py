"""A correction of a fitted form for what it leaves over, where measured steps are like stairs. Ours, not PowerFlow's.

The correction is optional. A step time is not a smooth function of the batch: libraries choose a different kernel at
another size, and a collective a different algorithm at another gang. No form that grows with the batch follows that.
The correction multiplies the form's prediction by ``exp(g)``, with ``g`` a Gaussian process over the logarithms of the
configuration, conditioned on the logarithms of measured over predicted. Its kernel is exponential,
``exp(-sum |ln x - ln x'| / scale)``, which is as rough as stairs are; far from all points ``g`` goes to 0, and the
prediction to the form's.

Scales and noise are those with the least leave-one-out error. If that is hardly below the form's own error, as when
the residuals are noise, there is no correction.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 2.25 (prediction) and 5.10 to 5.12
(leave-one-out).
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats
from services.core.profiles.observations import Observations

COLUMNS = ("gpus", "local_batch", "control", "nodes")
LEAST_POINTS = 8  #: Fewer points leave nothing to choose scales by
MOST_TO_CHOOSE_BY = 200  #: Scales are chosen on at most this many points, evenly spread; the correction itself uses all
GANG_SCALES = (0.3, 1.0, 3.0)
BATCH_SCALES = (0.1, 0.3, 1.0, 3.0)
CONTROL_SCALES = (0.3, 1.0)
"""In natural logarithms: 0.1 is a tenth more, 1 is 2.7 times as much. Nodes have the scale of GPUs."""
NOISES = (0.03, 0.1, 0.3, 1.0)  #: Variance of a point's own disturbance, as a multiple of that of the process
WORTH_IT = 0.95  #: The share of the form's error that may be left for the correction to be used


@dataclass(frozen=True)
class Residuals:
    """A correction of a fitted form."""

    scales: Floats  #: (4,) length scales of ``gpus``, ``local_batch``, ``control`` and ``nodes``, in natural logarithms
    at: Floats  #: (n, 4) natural logarithms of the configurations it was learned from
    weight: Floats  #: (n,) weight of each of them

    def factor(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> Any:
        """Return the factor by which to multiply the form's prediction in a configuration; arguments broadcast."""
        columns = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in (gpus, local_batch, control, nodes)))
        where = np.log(np.stack([column.ravel() for column in columns], axis=1))
        return np.exp(_kernel(where, self.at, self.scales) @ self.weight).reshape(columns[0].shape)


def fit_residuals(points: Observations, predicted: Floats, observed: Floats) -> Residuals | None:
    """Return the correction of a form from its errors at these points; None if it would not predict better.

    Args:
        points: One per configuration, (n,).
        predicted: (n,) by the form.
        observed: (n,) measured values of what it predicts.
    """
    if len(points) < LEAST_POINTS:
        return None
    at = np.log(np.column_stack([getattr(points, name) for name in COLUMNS]))
    error = np.log(observed / predicted)
    spare = points.count.mean() / points.count
    chosen = np.unique(np.linspace(0, len(points) - 1, MOST_TO_CHOOSE_BY).round().astype(np.int64))
    some, some_error, some_spare = at[chosen], error[chosen], spare[chosen]
    varied = np.ptp(at, axis=0) > 0
    grid = (
        GANG_SCALES if varied[0] else GANG_SCALES[:1],
        BATCH_SCALES if varied[1] else BATCH_SCALES[:1],
        CONTROL_SCALES if varied[2] else CONTROL_SCALES[:1],
    )
    best_error, best_scales, best_noise = WORTH_IT * float(np.mean(np.abs(some_error))), None, 0.0
    for gang, batch, control in product(*grid):
        scales = np.array([gang, batch, control, gang])
        kernel = _kernel(some, some, scales)
        for noise in NOISES:
            inverse = np.linalg.inv(kernel + np.diag(noise * some_spare))
            left_out = float(np.mean(np.abs(inverse @ some_error / np.diag(inverse))))
            if left_out < best_error:
                best_error, best_scales, best_noise = left_out, scales, noise
    if best_scales is None:
        return None
    kernel = _kernel(at, at, best_scales) + np.diag(best_noise * spare)
    weight: Floats = np.linalg.solve(kernel, error).astype(np.float64)
    return Residuals(best_scales, at, weight)


def _kernel(where: Floats, at: Floats, scales: Floats) -> Floats:
    """Return the covariance of configurations (m, 4) with (n, 4): (m, n), 1 for identical ones."""
    distance = np.zeros((len(where), len(at)))
    for column, scale in enumerate(scales.tolist()):
        distance += np.abs(where[:, column, None] - at[None, :, column]) / scale
    return np.exp(-distance)
