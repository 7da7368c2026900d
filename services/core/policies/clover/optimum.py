"""The best configuration by integer programmes, and a bound that no configuration exceeds.

By ``prediction``, all servers rest equally long between two requests. For rests within an interval, the rate of an
instance lies between two constants, and objective and constraints are linear in instances and flows: this gives an
integer programme per interval, whose optimum no configuration with such a rest exceeds. Latency is relaxed to service
time alone: at most 5 % of the requests may go where service alone takes longer than the SLA. Intervals that cover all
rests give the bound; what the programmes propose is measured, best first, until one keeps the SLA.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.solving import Progress, Report, unreported
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.layouts import LAYOUT_COUNTS, SLICES
from services.core.policies.clover.objective import Goal
from services.core.solvers.model import LinearModel, ModelBuilder
from services.core.solvers.solve import solve

INTERVALS = 24
_GAP = 1e-4


@dataclass(frozen=True)
class Optimum:
    """What is known of the best configuration."""

    bound: float  #: No configuration has a higher objective, as far as the closed-form model is right; per cent
    proposals: tuple[ConfigGraph, ...]  #: Configurations in order of what the programmes promise for them, best first


def optimum(
    application: Application,
    gpus: int,
    rate_per_s: float,
    goal: Goal,
    intensity_gco2_per_j: float,
    *,
    intervals: int = INTERVALS,
    report: Report = unreported,
) -> Optimum | None:
    """Return the bound and what may reach it, tighter with more ``intervals``; None if nothing keeps the limits."""
    found: list[tuple[float, ConfigGraph]] = []
    bound = -np.inf
    for at, rest_s in enumerate(_rests_s(application, gpus, rate_per_s, intervals)):
        report(Progress(at / intervals, f"integer programme {at + 1} of {intervals}"))
        model = _model(application, gpus, rate_per_s, goal, intensity_gco2_per_j, rest_s)
        solution = solve(model, relative_gap=_GAP)
        if solution.values is None or solution.objective is None:
            continue
        found.append((-solution.objective, _graph(application, solution.values)))
        bound = max(bound, -(solution.objective if solution.bound is None else solution.bound))
    if not found:
        return None
    found.sort(key=lambda each: (-each[0], each[1].key))
    return Optimum(float(bound), tuple(dict.fromkeys(graph for _, graph in found)))


def proposals(
    application: Application,
    gpus: int,
    rate_per_s: float,
    goal: Goal,
    intensity_gco2_per_j: float,
    programmes: int,
) -> list[ConfigGraph]:
    """Return the configurations from a few programmes, those whose relaxations promise most, best first.

    Other arguments as for ``optimum``, which solves all of the programmes.
    """
    relaxed: list[tuple[float, int, LinearModel]] = []
    for at, rest_s in enumerate(_rests_s(application, gpus, rate_per_s, INTERVALS)):
        model = _model(application, gpus, rate_per_s, goal, intensity_gco2_per_j, rest_s)
        solution = solve(model.relaxed())
        if solution.objective is not None:
            relaxed.append((solution.objective, at, model))
    relaxed.sort(key=lambda each: each[:2])
    solutions = [solve(model, relative_gap=_GAP).values for _, _, model in relaxed[:programmes]]
    return list(dict.fromkeys(_graph(application, values) for values in solutions if values is not None))


def _rests_s(application: Application, gpus: int, rate_per_s: float, intervals: int) -> list[tuple[float, float]]:
    """Return intervals that cover all rests, with finer ones for short rests."""
    longest_s = 7 * gpus / rate_per_s
    shortest_s = min(float(np.nanmin(application.service_s)) / 10, longest_s / 2)
    edges = [0.0, *np.geomspace(shortest_s, longest_s, intervals).tolist()]
    return list(pairwise(edges))


def _graph(application: Application, values: Floats) -> ConfigGraph:
    weights = np.zeros(application.service_s.shape, dtype=np.int64)
    kinds = int(application.fits.sum())
    weights[application.fits] = np.round(values[:kinds]).astype(np.int64)
    return ConfigGraph(weights)


def _model(
    application: Application,
    gpus: int,
    rate_per_s: float,
    goal: Goal,
    intensity_gco2_per_j: float,
    rest_s: tuple[float, float],
) -> LinearModel:
    """Return the programme for one interval of rests: instances by kind, flows by kind, GPUs by layout."""
    rows, columns = np.nonzero(application.fits)
    service_s = application.service_s[rows, columns]
    kinds = rows.size
    model = ModelBuilder()
    instances = model.add_variables(kinds, upper=7 * gpus, integer=True)
    gain = _gain(application, goal, intensity_gco2_per_j)[rows, columns] / rate_per_s
    flows = model.add_variables(kinds, cost=-gain)
    cut = model.add_variables(len(LAYOUT_COUNTS), upper=gpus, integer=True)
    at = np.arange(kinds)
    for rest, lower, upper in ((rest_s[1], 0.0, np.inf), (rest_s[0], -np.inf, 0.0)):
        model.add_rows(kinds, (at, flows, 1.0), (at, instances, -1 / (service_s + rest)), lower=lower, upper=upper)
    model.add_rows(1, (0, flows, 1.0), lower=rate_per_s, upper=rate_per_s)
    late = service_s > goal.baseline.p95_s
    if late.any():
        model.add_rows(1, (0, flows[late], 1.0), upper=0.05 * rate_per_s)
    if goal.max_accuracy_loss_pct is not None:
        model.add_rows(1, (0, flows, application.accuracy[rows]), lower=goal.floor * rate_per_s)
    held = -np.array(LAYOUT_COUNTS, dtype=np.float64).T.ravel()
    of_layouts = np.repeat(np.arange(len(SLICES)), len(cut)), np.tile(cut, len(SLICES)), held
    model.add_rows(len(SLICES), (columns, instances, 1.0), of_layouts, upper=0.0)
    model.add_rows(1, (0, cut, 1.0), upper=gpus)
    idle_gco2 = gpus * application.idle_w / rate_per_s * intensity_gco2_per_j
    weight = goal.carbon_weight
    constant = weight * 100 * (1 - idle_gco2 / goal.baseline.carbon_gco2) - (1 - weight) * 100
    return model.build(offset=-constant)


def _gain(application: Application, goal: Goal, intensity_gco2_per_j: float) -> Floats:
    """Return what a request adds to the objective if served there, without constants, per cent: (variants, 5)."""
    busy_gco2 = application.service_s * application.busy_w * intensity_gco2_per_j
    carbon = -100 * busy_gco2 / goal.baseline.carbon_gco2
    accuracy = 100 * application.accuracy[:, None] / goal.baseline.accuracy
    return goal.carbon_weight * carbon + (1 - goal.carbon_weight) * accuracy
