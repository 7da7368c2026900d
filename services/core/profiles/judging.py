"""How far a fit can be trusted: its errors in and out of sample, and points that are inconsistent with the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.profiles.fitting import noise_of
from services.core.profiles.observations import Observations, PointError
from services.core.profiles.residuals import Residuals, fit_residuals
from services.core.profiles.terms import Terms

MIN_CONFIGURATIONS = 3
FOLDS = 10
FOLD_SEED = 20
WRONG_BY = 30.0
"""A point further from all others' model than this factor is in another unit, or of another job."""


@dataclass(frozen=True)
class Quality:
    """How far a fit can be trusted.

    Attributes:
        measurements: How many were given. configurations: How many distinct ones they cover; each is one point of the
        fit. spread: By column: distinct values, least, greatest. mape: Mean absolute percentage error on the points
        fitted, as a share. held_out_mape: The same on configurations left out of the fit, each once, a tenth at a
        time; NaN if not requested, or with three points or fewer. noise: Spread of the relative error about the fit.
        free: How many parameters were fitted. form_mape: ``held_out_mape`` of the form alone, without a correction.
    """

    measurements: int
    configurations: int
    spread: Mapping[str, tuple[int, float, float]]
    mape: float
    held_out_mape: float
    noise: float
    free: int
    form_mape: float = float("nan")


class Model(Protocol):
    """The parts of a fitted model that are used to judge it."""

    @property
    def quality(self) -> Quality:
        """What is known of the fit so far."""
        ...

    def vector(self) -> Floats:
        """Return the parameter vector, (p,)."""
        ...

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return predictions (k, n) of candidates (k, p) at (gpus, local_batch, control, nodes), (n,) each."""
        ...

    def expected(self, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return what is predicted at (gpus, local_batch, control, nodes), (n,) each, with any correction: (n,)."""
        ...

    def with_quality(self, quality: Quality) -> Self:
        """Return the same model with what is now known of the fit."""
        ...

    def with_residuals(self, residuals: Residuals | None) -> Self:
        """Return the same model with this correction."""
        ...


Fitted = TypeVar("Fitted", bound=Model)


def mape(predicted: Floats, observed: Floats) -> float:
    """Return the mean absolute percentage error, as a share; NaN if there are no points.

    Source: PowerFlow, section 6.3.
    """
    return float(np.mean(np.abs(predicted / observed - 1.0))) if len(observed) else float("nan")


def folds(n_points: int) -> list[Bools]:
    """Return masks (n_points,) that hold out each point once, a tenth at a time, or one at a time below ten points.

    The partition is drawn with a fixed seed, so that two forms are judged on the same folds.
    """
    n_folds = min(FOLDS, n_points)
    of = np.random.default_rng(FOLD_SEED).permutation(n_points) % n_folds
    return [of == fold for fold in range(n_folds)]


def held_out_folds(points: Observations, merged: Observations) -> list[Bools]:
    """Return the folds to hold out, by configuration; none if three points or fewer were given."""
    return folds(len(merged)) if points.count.sum() > MIN_CONFIGURATIONS else []


def judged(
    fit: Callable[[Observations], Fitted],
    points: Observations,
    merged: Observations,
    what: str,
    *,
    held_out: bool,
    residuals: bool,
) -> Fitted:
    """Return the fit to all points with its errors, in and out of sample.

    Args:
        points: The points as measured.
        merged: The same points merged by configuration.
        what: The column that the model predicts.
        held_out: Whether to fit ten more times, each without a tenth of the points.
        residuals: Whether to correct the form's residuals; held-out points are held out of that too.

    Raises:
        PointError: a point is inconsistent with the others.
    """

    def fitted(of: Observations) -> Fitted:
        found = fit(of)
        if not residuals:
            return found
        return found.with_residuals(fit_residuals(of, found.expected(where_of(of)), getattr(of, what)))

    model = fitted(merged)
    refuse_strangers(model.predict(model.vector()[None], where_of(points))[0], getattr(points, what), what)
    observed: Floats = getattr(merged, what)
    predicted = model.expected(where_of(merged))
    left_out, by_form = np.full((2, len(merged)), np.nan)
    for out in held_out_folds(points, merged) if held_out else []:
        other, where = fitted(merged.take(~out)), where_of(merged.take(out))
        left_out[out], by_form[out] = other.expected(where), other.predict(other.vector()[None], where)[0]
    quality = replace(
        model.quality,
        mape=mape(predicted, observed),
        held_out_mape=mape(left_out, observed),
        noise=noise_of(np.log(predicted / observed), model.quality.free),
        form_mape=mape(by_form, observed),
    )
    return model.with_quality(quality)


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


def quality_of(points: Observations, merged: Observations, terms: Terms) -> Quality:
    """Return what is known about a fit before it is judged."""
    unknown = float("nan")
    return Quality(
        measurements=int(points.count.sum()),
        configurations=len(merged),
        spread=merged.spread(),
        mape=unknown,
        held_out_mape=unknown,
        noise=unknown,
        free=int(terms.free.sum()),
    )


def where_of(of: Observations) -> tuple[Floats, Floats, Floats, Floats]:
    """Return gpus, local batch, control and nodes, (n,) each."""
    return of.gpus, of.local_batch, of.control, of.nodes
