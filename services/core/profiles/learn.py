"""Fit the two models to points. Parameters that the points do not determine stay at their prior or are left out."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.domain.errors import DomainError
from services.core.profiles.fitting import Problem, Solution, solve
from services.core.profiles.models import (
    MIN_CONFIGURATIONS,
    EnergyModel,
    Quality,
    ThroughputModel,
    mape,
    refuse_strangers,
    where_of,
)
from services.core.profiles.observations import Observations
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
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, energy_j, times

LOOSE = 1e-3  #: Pull of a parameter without a prior: enough to choose between equals, too little to bias
PULL = 0.1  #: A parameter that is off its prior by all of itself costs as much as one point that is wrong by a tenth
MAX_BREAKS = 6


def fit_throughput(points: Observations, *, belief: Floats | None = None) -> ThroughputModel:
    """Fit equations 1 to 5 to measured step times.

    Args:
        points: At least three configurations, or one with a belief.
        belief: The prior of the parameters; see ``PULL``.

    Raises:
        DomainError: there are too few configurations, or a point is inconsistent with the others.
    """
    return _times(points, enough(points, belief), belief)


def _times(points: Observations, merged: Observations, belief: Floats | None = None) -> ThroughputModel:
    model = times_of(merged, merged, belief)
    refuse_strangers(model.times(*where_of(points)).iter_s, points.seconds_per_iteration, "seconds_per_iteration")
    error = mape(model.times(*where_of(merged)).iter_s, merged.seconds_per_iteration)
    return replace(model, quality=replace(model.quality, mape=error))


def times_of(of: Observations, among: Observations, belief: Floats | None = None) -> ThroughputModel:
    """Return the fit to some configurations of those parameters that the configurations ``among`` determine."""
    terms = throughput_terms(among, believed=belief)
    where = where_of(of)
    starts = throughput_starts(of, terms)
    if belief is not None:
        starts = np.concatenate([starts, belief[None]])

    def predict(vectors: Floats) -> Floats:
        return times(ThroughputParameters(*vectors.T[..., None]), *where).iter_s

    limits = (*throughput_bounds(), throughput_units(among))
    found = solve(problem_of(predict, of.seconds_per_iteration, of, limits, belief, terms.free), terms.hold(starts))
    if "kappa_grad" in terms.fixed and len(np.unique(of.gpus / of.nodes)) == 1 and belief is None:
        found = _named(found, float((of.gpus / of.nodes)[0]))
    parameters = ThroughputParameters(*found.parameters.tolist())
    return ThroughputModel(of.axis, found.covariance, _quality(among, terms), terms.fixed, parameters)


def fit_energy(
    points: Observations, throughput: ThroughputModel | None = None, *, belief: Floats | None = None
) -> EnergyModel:
    """Fit equations 6 to 15 to measured energies; points without one are left out.

    Args:
        points: At least three configurations with an energy, or one with a belief.
        throughput: The job's times; fitted to the same points if not given.
        belief: As in ``fit_throughput``.

    Raises:
        DomainError: there are too few configurations with an energy, or a point is inconsistent with the others.
    """
    merged = enough(points.take(points.with_energy), belief)
    model = energy_of(merged, merged, throughput, belief)
    refuse_strangers(model.energy_j(*where_of(points)), points.energy_j_per_iteration, "energy_j_per_iteration")
    error = mape(model.energy_j(*where_of(merged)), merged.energy_j_per_iteration)
    return replace(model, quality=replace(model.quality, mape=error))


def energy_of(
    of: Observations,
    among: Observations,
    throughput: ThroughputModel | None = None,
    belief: Floats | None = None,
) -> EnergyModel:
    """Return the fit to some configurations of those parameters that the configurations ``among`` determine."""
    terms = energy_terms(among, believed=belief)
    limits = (*energy_bounds(), energy_units(among))
    speed = _times(of, of) if throughput is None else throughput
    where = where_of(of)
    step = speed.times(*where)
    gpus, local_batch, control, _ = where

    def broken_at(f0: float) -> Solution:
        held = terms.broken_at(f0, of)
        starts = energy_starts(of, step, f0)
        if belief is not None:
            starts = np.concatenate([starts, belief[None]])
        starts[:, -1] = f0

        def predict(vectors: Floats) -> Floats:
            return energy_j(EnergyParameters(*vectors.T[..., None]), step, gpus, local_batch, control)

        problem = problem_of(predict, of.energy_j_per_iteration, of, limits, belief, held.free)
        return solve(problem, held.hold(starts))

    best = min(map(broken_at, _breaks(of, belief)), key=lambda found: found.cost)
    parameters = EnergyParameters(*best.parameters.tolist())
    return EnergyModel(of.axis, best.covariance, _quality(among, terms), terms.fixed, parameters, speed)


def _quality(among: Observations, terms: Terms) -> Quality:
    return Quality(int(among.count.sum()), len(among), int(terms.free.sum()))


def enough(points: Observations, belief: Floats | None) -> Observations:
    """Return the points merged by configuration; ``DomainError`` if there are too few to fit."""
    merged = points.merged() if len(points) else points
    if belief is None and len(merged) == 1:
        raise DomainError("the points do not vary: all are of one configuration, which tells nothing of others")
    if len(merged) < (1 if belief is not None else MIN_CONFIGURATIONS):
        raise DomainError(f"{len(merged)} configurations are too few to fit; at least {MIN_CONFIGURATIONS} are needed")
    return merged


def problem_of(
    predict: Callable[[Floats], Floats],
    observed: Floats,
    of: Observations,
    limits: tuple[Floats, Floats, Floats],
    belief: Floats | None,
    free: Bools,
) -> Problem:
    """Return the fit of a model to what was measured, (n,) or several such columns one after another.

    Args:
        limits: Lower and upper bounds, and units, of the parameters.
        free: Which are fitted.
    """
    lower, upper, units = limits
    weight = np.minimum(of.count, 16.0) / min(16.0, float(of.count.mean()))
    return Problem(
        predict=predict,
        observed=observed,
        weight=np.tile(weight, len(observed) // len(of)),
        lower=lower,
        upper=upper,
        unit=units if belief is None else np.maximum(units * 0.2, np.abs(belief)),
        centre=lower if belief is None else belief,
        pull=np.full(len(units), LOOSE if belief is None else PULL),
        free=free,
    )


def _named(found: Solution, gpus_per_node: float) -> Solution:
    """Return the fit in which the part that grows faster with the batch is named gradients, and the other reading.

    If neither the clock nor the GPUs per node vary, the two parts have the same form, and the points do not show which
    is which; only computing draws power.
    """
    names = ThroughputParameters._fields
    io, grad = ([names.index(f"{name}_{part}") for name in ("alpha", "beta")] for part in ("io", "grad"))
    if found.parameters[io[1]] * gpus_per_node <= found.parameters[grad[1]]:
        return found
    mix = np.eye(len(names))
    mix[io + grad] = 0.0
    mix[io, grad] = 1.0, 1.0 / gpus_per_node
    mix[grad, io] = 1.0, gpus_per_node
    return replace(found, parameters=mix @ found.parameters, covariance=mix @ found.covariance @ mix.T)


def _breaks(of: Observations, belief: Floats | None) -> list[float]:
    """Return clocks where the breaking point may be: the believed one until five were seen, then anywhere."""
    seen = np.unique(of.control)
    if belief is not None and len(seen) < 5:
        return [float(belief[-1])]
    if len(seen) < 3:
        return [float(seen[-1]) * 2]
    inner = seen[1:-1]
    if len(inner) > MAX_BREAKS:
        inner = inner[np.linspace(0, len(inner) - 1, MAX_BREAKS).round().astype(int)]
    return [float(seen[0]) / 2, *inner.tolist(), float(seen[-1]) * 2]
