"""One fleet for one or several applications: its GPUs split by marginal benefit, each share searched separately."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from services.core.domain.errors import DomainError
from services.core.domain.solving import MAX_LEADING, Progress, Report, part_of, unreported
from services.core.policies.clover.anneal import AnnealingConfig, Search, anneal
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Arrivals, Outcome, QueueEvaluator
from services.core.policies.clover.layouts import Realisation, SliceCounts, can_be_cut, realise
from services.core.policies.clover.objective import Baseline, Goal
from services.core.policies.clover.optimum import optimum
from services.core.policies.clover.screen import Screen, search_screened

_SPLIT_INTERVALS = 8
_LEAST_GAIN = 0.02
"""What a GPU must add to the objective to be a benefit, per cent: the least that a search goes on for."""
_SPLITTING, _SEARCHING = 0.3, 0.6
"""For progress: the share of the split in the whole, and that of a search in what an application takes."""


@dataclass(frozen=True)
class Demand:
    """An application and its demand."""

    name: str  #: Its name, for messages
    application: Application  #: Its variants
    rate_per_s: float  #: Mean rate of requests
    carbon_weight: float = 0.5  #: Lambda
    max_accuracy_loss_pct: float | None = None  #: The accuracy floor; None for none
    sla_p95_s: float | None = None  #: The SLA; None for the p95 of BASE on all GPUs
    running: ConfigGraph | None = None  #: The present configuration; None for BASE


@dataclass(frozen=True)
class Fleet:
    """GPUs of one model, and their grid."""

    gpus: int  #: How many there are
    layouts: tuple[int, ...]  #: Their present layouts, indices into ``LAYOUTS``
    gco2_per_j: float  #: Present carbon intensity of energy
    baseline_gco2_per_j: float  #: The carbon intensity that the objective compares with


@dataclass(frozen=True)
class Share:
    """What was found for an application."""

    gpus: int  #: How many GPUs it gets
    outcome: Outcome  #: Its configuration and what it does, by the queue model
    goal: Goal  #: What was maximised
    objective: float  #: The configuration's objective, per cent
    bound: float | None  #: No configuration has a higher objective; None if none keeps the limits
    keeps_limits: bool  #: Whether the SLA and the accuracy floor are kept
    evaluations: int  #: How many configurations were measured
    leading: Sequence[Outcome] = ()  #: The best of these that keep the limits, best first


def partition(
    demands: Sequence[Demand],
    fleet: Fleet,
    seed: int,
    config: AnnealingConfig,
    *,
    screen: bool = True,
    report: Report = unreported,
) -> tuple[tuple[Share, ...], Realisation]:
    """Return a configuration for each application, and layouts of the GPUs that hold them all.

    Args:
        screen: Whether configurations are predicted before they are measured.
        report: Called as GPUs are shared out, configurations are evaluated and programmes are solved.

    Raises:
        DomainError: as for ``checked``.
    """
    checked(demands, fleet)
    arrivals = Arrivals.drawn(np.random.default_rng(seed))
    goals = [_goal(demand, fleet, arrivals) for demand in demands]
    gpus, begun = [fleet.gpus], 0.0
    if len(demands) > 1:
        begun = _SPLITTING
        gpus = split(demands, goals, fleet, part_of(report, 0.0, begun))
    rng = np.random.default_rng(seed)
    shares: list[Share] = []
    for at, (demand, goal, count) in enumerate(zip(demands, goals, gpus, strict=True)):
        first, last = (begun + (1 - begun) * each / len(demands) for each in (at, at + 1))
        of_one = _of_application(part_of(report, first, last), demand.name, [share.objective for share in shares])
        shares.append(_share(demand, goal, count, fleet, arrivals, rng, config, screen, of_one))
    needed: list[int] = np.sum([share.outcome.graph.slices for share in shares], axis=0).tolist()
    return tuple(shares), realise(cast(SliceCounts, tuple(needed)), fleet.layouts)


def _of_application(report: Report, name: str, before: Sequence[float]) -> Report:
    """Return a report function for one search, which averages its best objective with those found before."""

    def of_application(progress: Progress) -> None:
        best = None if progress.best is None else float(np.mean([*before, progress.best]))
        report(Progress(progress.share, f"{name}: {progress.doing}", best))

    return of_application


def checked(demands: Sequence[Demand], fleet: Fleet) -> None:
    """Raise if the demands and the fleet do not make sense together.

    Raises:
        DomainError: there are fewer GPUs than applications, several applications but not an SLA for each, no SLA
            although BASE cannot serve the requests, or running configurations that the GPUs cannot hold.
    """
    if len(demands) > fleet.gpus:
        raise DomainError(f"{len(demands)} applications need as many GPUs, there are {fleet.gpus}")
    for demand in demands:
        base = demand.application.base(fleet.gpus)
        if demand.sla_p95_s is None:
            if len(demands) > 1:
                raise DomainError(f"application {demand.name} needs sla_p95_ms, as there are several applications")
            if demand.application.capacity_per_s(base.weights) <= demand.rate_per_s:
                raise DomainError(
                    f"application {demand.name} needs sla_p95_ms: its best variant on whole GPUs cannot serve "
                    f"{demand.rate_per_s:g} requests per second"
                )
        if demand.running is not None and not can_be_cut(demand.running.slices, fleet.gpus):
            raise DomainError(f"application {demand.name}: running cannot be cut from {fleet.gpus} GPUs")


def split(demands: Sequence[Demand], goals: Sequence[Goal], fleet: Fleet, report: Report = unreported) -> list[int]:
    """Return how many GPUs each application gets.

    Each begins with one and gets more until its limits can be kept. If no number of GPUs keeps them, it gets what the
    others' limits leave. Otherwise, every further GPU goes where it raises the objective most. GPUs that raise none go
    to the application with the most work per GPU, where they shorten waits.
    Idle power does not count here: the fleet draws it whoever has the GPU.
    """
    counts, most = [1] * len(demands), fleet.gpus - len(demands) + 1
    worth = [_worth(demand, goal, 1, fleet) for demand, goal in zip(demands, goals, strict=True)]
    is_hopeless = [
        first == -np.inf and _worth(demand, goal, most, fleet) == -np.inf
        for demand, goal, first in zip(demands, goals, worth, strict=True)
    ]
    more = [_worth(demand, goal, 2, fleet) for demand, goal in zip(demands, goals, strict=True)]
    work = [
        demand.rate_per_s / demand.application.capacity_per_s(demand.application.base(1).weights) for demand in demands
    ]

    def benefit(at: int) -> tuple[int, float, float, int]:
        urgency = 0 if worth[at] > -np.inf else 1 if is_hopeless[at] else 2
        return urgency, _gain(worth[at], more[at]), work[at] / counts[at], -at

    while sum(counts) < fleet.gpus:
        report(Progress(sum(counts) / fleet.gpus, f"sharing out GPU {sum(counts) + 1} of {fleet.gpus}"))
        at = max(range(len(demands)), key=benefit)
        counts[at] += 1
        worth[at] = more[at]
        more[at] = _worth(demands[at], goals[at], counts[at] + 1, fleet)
    return counts


def _gain(before: float, after: float) -> float:
    """Return what a GPU adds to the objective; 0 if that is within the programmes' tolerance."""
    gain = after - before if np.isfinite(before) and np.isfinite(after) else 0.0
    return gain if gain > _LEAST_GAIN else 0.0


def _worth(demand: Demand, goal: Goal, gpus: int, fleet: Fleet) -> float:
    """Return the best objective with this many GPUs, without idle power; minus infinity if limits cannot be kept."""
    application = replace(demand.application, idle_w=0.0)
    found = optimum(application, gpus, demand.rate_per_s, goal, fleet.gco2_per_j, intervals=_SPLIT_INTERVALS)
    return -np.inf if found is None else found.bound


def _goal(demand: Demand, fleet: Fleet, arrivals: Arrivals) -> Goal:
    """Return the goal; if no SLA is given, the p95 of BASE on all GPUs is used."""
    if demand.sla_p95_s is not None:
        return goal_of(demand, fleet, demand.sla_p95_s)
    application = demand.application
    evaluator = QueueEvaluator(application, fleet.gpus, demand.rate_per_s, arrivals)
    return goal_of(demand, fleet, evaluator.measure(application.base(fleet.gpus)).p95_s)


def goal_of(demand: Demand, fleet: Fleet, sla_p95_s: float) -> Goal:
    """Return the goal within an SLA; its baseline is the best variant on a whole GPU that is always busy (§4.1)."""
    application = demand.application
    best = application.best_variant
    energy_j = float(application.service_s[best, -1] * (application.busy_w[best, -1] + application.idle_w))
    baseline = Baseline(float(application.accuracy[best]), energy_j * fleet.baseline_gco2_per_j, sla_p95_s)
    return Goal(baseline, demand.carbon_weight, demand.max_accuracy_loss_pct)


def _share(
    demand: Demand,
    goal: Goal,
    gpus: int,
    fleet: Fleet,
    arrivals: Arrivals,
    rng: np.random.Generator,
    config: AnnealingConfig,
    screen: bool,
    report: Report,
) -> Share:
    application = demand.application
    evaluator = QueueEvaluator(application, gpus, demand.rate_per_s, arrivals)
    start = application.base(gpus)
    if demand.running is not None and can_be_cut(demand.running.slices, gpus):
        start = demand.running
    search = Search(goal, fleet.gco2_per_j, evaluator.measure, evaluator.measure(start))

    def measured(graph: ConfigGraph) -> Outcome:
        done, best = len(search.measured), search.objective(search.best)
        report(Progress(_SEARCHING * done / config.max_evaluations, f"evaluation {done + 1}", best))
        return evaluator.measure(graph)

    search.measure = measured
    if screen:
        model = QueueEvaluator(application, gpus, demand.rate_per_s, Arrivals.drawn(rng))
        search_screened(search, Screen(application, gpus, demand.rate_per_s, model.measure, rng), config)
    else:
        anneal(search, application, gpus, rng, config)
    best = search.objective(search.best)

    def bounding(progress: Progress) -> None:
        report(Progress(_SEARCHING + (1 - _SEARCHING) * progress.share, f"bound, {progress.doing}", best))

    found = optimum(application, gpus, demand.rate_per_s, goal, fleet.gco2_per_j, report=bounding)
    return Share(
        gpus,
        search.best,
        goal,
        best,
        None if found is None else found.bound,
        goal.allows(search.best.accuracy, search.best.p95_s),
        len(search.measured),
        search.leading(MAX_LEADING),
    )
