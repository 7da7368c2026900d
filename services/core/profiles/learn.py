"""Fit the two models to points, and say how good the fit is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.profiles.energy import EnergyParameters, energy_j
from services.core.profiles.fitting import Problem, Solution, noise_of, solve
from services.core.profiles.observations import Observations, PointError
from services.core.profiles.terms import (
    Terms,
    energy_bounds,
    energy_starts,
    energy_terms,
    energy_units,
    throughput_bounds,
    throughput_starts,
    throughput_terms,
    throughput_units,
)
from services.core.profiles.throughput import ThroughputParameters, Times, times

MIN_CONFIGURATIONS = 3
FOLDS = 10
FOLD_SEED = 20
WRONG_BY = 30.0
"""A point further from all others' model than this factor is in another unit, or of another job."""
LOOSE = 1e-3
"""Pull of a parameter about which nothing is believed: enough to choose between equals, too little to bias."""
MAX_BREAKS = 6


@dataclass(frozen=True)
class Quality:
    """How far a fit can be trusted.

    Attributes:
        measurements: How many were given.
        configurations: How many distinct ones they are of; each is one point of the fit.
        spread: By column: distinct values, least, greatest.
        mape: Mean absolute percentage error on the points fitted, as a share.
        held_out_mape: The same on points left out of the fit, each once, a tenth at a time; NaN where not asked for,
            or with too few points.
        noise: Spread of the relative error about the fit.
        free: How many parameters were fitted.
    """

    measurements: int
    configurations: int
    spread: Mapping[str, tuple[int, float, float]]
    mape: float
    held_out_mape: float
    noise: float
    free: int


@dataclass(frozen=True)
class _Model:
    """What both models share. ``parameters`` are numbers; ``covariance`` is (p, p) in their order.

    ``fixed`` says of each term that was not fitted, and why.
    """

    axis: ControlKind
    covariance: Floats
    quality: Quality
    fixed: Mapping[str, str]

    def vector(self) -> Floats:
        """Return the parameters, (p,)."""
        raise NotImplementedError

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return predictions (k, n) of candidates (k, p) at (gpus, local_batch, setting, nodes), (n,) each."""
        raise NotImplementedError

    def errors(self) -> dict[str, float]:
        """Return the standard error of each parameter; 0 for one that was not fitted."""
        names: Sequence[str] = getattr(self, "parameters")._fields  # noqa: B009
        return dict(zip(names, np.sqrt(np.maximum(np.diag(self.covariance), 0.0)).tolist(), strict=True))

    def interval(
        self, gpus: Any, local_batch: Any, setting: Any, nodes: Any, confidence: float = 0.9
    ) -> tuple[Floats, Floats]:
        """Return the bounds between which a measurement is foreseen, (n,) each.

        Relative errors are taken as normal, with the parameters' uncertainty (to first order) and the noise about the
        fit added up. Wide where the points told nothing.
        """
        shaped = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, float)) for x in (gpus, local_batch, setting, nodes))
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
        return middle * np.exp(-reach), middle * np.exp(reach)


@dataclass(frozen=True)
class ThroughputModel(_Model):
    """A fitted throughput model."""

    parameters: ThroughputParameters

    def times(self, gpus: Any, local_batch: Any, setting: Any, nodes: Any) -> Times:
        """Return the parts of a step in a configuration; arguments broadcast."""
        return times(self.parameters, gpus, local_batch, setting, nodes)

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

    def energy_j(self, gpus: Any, local_batch: Any, setting: Any, nodes: Any) -> Any:
        """Return the energy of all the gang's GPUs in one step, J; arguments broadcast."""
        step = self.throughput.times(gpus, local_batch, setting, nodes)
        return energy_j(self.parameters, step, gpus, local_batch, setting)

    def vector(self) -> Floats:
        """Return the parameters, (21,)."""
        return np.array(self.parameters, dtype=np.float64)

    def predict(self, vectors: Floats, points: tuple[Any, Any, Any, Any]) -> Floats:
        """Return energies (k, n)."""
        gpus, local_batch, setting, nodes = points
        step = self.throughput.times(gpus, local_batch, setting, nodes)
        return energy_j(EnergyParameters(*vectors.T[..., None]), step, gpus, local_batch, setting)


Fitted = TypeVar("Fitted", ThroughputModel, EnergyModel)


@dataclass(frozen=True)
class Belief:
    """What is held of a job's parameters before its points: a centre, and how hard it pulls (see ``fitting``)."""

    centre: Floats
    pull: float


def fit_throughput(
    points: Observations,
    *,
    belief: Belief | None = None,
    warm: Sequence[float] | None = None,
    held_out: bool = False,
) -> ThroughputModel:
    """Fit equations 1 to 5 to measured step times.

    Args:
        points: At least three configurations, or one with a belief.
        belief: What is held of the parameters beforehand.
        warm: Parameters to start from, in place of starting cold.
        held_out: Also fit ten times without a tenth of the points, for ``quality.held_out_mape``.

    Raises:
        DomainError: Too few configurations, or a point that does not belong to the others.
    """
    merged = enough(points, belief)
    terms = throughput_terms(merged, believed=None if belief is None else belief.centre)
    lower, upper = throughput_bounds()
    units = throughput_units(merged)

    def fit(of: Observations) -> ThroughputModel:
        where = where_of(of)
        starts = throughput_starts(of, terms) if warm is None else np.array([warm], dtype=np.float64)
        if belief is not None and warm is None:
            starts = np.concatenate([starts, belief.centre[None]])
        found = solve(
            _problem(
                lambda vectors: times(ThroughputParameters(*vectors.T[..., None]), *where).iter_s,
                of.seconds_per_iteration,
                of,
                (lower, upper, units),
                belief,
                terms,
            ),
            terms.hold(starts),
        )
        if "kappa_grad" in terms.fixed and len(np.unique(of.gpus / of.nodes)) == 1 and belief is None:
            found = _named(found, float((of.gpus / of.nodes)[0]))
        return ThroughputModel(
            axis=of.axis,
            covariance=found.covariance,
            quality=quality_of(points, merged, terms),
            fixed=terms.fixed,
            parameters=ThroughputParameters(*found.parameters.tolist()),
        )

    return _judged(fit, points, merged, "seconds_per_iteration", held_out)


def fit_energy(
    points: Observations,
    throughput: ThroughputModel | None = None,
    *,
    belief: Belief | None = None,
    warm: Sequence[float] | None = None,
    held_out: bool = False,
    break_mhz: float | None = None,
) -> EnergyModel:
    """Fit equations 6 to 15 to measured energies; points without one are left out.

    Args:
        points: At least three configurations with an energy, or one with a belief.
        throughput: The job's times; fitted to the same points if not given.
        belief, warm, held_out: As in ``fit_throughput``. What is held out is held out of the times too, where these
            are fitted here.
        break_mhz: The board's ``f0``; found among the settings seen if not given.

    Raises:
        DomainError: Too few configurations with an energy, or a point that does not belong to the others.
    """
    merged = enough(points.take(points.with_energy), belief)
    terms = energy_terms(merged, believed=None if belief is None else belief.centre)
    lower, upper = energy_bounds()
    units = energy_units(merged)

    def fit(of: Observations) -> EnergyModel:
        speed = fit_throughput(of) if throughput is None else throughput
        where = where_of(of)
        step = speed.times(*where)
        gpus, local_batch, setting, _ = where
        breaks = [break_mhz] if break_mhz is not None else _breaks(of, belief)
        best: Solution | None = None
        for f0 in breaks if warm is None else [float(warm[-1])]:
            held = terms.broken_at(f0, of)
            starts = energy_starts(of, step, f0) if warm is None else np.array([warm], dtype=np.float64)
            if belief is not None and warm is None:
                starts = np.concatenate([starts, belief.centre[None]])
            starts[:, -1] = f0
            found = solve(
                _problem(
                    lambda vectors: energy_j(EnergyParameters(*vectors.T[..., None]), step, gpus, local_batch, setting),
                    of.energy_j_per_iteration,
                    of,
                    (lower, upper, units),
                    belief,
                    held,
                ),
                held.hold(starts),
            )
            if best is None or found.cost < best.cost:
                best = found
        assert best is not None
        return EnergyModel(
            axis=of.axis,
            covariance=best.covariance,
            quality=quality_of(points, merged, terms),
            fixed=terms.fixed,
            parameters=EnergyParameters(*best.parameters.tolist()),
            throughput=speed,
        )

    return _judged(fit, points, merged, "energy_j_per_iteration", held_out)


def mape(predicted: Floats, observed: Floats) -> float:
    """Return the mean absolute percentage error, as a share; NaN of nothing.

    Source: PowerFlow, section 6.3.
    """
    return float(np.mean(np.abs(predicted / observed - 1.0))) if len(observed) else float("nan")


def folds(n_points: int) -> list[Bools]:
    """Return masks (n_points,) that hold out each point once, a tenth at a time, or one at a time below ten points.

    Which points go together is drawn once and for all, so that two forms are judged on the same folds.
    """
    n_folds = min(FOLDS, n_points)
    of = np.random.default_rng(FOLD_SEED).permutation(n_points) % n_folds
    return [of == fold for fold in range(n_folds)]


def _judged(
    fit: Callable[[Observations], Fitted], points: Observations, merged: Observations, what: str, held_out: bool
) -> Fitted:
    """Return the fit to all points with its errors, in and out of sample."""
    model = fit(merged)
    refuse_strangers(model.predict(model.vector()[None], where_of(points))[0], getattr(points, what), what)
    observed: Floats = getattr(merged, what)
    predicted = model.predict(model.vector()[None], where_of(merged))[0]
    left_out = np.full(len(merged), np.nan)
    if held_out and len(merged) > MIN_CONFIGURATIONS:
        for out in folds(len(merged)):
            other = fit(merged.take(~out))
            left_out[out] = other.predict(other.vector()[None], where_of(merged.take(out)))[0]
    quality = replace(
        model.quality,
        mape=mape(predicted, observed),
        held_out_mape=mape(left_out, observed),
        noise=noise_of(np.log(predicted / observed), model.quality.free),
    )
    return replace(model, quality=quality)


def refuse_strangers(predicted: Floats, measured: Floats, what: str) -> None:
    """Refuse points, (n,), that are off by more than a factor of ``WRONG_BY``, by their row; NaN was not measured.

    Raises:
        PointError: There is one.
    """
    error = np.nan_to_num(np.abs(np.log(predicted / measured)))
    if error.max() > np.log(WRONG_BY):
        row = int(np.argmax(error))
        factor = np.exp(error[row])
        raise PointError(
            row, f"{what} is {measured[row]:g}, {factor:.0f} times off what the other points say; wrong units?"
        )


def _problem(
    predict: Callable[[Floats], Floats],
    observed: Floats,
    of: Observations,
    limits: tuple[Floats, Floats, Floats],
    belief: Belief | None,
    terms: Terms,
) -> Problem:
    lower, upper, units = limits
    return Problem(
        predict=predict,
        observed=observed,
        weight=np.minimum(of.count, 16.0) / min(16.0, float(of.count.mean())),
        lower=lower,
        upper=upper,
        unit=units if belief is None else np.maximum(units * 0.2, np.abs(belief.centre)),
        centre=lower if belief is None else belief.centre,
        pull=np.full(len(units), LOOSE if belief is None else belief.pull),
        free=terms.free,
    )


def _named(found: Solution, gpus_per_node: float) -> Solution:
    """Return the fit with what grows faster with the batch called gradients, and the other part reading.

    Where neither the clock nor the GPUs per node vary, the two parts have one form, and the points do not tell which is
    which; only computing draws power.
    """
    names = ThroughputParameters._fields
    io, grad = (
        [names.index(name) for name in ("alpha_io", "beta_io")],
        [names.index("alpha_grad"), names.index("beta_grad")],
    )
    if found.parameters[io[1]] * gpus_per_node <= found.parameters[grad[1]]:
        return found
    mix = np.eye(len(names))
    mix[io + grad] = 0.0
    mix[io, grad] = 1.0, 1.0 / gpus_per_node
    mix[grad, io] = 1.0, gpus_per_node
    return replace(found, parameters=mix @ found.parameters, covariance=mix @ found.covariance @ mix.T)


def enough(points: Observations, belief: Belief | None) -> Observations:
    """Return the points by configuration.

    Raises:
        DomainError: They are too few to fit.
    """
    merged = points.merged() if len(points) else points
    if belief is None and len(merged) == 1:
        raise DomainError("the points do not vary: all are of one configuration, which tells nothing of others")
    if len(merged) < (1 if belief is not None else MIN_CONFIGURATIONS):
        raise DomainError(f"{len(merged)} configurations are too few to fit; at least {MIN_CONFIGURATIONS} are needed")
    return merged


def quality_of(points: Observations, merged: Observations, terms: Terms) -> Quality:
    """Return what is known of a fit before it is judged."""
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
    """Return gpus, local batch, setting and nodes, (n,) each."""
    return of.gpus, of.local_batch, of.setting, of.nodes


def _breaks(of: Observations, belief: Belief | None) -> list[float]:
    """Return settings where the breaking point may be: where believed, until five settings were seen; then anywhere."""
    seen = np.unique(of.setting)
    if belief is not None and len(seen) < 5:
        return [float(belief.centre[-1])]
    if len(seen) < 3:
        return [float(seen[-1]) * 2]
    inner = seen[1:-1]
    if len(inner) > MAX_BREAKS:
        inner = inner[np.linspace(0, len(inner) - 1, MAX_BREAKS).round().astype(int)]
    return [float(seen[0]) / 2, *inner.tolist(), float(seen[-1]) * 2]
