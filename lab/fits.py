"""Fits of PowerFlow's models and ours, with their errors on points left out and a correction of what the form leaves.

The product fits a form to all points and uses it (``services.core.profiles``); here it is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lab.residuals import Residuals, fit_residuals
from services.core.domain.arrays import Bools, Floats
from services.core.profiles.capped import MEASURED, CappedModel, capped_of, fit_capped
from services.core.profiles.fitting import noise_of
from services.core.profiles.learn import energy_of, enough, fit_energy, fit_throughput, times_of
from services.core.profiles.models import MIN_CONFIGURATIONS, EnergyModel, ThroughputModel, mape, where_of
from services.core.profiles.observations import COLUMN_OF, Observations

FOLDS = 10
FOLD_SEED = 20
TIME, ENERGY = MEASURED
Model = TypeVar("Model")


@dataclass(frozen=True)
class Judged:
    """The errors of one fit, as shares, and its correction, if one was requested and predicts better."""

    mape: float  #: Mean absolute percentage error on the points fitted
    held_out_mape: float
    """The same on configurations left out of the fit, each once, a tenth at a time; NaN with three points or fewer."""
    form_mape: float  #: The same of the form alone, without a correction
    noise: float  #: Spread of the relative error about the fit
    residuals: Residuals | None


def judged_throughput(points: Observations, *, residuals: bool = False) -> tuple[ThroughputModel, Judged]:
    """Fit step times as ``fit_throughput`` does, and judge the fit.

    Args:
        residuals: Whether to correct the form's residuals; held-out points are held out of that too.
    """
    model = fit_throughput(points)

    def predict(model: ThroughputModel, of: Observations) -> Floats:
        return model.times(*where_of(of)).iter_s[None]

    found = _judged(model, points, enough(points, None), (TIME,), times_of, predict, residuals, model.quality.free)
    return model, found[0]


def judged_energy(points: Observations, *, residuals: bool = False) -> tuple[EnergyModel, Judged]:
    """Fit energies as ``fit_energy`` does, and judge the fit; held-out points are held out of the times too."""
    model, known = fit_energy(points), points.take(points.with_energy)

    def predict(model: EnergyModel, of: Observations) -> Floats:
        return model.energy_j(*where_of(of))[None]

    found = _judged(model, points, enough(known, None), (ENERGY,), energy_of, predict, residuals, model.quality.free)
    return model, found[0]


def judged_capped(points: Observations, *, residuals: bool = False) -> tuple[CappedModel, Judged, Judged]:
    """Fit both as ``fit_capped`` does, and judge the fit of times and that of energies."""
    model = fit_capped(points)

    def predict(model: CappedModel, of: Observations) -> Floats:
        return np.stack(model.step_and_energy(*where_of(of)))

    free = model.time_quality.free
    time, energy = _judged(model, points, enough(points, None), MEASURED, capped_of, predict, residuals, free)
    return model, time, energy


def folds(n_points: int) -> list[Bools]:
    """Return masks (n_points,) that hold out each point once, a tenth at a time, or one at a time below ten points.

    The partition is drawn with a fixed seed, so that two forms are judged on the same folds.
    """
    n_folds = min(FOLDS, n_points)
    of = np.random.default_rng(FOLD_SEED).permutation(n_points) % n_folds
    return [of == fold for fold in range(n_folds)]


def spread_of(points: Observations) -> dict[str, tuple[int, float, float]]:
    """Return, for each observed column of a configuration: distinct values, least, greatest."""
    of = points.merged()
    names = {"gpus": of.gpus, "local_batch": of.local_batch, COLUMN_OF[of.axis]: of.control, "nodes": of.nodes}
    return {
        name: (len(np.unique(column)), float(column.min()), float(column.max()))
        for name, column in names.items()
        if name not in of.absent
    }


def standard_errors(covariance: Floats) -> list[float]:
    """Return the standard error of each parameter; 0 for one that was not fitted."""
    return np.sqrt(np.maximum(np.diag(covariance), 0.0)).tolist()


def _judged(
    model: Model,
    points: Observations,
    merged: Observations,
    whats: tuple[str, ...],
    fit: Callable[[Observations, Observations], Model],
    predict: Callable[[Model, Observations], Floats],
    residuals: bool,
    n_free: int,
) -> list[Judged]:
    """Return the errors of each predicted column; ``predict`` returns (n_whats, n)."""

    def corrections(model: Model, of: Observations) -> list[Residuals | None]:
        pairs = zip(whats, predict(model, of), strict=True)
        return [fit_residuals(of, by_form, getattr(of, what)) if residuals else None for what, by_form in pairs]

    def corrected(by_form: Floats, found: list[Residuals | None], of: Observations) -> Floats:
        pairs = zip(by_form, found, strict=True)
        return np.stack([form if each is None else form * each.factor(*where_of(of)) for form, each in pairs])

    found = corrections(model, merged)
    predicted = corrected(predict(model, merged), found, merged)
    left_out, by_form = np.full((2, len(whats), len(merged)), np.nan)
    for out in folds(len(merged)) if points.count.sum() > MIN_CONFIGURATIONS else []:
        kept, left = merged.take(~out), merged.take(out)
        other = fit(kept, merged)
        by_form[:, out] = predict(other, left)
        left_out[:, out] = corrected(by_form[:, out], corrections(other, kept), left)
    judged: list[Judged] = []
    for at, what in enumerate(whats):
        observed: Floats = getattr(merged, what)
        judged.append(
            Judged(
                mape=mape(predicted[at], observed),
                held_out_mape=mape(left_out[at], observed),
                form_mape=mape(by_form[at], observed),
                noise=noise_of(np.log(predicted[at] / observed), n_free),
                residuals=found[at],
            )
        )
    return judged
