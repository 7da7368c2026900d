"""The profile of one job: what its prior says of it, and the model fitted from there to what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.profiles.boards import board_of
from services.core.profiles.capped import NAMES as CAPPED
from services.core.profiles.capped import CappedModel, fit_capped
from services.core.profiles.learn import fit_energy, fit_throughput
from services.core.profiles.models import EnergyModel, Quality, ThroughputModel, where_of
from services.core.profiles.observations import Observations
from services.core.profiles.priors import believed_capped, believed_draw, believed_speed, family_of
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters

JobModel = EnergyModel | CappedModel  #: By clock, or by power limit
TIMES = frozenset(ThroughputParameters._fields) - {"gamma1", "gamma2"}
"""The parameters that all grow with the length of a step."""
DYNAMIC_W = frozenset({"alpha_w", "beta_w", "sync_w"})


@dataclass(frozen=True)
class JobProfile:
    """What is believed of one job; ``observe`` returns what points make of it."""

    gpu_model: str  #: Model of the boards it runs on
    family: str  #: Family of the model it trains: a name in ``priors.FAMILIES``
    model: JobModel  #: Its predictions; from the prior alone if no point was seen

    @classmethod
    def of(cls, gpu_model: str, family: str, axis: ControlKind) -> JobProfile:
        """Return the profile of a job that has not run; ``DomainError`` if there is no such family."""
        board, kind = board_of(gpu_model), family_of(family)
        unseen = Quality(0, 0, 0)
        why: Mapping[str, str] = {"all": "nothing was seen yet"}
        if axis is ControlKind.POWER_LIMIT:
            vector = believed_capped(board, kind)
            return cls(gpu_model, family, CappedModel(vector, np.zeros((21, 21)), unseen, unseen, why))
        speed = believed_speed(board, kind, top=board.top_mhz)
        times = ThroughputModel(axis, np.zeros((15, 15)), unseen, why, speed)
        draw = EnergyModel(axis, np.zeros((21, 21)), unseen, why, believed_draw(board, kind), times)
        return cls(gpu_model, family, draw)

    def foreseen(self, gpus: Any, local_batch: Any, control: Any, nodes: Any) -> tuple[Any, Any]:
        """Return the predicted step time, s, and energy, J, in a configuration; arguments broadcast."""
        if isinstance(self.model, CappedModel):
            return self.model.step_and_energy(gpus, local_batch, control, nodes)
        step = self.model.throughput.times(gpus, local_batch, control, nodes)
        return step.iter_s, self.model.energy_j(gpus, local_batch, control, nodes)

    def observe(self, points: Observations) -> JobProfile:
        """Return the profile fitted from its prior to all points of the job.

        Raises:
            DomainError: the points are of the other axis, or inconsistent with the others; ``PointError`` names a row.
        """
        axis = self.model.axis
        if points.axis is not axis:
            raise DomainError(f"the job is known by {axis.value}, and these points are by {points.axis.value}")
        return replace(self, model=self._fitted(points)) if len(points) else self

    def _fitted(self, points: Observations) -> JobModel:
        prior = JobProfile.of(self.gpu_model, self.family, self.model.axis)
        time_s, energy_j = prior.foreseen(*where_of(points))
        slower = _typical(points.seconds_per_iteration / time_s)
        drawn, hungrier = points.with_energy, 1.0
        if drawn.any():  # against what the prior would draw at the job's own times
            prior_w = energy_j / time_s / points.gpus
            hungrier = float(np.clip(_typical(points.power_w[drawn] / prior_w[drawn]), 0.2, 5))
        if isinstance(self.model, CappedModel) and isinstance(prior.model, CappedModel):
            if not drawn.all():
                raise DomainError("points under power limits need an energy")
            centre = prior.model.vector.copy()
            centre[[name in TIMES for name in CAPPED]] *= slower
            centre[[name in DYNAMIC_W for name in CAPPED]] *= hungrier
            return fit_capped(points, belief=centre)
        assert isinstance(self.model, EnergyModel)
        assert isinstance(prior.model, EnergyModel)
        parameters = prior.model.throughput.parameters._asdict()
        speed = np.array([slower * value if name in TIMES else value for name, value in parameters.items()])
        times = fit_throughput(points, belief=speed)
        scaled = [not name.startswith(("alpha", "theta", "beta", "f0")) for name in EnergyParameters._fields]
        draw = np.array(prior.model.parameters) * np.where(scaled, hungrier, 1.0)
        if not drawn.any():
            return replace(prior.model, parameters=EnergyParameters(*draw.tolist()), throughput=times)
        return fit_energy(points, times, belief=draw)


def _typical(ratio: Floats) -> float:
    return float(np.exp(np.median(np.log(ratio))))
