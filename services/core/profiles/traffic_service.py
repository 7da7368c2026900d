"""Forecasts of traffic for capacity: seldom short, with little to spare.

Half of all peaks exceed a median forecast, and a head-room of a tenth covers few of them. ``ServiceLevel`` says instead
in which share of the steps capacity should suffice. Each forecaster gets a *margin* learned from its own past errors,
and the one whose capacity would have cost least is chosen, by a cost in which one query per second too few weighs
as much as many too many.

>>> ServiceLevel(0.95).moments_needed
24
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.serving import LEAST_SERVICE, MOST_SERVICE, SERVICE, STEPS_AHEAD
from services.core.profiles.traffic import HEAD_ROOM, Backtest, Model, Traffic

ROUNDING = 1e-12
"""Peaks are whole requests, so that capacity and peak often are the same number but for its last digit."""


@dataclass(frozen=True)
class ServiceLevel:
    """Chooses by the combined cost of shortage and spare capacity.

    Capacity is ``head_room`` times the forecast, or more if that was short too often: the root of capacity is raised by
    the quantile of (root of peak - root of capacity) over past moments, for each class and step ahead. Roots are used
    because the noise of counts grows with the root of their mean, and because they also raise a forecast of 0. The
    quantile is the split conformal one, of rank ceil((n + 1) x service) among n. A margin is never negative: it does
    not reduce the head-room that was asked for.
    """

    service: float = SERVICE  #: Share of the steps in which capacity should suffice, for each class separately
    head_room: float = HEAD_ROOM  #: Pools are planned for this many times the forecast

    def __post_init__(self) -> None:
        if not LEAST_SERVICE <= self.service <= MOST_SERVICE:
            raise DomainError(f"a service level lies between {LEAST_SERVICE} and {MOST_SERVICE}, not at {self.service}")
        if not 0 < self.head_room < math.inf:
            raise DomainError(f"head-room is above 0, not {self.head_room}")

    @property
    def errors_needed(self) -> int:
        """The smallest number of errors whose maximum is exceeded rarely enough."""
        return math.ceil(self.service / (1.0 - self.service) - 1e-9)

    @property
    def moments_needed(self) -> int:
        """Those errors, plus the steps until the furthest step of a forecast is known."""
        return self.errors_needed + STEPS_AHEAD - 1

    def replayed(self, score: Backtest) -> Backtest:
        """Return the forecasts with the margins that were known at each moment, without moments too early to have one.

        Raises:
            DomainError: no moment is late enough.
        """
        misses = self._misses(score)
        came = score.origins[:, None] + np.arange(STEPS_AHEAD) + 1  # the first moment at which a step's peak is known
        kept: list[int] = []
        raised: list[Floats] = []
        for at, origin in enumerate(score.origins.tolist()):
            known = came <= origin
            if known.sum(axis=0).min() >= self.errors_needed:
                kept.append(at)
                raised.append(
                    self.raised(score.forecast_qps[at], self._margin(np.where(known[..., None], misses, np.nan)))
                )
        if not kept:
            raise DomainError(
                f"{score.name}: {len(score.origins)} moments are too few for a service level of {self.service}"
            )
        return Backtest(score.name, score.origins[kept], np.stack(raised), score.actual_qps[kept])

    def cost_qps(self, score: Backtest) -> float:
        """Return the newsvendor's cost, summed over classes."""
        return float(score.newsvendor_qps(self.service, self.head_room).sum())

    def ready(self, model: Model, score: Backtest) -> Raised:
        """Return the model with the margin from all errors known by now."""
        return Raised(model, self, self._margin(self._misses(score)))

    def _misses(self, score: Backtest) -> Floats:
        """Return how far the root of each peak exceeded the root of capacity; (n_origins, STEPS_AHEAD, n_classes)."""
        return np.sqrt(score.actual_qps) - np.sqrt(self.head_room * score.forecast_qps)

    def _margin(self, misses: Floats) -> Floats:
        """Return the margin required by past misses (NaN where not known): (STEPS_AHEAD, n_classes), roots of qps."""
        known = (~np.isnan(misses)).sum(axis=0)
        rank = np.minimum(np.ceil((known + 1) * self.service - 1e-9).astype(np.int64), known)
        ascending = np.sort(misses, axis=0)  # NaN come last
        return np.maximum(np.take_along_axis(ascending, rank[None] - 1, axis=0)[0], 0.0)

    def raised(self, forecast_qps: Floats, margin: Floats) -> Floats:
        """Return forecasts raised by a margin; both (STEPS_AHEAD, n_classes)."""
        capacity = np.square(np.sqrt(self.head_room * forecast_qps) + margin)
        return capacity * (1.0 + ROUNDING) / self.head_room


@dataclass(frozen=True)
class Raised:
    """A model and the margin added to its forecasts; (STEPS_AHEAD, n_classes)."""

    model: Model
    service: ServiceLevel
    margin: Floats

    def forecast(self, history: Traffic) -> Floats:
        """Return the peaks to plan for: (STEPS_AHEAD, n_classes) queries per second."""
        return self.service.raised(self.model.forecast(history), self.margin)
