"""Many jobs over (gang sizes x controls) at once, for clusters made up of learned models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.profiles.capped import CappedModel, step_and_energy, unpacked
from services.core.profiles.profile import JobModel
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, energy_j, times

N_SPEED = len(ThroughputParameters._fields)
BLOCK = 65_536
"""Values evaluated at once: what fits a core's cache is done in half the time."""


@dataclass(frozen=True)
class Performance:
    """What every job would do at every size and control; arrays are (n_jobs, n_sizes, n_controls).

    Attributes:
        step_time_s: Seconds per iteration.
        energy_j: Of all the gang's GPUs, per iteration.
    """

    step_time_s: Floats
    energy_j: Floats

    @property
    def power_w(self) -> Floats:
        """Return the draw of each gang, W."""
        return self.energy_j / self.step_time_s


class PerformanceTable:
    """The models of many jobs as one matrix; jobs of one axis, of either form."""

    def __init__(self, models: Sequence[JobModel]) -> None:
        """Take the models, one per job.

        Raises:
            DomainError: Some are by clock and some by power limit.
        """
        axes = {model.axis for model in models}
        if len(axes) > 1:
            raise DomainError("jobs of one table are all by clock, or all by power limit")
        self._n_jobs = len(models)
        capped = np.array([isinstance(model, CappedModel) for model in models], dtype=np.bool_)
        self._groups: list[tuple[bool, NDArray[np.intp], Floats]] = []
        for form in (False, True):
            jobs = np.flatnonzero(capped == form)
            if jobs.size:
                self._groups.append((form, jobs, np.array([_vector(models[job]) for job in jobs.tolist()])))

    def evaluate(self, global_batch: Floats, gpus: Floats, controls: Floats, gpus_per_node: int) -> Performance:
        """Return step times and energies with the global batch kept, ``bs = BS / n`` (PowerFlow, section 4).

        Args:
            global_batch: (n_jobs,) samples per step.
            gpus: (n_sizes,) gang sizes.
            controls: (n_controls,) clocks, MHz, or power limits, W.
            gpus_per_node: A gang fills nodes of so many.
        """
        shape = (self._n_jobs, len(gpus), len(controls))
        time_s, energy = np.empty(shape), np.empty(shape)
        size = np.asarray(gpus, dtype=np.float64)[None, :, None]
        nodes, control = np.ceil(size / gpus_per_node), np.asarray(controls, dtype=np.float64)[None, None, :]
        block = max(1, BLOCK // max(shape[1] * shape[2], 1))
        for capped, jobs, vectors in self._groups:
            for begin in range(0, len(jobs), block):
                at = jobs[begin : begin + block]
                batch = np.asarray(global_batch, dtype=np.float64)[at, None, None] / size
                columns = vectors[begin : begin + block, None, None, :]
                if capped:
                    time_s[at], energy[at] = step_and_energy(unpacked(columns), size, batch, control, nodes)
                    continue
                own = np.moveaxis(columns, -1, 0)
                step = times(ThroughputParameters(*own[:N_SPEED]), size, batch, control, nodes)
                time_s[at] = step.iter_s
                energy[at] = energy_j(EnergyParameters(*own[N_SPEED:]), step, size, batch, control)
        return Performance(time_s, energy)


def _vector(model: JobModel) -> Floats:
    if isinstance(model, CappedModel):
        return model.vector
    return np.array([*model.throughput.parameters, *model.parameters], dtype=np.float64)
