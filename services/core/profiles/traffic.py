"""Predicted demand: the peak rate of each request class in each of the next six five-minute steps.

A request log becomes counts per class and 5-second window; a step's *peak* is its fullest window's rate. A *forecaster*
learns from the past and predicts the peaks of the next half hour. ``backtest`` evaluates it at many moments of the
past, each time with only what was known then, and ``choose`` takes the forecaster that would have done best: for
pools, by the cost of shortage and spare capacity (``ServiceLevel``).
Forecasters that need scikit-learn are in ``services.learning``; the two here need neither.

>>> log = Traffic(np.array([[0.4, 0.0], [0.0, 0.2]]))
>>> LastPeak().fit(log).forecast(log)[0].tolist()
[0.0, 0.2]

Source: FREESH appendix D.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.serving import LEAST_SERVICE, MOST_SERVICE, SERVICE, STEPS_AHEAD, WINDOW_S

WINDOWS = 60  #: Windows in a step
DAY_STEPS = 288
HEAD_ROOM = 1.1  #: Pools are planned for this many times the predicted peak


@dataclass(frozen=True)
class Traffic:
    """Past requests in whole steps, the latest last."""

    peaks_qps: Floats  #: (n_steps, n_classes) rate of each step's fullest window
    counts: Ints | None = None
    """(n_steps, WINDOWS, n_classes) requests in each window; None where only the peaks are known."""

    def __post_init__(self) -> None:
        if self.peaks_qps.ndim != 2 or not self.peaks_qps.shape[1]:
            raise DomainError(f"peaks are of (n_steps, n_classes), not {self.peaks_qps.shape}")
        if not np.all(np.isfinite(self.peaks_qps) & (self.peaks_qps >= 0)):
            raise DomainError("peaks are finite and not negative")
        steps, classes = self.peaks_qps.shape
        if self.counts is not None and self.counts.shape != (steps, WINDOWS, classes):
            raise DomainError(f"counts are of {(steps, WINDOWS, classes)}, not {self.counts.shape}")

    def __len__(self) -> int:
        return len(self.peaks_qps)

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        return self.peaks_qps.shape[1]

    @classmethod
    def of_windows(cls, counts: Ints) -> Traffic:
        """Return the traffic of requests counted in 5-second windows, in whole steps that end where the counts end.

        Forecasts thus begin where the last window ends; the oldest windows, less than a step, are ignored.

        Args:
            counts: (n_windows, n_classes), the latest last; a window without requests is a row of zeros.

        Raises:
            DomainError: counts of the wrong shape, negative, or not whole numbers.
        """
        if counts.ndim != 2 or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
            raise DomainError(
                f"windows are of (n_windows, n_classes) whole numbers >= 0, not {counts.shape} {counts.dtype}"
            )
        steps = counts[len(counts) % WINDOWS :].astype(np.int64).reshape(-1, WINDOWS, counts.shape[1])
        return cls(steps.max(axis=1) / WINDOW_S, steps)

    def until(self, step: int) -> Traffic:
        """Return the traffic before the given step."""
        return Traffic(self.peaks_qps[:step], None if self.counts is None else self.counts[:step])

    def since(self, step: int) -> Traffic:
        return Traffic(self.peaks_qps[step:], None if self.counts is None else self.counts[step:])


class Model(Protocol):
    """A fitted forecaster."""

    def forecast(self, history: Traffic) -> Floats:
        """Return the peaks of the steps that follow a history: (STEPS_AHEAD, n_classes) queries per second, >= 0."""
        ...


class Forecaster(Protocol):
    """A way to learn from a history."""

    @property
    def name(self) -> str: ...

    def steps_needed(self, history: Traffic) -> int | str:
        """Return the fewest steps that ``fit`` requires, or why it can learn nothing from such a history."""
        ...

    def fit(self, history: Traffic) -> Model:
        """Return the model fitted to a history that has at least that many steps."""
        ...


@dataclass(frozen=True)
class LastPeak:
    """Predicts that every step of the next half hour peaks as the last step did."""

    name: str = "last peak"

    def steps_needed(self, history: Traffic) -> int:
        del history
        return 1

    def fit(self, history: Traffic) -> LastPeak:
        del history
        return self

    def forecast(self, history: Traffic) -> Floats:
        return np.repeat(history.peaks_qps[-1:], STEPS_AHEAD, axis=0)


@dataclass(frozen=True)
class SeasonalNaive(LastPeak):
    """Predicts each step's peak of the day before, or the last step's if the history is shorter."""

    name: str = "seasonal naive"

    def forecast(self, history: Traffic) -> Floats:
        at = len(history) - DAY_STEPS + np.arange(STEPS_AHEAD)
        return history.peaks_qps[np.where(at >= 0, at, len(history) - 1)]


@dataclass(frozen=True)
class Backtest:
    """What a forecaster would have predicted, and what actually came."""

    name: str  #: The forecaster's name
    origins: Ints  #: (n_origins,) the first step that was not known at each moment
    forecast_qps: Floats  #: (n_origins, STEPS_AHEAD, n_classes) the predicted peaks
    actual_qps: Floats  #: What came, in the same shape; NaN after the end of history

    @property
    def mae_qps(self) -> Floats:
        """(n_classes,) mean absolute error over all origins and steps ahead."""
        return np.nanmean(np.abs(self.forecast_qps - self.actual_qps), axis=(0, 1))

    def under_share(self, head_room: float = HEAD_ROOM) -> Floats:
        """Return the share of steps whose peak exceeds ``head_room`` times the forecast; (n_classes,)."""
        known = ~np.isnan(self.actual_qps)
        return (self.actual_qps > head_room * self.forecast_qps).sum(axis=(0, 1)) / known.sum(axis=(0, 1))

    def newsvendor_qps(self, service: float, head_room: float = HEAD_ROOM) -> Floats:
        """Return the mean of ``service`` x the shortage + (1 - ``service``) x the spare capacity; (n_classes,).

        It is least when ``head_room`` times the forecast is the ``service`` quantile of the peak: the newsvendor's
        cost (Arrow, Harris, Marschak 1951), also called the pinball loss.
        """
        gap = self.actual_qps - head_room * self.forecast_qps
        return np.nanmean(np.maximum(service * gap, (service - 1.0) * gap), axis=(0, 1))


def backtest(history: Traffic, forecaster: Forecaster, origins: Sequence[int], *, refit_steps: int = 12) -> Backtest:
    """Return what a forecaster would have predicted at past moments, each time from what was known before it.

    Args:
        forecaster: Fitted at the first origin, and again once ``refit_steps`` have gone by.
        origins: Ascending; each is the first step not known, at least the number of steps that the forecaster needs and
            less than the length of the history.
        refit_steps: How many steps a fit is used for.

    Raises:
        DomainError: an origin at which the forecaster cannot be fitted, or after which nothing is known.
    """
    needed = forecaster.steps_needed(history)
    if isinstance(needed, str):
        raise DomainError(f"{forecaster.name}: {needed}")
    if not origins or min(origins) < needed or max(origins) >= len(history):
        raise DomainError(f"{forecaster.name} needs {needed} steps before an origin and one after it")
    model, fitted = forecaster.fit(history.until(origins[0])), origins[0]
    predicted: list[Floats] = []
    for origin in origins:
        known = history.until(origin)
        if origin - fitted >= refit_steps:
            model, fitted = forecaster.fit(known), origin
        predicted.append(model.forecast(known))
    ahead = np.full((STEPS_AHEAD, history.n_classes), np.nan)
    padded = np.concatenate([history.peaks_qps, ahead])
    actual = np.stack([padded[origin : origin + STEPS_AHEAD] for origin in origins])
    return Backtest(forecaster.name, np.asarray(origins, dtype=np.int64), np.stack(predicted), actual)


ROUNDING = 1e-12
"""Peaks are whole requests, so that capacity and peak often are the same number but for its last digit."""


@dataclass(frozen=True)
class ServiceLevel:
    """Chooses by the combined cost of shortage and spare capacity, so that capacity is seldom short, with little spare.

    Half of all peaks exceed a median forecast, and a head-room of a tenth covers few of them. So this says in which
    share of the steps capacity should suffice; each forecaster gets a *margin* learned from its own past errors, and
    one query per second too few costs as much as many too many.

    >>> ServiceLevel(0.95).moments_needed
    24

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

    def ready(self, model: Model, score: Backtest) -> Model:
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


@dataclass(frozen=True)
class Choice:
    """The forecaster that did best, fitted to all of a history, and why it was chosen."""

    method: str  #: The forecaster that was chosen
    model: Model  #: What it forecasts is, transposed, the ``demand_qps`` of a pool problem
    scores: tuple[Backtest, ...]
    """Backtests of all that were compared, over the same origins, as the criterion replayed them."""
    left_out: dict[str, str]  #: Why each of the others was not compared, by name


def choose(
    history: Traffic,
    forecasters: Sequence[Forecaster],
    criterion: ServiceLevel,
    *,
    least_origins: int = 24,
    most_origins: int | None = None,
    latest_steps: int | None = None,
    refit_steps: int = 12,
) -> Choice:
    """Return the forecaster that costs least by the criterion; ties go to the first.

    All are evaluated at the same moments: every step from where the most demanding can be fitted, and from a fifth of
    the history on. A forecaster that leaves fewer than ``least_origins`` moments for comparison is left out.

    Args:
        forecasters: The simpler ones first.
        least_origins: Two hours by default: with too few moments the choice is left to chance.
        most_origins: The most moments at which to compare, evenly spaced; None for every step.
        latest_steps: The number of latest steps within which to compare; None for no such bound.
        refit_steps: As in ``backtest``.

    Raises:
        DomainError: no forecaster can be compared on this history.
    """
    able: list[Forecaster] = []
    left_out: dict[str, str] = {}
    first = max(len(history) // 5, len(history) - (latest_steps or len(history)))
    for each in forecasters:
        needed = each.steps_needed(history)
        if isinstance(needed, str):
            left_out[each.name] = needed
            continue
        least = needed + criterion.moments_needed + least_origins
        if least > len(history):
            left_out[each.name] = f"needs {least} steps of history, which has {len(history)}"
        else:
            able.append(each)
            first = max(first, needed)
    if not able:
        raise DomainError("no forecaster can be compared: " + "; ".join(f"{k} {v}" for k, v in left_out.items()))
    every = 1 if most_origins is None else -(-(len(history) - first) // most_origins)
    origins = range(first, len(history), every)
    raw = [backtest(history, each, origins, refit_steps=refit_steps) for each in able]
    scores = tuple(criterion.replayed(score) for score in raw)
    best = int(np.argmin([criterion.cost_qps(score) for score in scores]))
    return Choice(able[best].name, criterion.ready(able[best].fit(history), raw[best]), scores, left_out)
