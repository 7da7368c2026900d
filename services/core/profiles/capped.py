"""A better form where the control is a power limit: the limit finds its own clock.

In PowerFlow's form a limit would take the place of the clock, so that every watt taken away slows every job. But a
board under a limit runs at its top clock until its draw meets the limit, and only then slows down: a job that draws
90 W is not affected by a limit of 150 W. So, with ``u`` the clock as a share of the top clock:

    demand(bs) = P_static + P_grad(bs)                               P_grad(bs) = alpha * log(bs + theta) + beta
    u(L, bs)   = ((L - P_static) / P_grad(bs)) ** (1 / e)            at most 1, with a soft knee
    T_iter     = equations 2 to 5 with u for f
    E_iter     = n * (P_grad u^e T_grad + P_sync u^e T_sync + P_static T_iter)

Times and energies are fitted together, because both bend at the knee. This is ours, not the paper's; what it gains
is shown in ``lab/results/powerflow.md`` and ``tests/unit/core/profiles/test_capped.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.profiles.fitting import Problem, solve
from services.core.profiles.learn import enough, fit_throughput, problem_of
from services.core.profiles.models import MIN_CONFIGURATIONS, Quality, mape, refuse_strangers, where_of
from services.core.profiles.observations import Observations
from services.core.profiles.terms import throughput_bounds, throughput_terms, throughput_units
from services.core.profiles.throughput import ThroughputParameters, times

KNEE = 8.0  #: How sharply a limit sets in; measured curves bend within some 10 % of the demand
MEASURED = ("seconds_per_iteration", "energy_j_per_iteration")
SPEED = ThroughputParameters._fields
OWN = ("static_w", "alpha_w", "theta", "beta_w", "sync_w", "exponent")
NAMES = (*SPEED, *OWN)


class CappedParameters(NamedTuple):
    """The parameters, numbers or arrays: the 15 of ``throughput`` (``kappa`` in s, at the top clock), then these.

    ``static_w`` is always drawn; ``alpha_w`` and ``beta_w`` (with ``theta`` >= 1) while gradients are computed at the
    top clock; ``sync_w`` while synchronising. Dynamic power is proportional to ``u ** exponent``, 1 to 3.
    """

    speed: ThroughputParameters
    static_w: Any
    alpha_w: Any
    theta: Any
    beta_w: Any
    sync_w: Any
    exponent: Any


def unpacked(vectors: Floats) -> CappedParameters:
    """Return the parameters from (..., 21) vectors, each (...)."""
    columns = np.moveaxis(vectors, -1, 0)
    return CappedParameters(ThroughputParameters(*columns[: len(SPEED)]), *columns[len(SPEED) :])


def step_and_energy(
    p: CappedParameters, gpus: Any, local_batch: Any, power_limit_w: Any, nodes: Any
) -> tuple[Any, Any]:
    """Return the step time, s, and the energy of all GPUs in a step, J; arguments broadcast."""
    grad_w = p.alpha_w * np.log(local_batch + p.theta) + p.beta_w
    room_w = np.maximum(power_limit_w - p.static_w, 0.01 * power_limit_w)
    pressed = grad_w / room_w
    share = (1.0 + pressed**KNEE) ** (-1.0 / KNEE)  # of the dynamic power that is left
    step = times(p.speed, gpus, local_batch, share ** (1.0 / p.exponent), nodes)
    dynamic_j = share * (grad_w * step.grad_s + p.sync_w * step.sync_s)
    return step.iter_s, gpus * (dynamic_j + p.static_w * step.iter_s)


@dataclass(frozen=True)
class CappedModel:
    """A fitted job under power limits; each quality is as if for a separate model."""

    vector: Floats  #: (21,) the parameters, in the order of ``CappedParameters``
    covariance: Floats  #: (21, 21)
    time_quality: Quality
    energy_quality: Quality
    fixed: Mapping[str, str]  #: For each parameter that was not fitted, why
    axis: ClassVar[ControlKind] = ControlKind.POWER_LIMIT

    @property
    def parameters(self) -> CappedParameters:
        """The parameters as numbers."""
        return unpacked(self.vector)

    def step_and_energy(self, gpus: Any, local_batch: Any, power_limit_w: Any, nodes: Any) -> tuple[Any, Any]:
        """Return step time, s, and energy, J, in a configuration; arguments broadcast."""
        return step_and_energy(self.parameters, gpus, local_batch, power_limit_w, nodes)


def fit_capped(points: Observations, *, belief: Floats | None = None) -> CappedModel:
    """Fit the form above to step times and energies measured under power limits.

    Args:
        points: At least three configurations, or one with a belief, all with energies.
        belief: As in ``learn.fit_throughput``, (21,).

    Raises:
        DomainError: there are too few configurations, an energy is missing, or the control is not a power limit.
    """
    if points.axis is not ControlKind.POWER_LIMIT or not points.with_energy.all():
        raise DomainError("this form needs power limits, and the energy of every point")
    merged = enough(points, belief)
    model = capped_of(merged, merged, belief)
    for predicted, what in zip(model.step_and_energy(*where_of(points)), MEASURED, strict=True):
        refuse_strangers(predicted, getattr(points, what), what)
    time_s, energy_j = model.step_and_energy(*where_of(merged))
    return replace(
        model,
        time_quality=replace(model.time_quality, mape=mape(time_s, merged.seconds_per_iteration)),
        energy_quality=replace(model.energy_quality, mape=mape(energy_j, merged.energy_j_per_iteration)),
    )


def capped_of(of: Observations, among: Observations, belief: Floats | None = None) -> CappedModel:
    """Return the fit to some configurations of those parameters that the configurations ``among`` determine."""
    terms = throughput_terms(among, believed=None if belief is None else belief[: len(SPEED)])
    batch = terms.fixed.get("beta_grad")
    fixed = dict(terms.fixed)
    if batch:
        fixed |= dict.fromkeys(("alpha_w", "theta"), batch)
    if not (among.gpus >= 2).any():
        fixed["sync_w"] = fixed["gamma2"]
    power_w, limit_w = float(np.median(of.power_w)), float(of.control.max())
    relative = replace(of, control=np.full(len(of), 1_000.0))
    units = throughput_units(relative)
    units[[name.startswith(("kappa", "alpha_sync")) for name in SPEED]] /= 1_000.0
    low, high = throughput_bounds()
    lower = np.concatenate([low, [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]])
    upper = np.concatenate([high, [0.97 * float(of.control.min()), np.inf, 1e6, np.inf, np.inf, 3.0]])
    unit = np.concatenate([units, [power_w, power_w, float(np.median(of.local_batch)), power_w, power_w, 1.0]])
    free = np.concatenate([terms.free, [name not in fixed for name in OWN]])
    problem = problem_of(
        lambda vectors: np.concatenate(step_and_energy(unpacked(vectors[:, None, :]), *where_of(of)), axis=-1),
        np.concatenate([of.seconds_per_iteration, of.energy_j_per_iteration]),
        of,
        (lower, upper, unit),
        belief,
        free,
    )
    starts = _starts(of, problem, limit_w)
    if belief is not None:
        starts = np.where(free, np.concatenate([starts, belief[None]]), belief)
    found = solve(problem, starts)
    quality = Quality(int(among.count.sum()), len(among), int(free.sum()))
    return CappedModel(found.parameters, found.covariance, quality, quality, fixed)


def _starts(of: Observations, problem: Problem, limit_w: float) -> Floats:
    """Return starting points (s, 21): times as fitted where the limit hardly binds, and power from the demand."""
    plain = of.take(of.control >= 0.8 * limit_w)
    if len(plain) < MIN_CONFIGURATIONS:
        plain = of
    # from here on the clock is a share, and 1 where no limit binds
    speed = ThroughputParameters(*(problem.unit[: len(SPEED)] * 0.2).tolist())
    unlimited = replace(plain, control=np.full(len(plain), 1_000.0)).merged()
    if len(unlimited) >= MIN_CONFIGURATIONS:  # one gang measured at every limit is one configuration here
        speed = fit_throughput(unlimited).parameters
    # without clocks the parts' names were a guess: begin from either
    swapped = speed._replace(
        alpha_io=speed.alpha_grad, beta_io=speed.beta_grad, alpha_grad=speed.alpha_io, beta_grad=speed.beta_io
    )
    # most of a sample's time goes with the clock
    speeds = [
        each._replace(beta_grad=0.2 * each.beta_grad, kappa_grad=0.8 * each.beta_grad) for each in (speed, swapped)
    ]
    top_w, typical = float(plain.power_w.max()), float(np.log(np.median(of.local_batch) + 2.0))
    starts: list[Floats] = []
    for static_share, exponent in ((0.2, 2.0), (0.5, 2.0), (0.35, 1.1)):
        static_w = static_share * min(top_w, float(of.control.min()))
        dynamic_w = top_w - static_w
        draw = [static_w, 0.5 * dynamic_w / typical, 2.0, 0.5 * dynamic_w, 0.5 * dynamic_w, exponent]
        starts += [np.array([*each, *draw], dtype=np.float64) for each in speeds]
    return np.where(problem.free, np.array(starts), np.maximum(problem.lower, 0.0))
