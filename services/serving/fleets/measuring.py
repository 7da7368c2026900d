"""The search by measurement: which configuration of a fleet is tried next, and what was measured of one. Pure.

Each application has a search of its own, on its share of the GPUs, by the paper's annealing
(``core/policies/clover/measured.py``): first what the optimizer proposes, then neighbours. All are tried at once: an
evaluation is one configuration of the whole fleet. Applications whose search has ended run their best measured one.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from services.contracts.apps import AppEvaluation, EvaluationFigures, FleetEvaluation, FleetSearch
from services.contracts.partition import (
    SLICE_NAMES,
    ApplicationPlan,
    PartitionProblem,
    PartitionResult,
    VariantInstances,
)
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.layouts import can_be_cut
from services.core.policies.clover.measured import MeasuredSearch
from services.core.policies.clover.objective import delta_accuracy_pct
from services.core.policies.clover.partition import goal_of
from services.serving.fleets.assignment import WHOLE, GpuState, Kind, Placed
from services.serving.fleets.observations import bucket_of, percentile_ms
from services.serving.fleets.problem import slice_name
from services.serving.repository.apps import Seen
from services.solving.partition import demands_of, instances_of

Configuration = Mapping[str, ConfigGraph]  #: The instances of each application


@dataclass(frozen=True)
class Window:
    """What was seen of an application during an evaluation."""

    seen: Seen  #: Its requests
    energy_j: float  #: GPU energy: what its instances used, and the idle energy of the rest of its share
    waiting: int  #: Requests in its queue at the end


@dataclass(frozen=True)
class End:
    """The end of a search: why it ended, and what should run from then on."""

    detail: str
    chosen: Configuration


def searches_of(
    problem: PartitionProblem, found: PartitionResult, config: AnnealingConfig
) -> dict[str, MeasuredSearch]:
    """Return the search of each application, made from what the optimizer was asked and what it found."""
    demands, fleet = demands_of(problem)
    plans = {plan.name: plan for plan in found.applications}
    searches: dict[str, MeasuredSearch] = {}
    for at, demand in enumerate(demands):
        plan, application = plans[demand.name], demand.application
        proposed = [plan.instances, *(each.instances for each in plan.candidates)]
        searches[demand.name] = MeasuredSearch(
            application,
            plan.gpus,
            demand.rate_per_s,
            goal_of(demand, fleet, plan.sla_p95_ms / 1_000),
            fleet.gco2_per_j,
            list(dict.fromkeys(graph_of(application, each) for each in proposed)),
            problem.seed + at,
            config,
        )
    return searches


def graph_of(application: Application, instances: Sequence[VariantInstances]) -> ConfigGraph:
    """Return a configuration as the core represents it."""
    weights = np.zeros(application.service_s.shape, dtype=np.int64)
    for each in instances:
        weights[application.variants.index(each.variant), SLICE_NAMES.index(each.slice)] += each.count
    return ConfigGraph(weights)


def running_of(kinds: Mapping[Kind, int], searches: Mapping[str, MeasuredSearch]) -> Configuration:
    """Return instances that run, each of a variant and a slice that its application's search knows."""
    weights = {name: np.zeros(each.application.service_s.shape, np.int64) for name, each in searches.items()}
    for (name, variant, size), count in kinds.items():
        column = SLICE_NAMES.index(slice_name(size))
        weights[name][searches[name].application.variants.index(variant), column] += count
    return {name: ConfigGraph(each) for name, each in weights.items()}


def kinds_in(evaluation: FleetEvaluation) -> Counter[Kind]:
    """Return what runs, or is to run, in an evaluation."""
    return Counter(
        {(app.name, each.variant, each.slice): each.count for app in evaluation.applications for each in app.instances}
    )


def configuration_of(
    applications: Sequence[AppEvaluation | ApplicationPlan], searches: Mapping[str, MeasuredSearch]
) -> Configuration:
    """Return the configuration of an evaluation's applications, or of a plan's."""
    return {each.name: graph_of(searches[each.name].application, each.instances) for each in applications}


def evaluations_of(
    configuration: Configuration, searches: Mapping[str, MeasuredSearch], tried: Collection[str] = ()
) -> list[AppEvaluation]:
    """Return a configuration to be measured, with the model's predictions."""
    return [
        AppEvaluation(
            name=name,
            instances=instances_of(search.application.variants, configuration[name]),  # equal ones in one order
            is_tried=name in tried,
            predicted=_predicted(search, configuration[name]),
        )
        for name, search in sorted(searches.items())
    ]


def _predicted(search: MeasuredSearch, graph: ConfigGraph) -> EvaluationFigures | None:
    found = search.predicted(graph)
    return None if found is None else _figures(search, found.accuracy, 1_000 * found.p95_s, found.energy_j)


def _figures(search: MeasuredSearch, accuracy_pct: float, p95_ms: float, energy_j: float) -> EvaluationFigures:
    return EvaluationFigures(
        objective_pct=search.objective(accuracy_pct, energy_j),
        accuracy_pct=accuracy_pct,
        p95_ms=p95_ms,
        energy_j_per_request=energy_j,
    )


def measured_of(
    present: FleetEvaluation,
    searches: Mapping[str, MeasuredSearch],
    windows: Mapping[str, Window],
    measured_to: datetime,
) -> FleetEvaluation:
    """Return an evaluation completed with its measurements. Every application must have answers."""
    applications: list[AppEvaluation] = []
    for each in present.applications:
        window, search = windows[each.name], searches[each.name]
        seen = window.seen
        p95_ms = percentile_ms(seen.latency, 0.95)
        assert p95_ms is not None
        accuracy_pct, energy_j = seen.accuracy_sum / seen.answered, window.energy_j / seen.answered
        beyond = bucket_of(1_000 * search.goal.baseline.p95_s)
        applications.append(
            each.model_copy(
                update={
                    "measured": _figures(search, accuracy_pct, p95_ms, energy_j),
                    "answered": seen.answered,
                    "late": sum(count for bucket, count in seen.latency.items() if bucket > beyond),
                    "failed": seen.failed,
                }
            )
        )
    return present.model_copy(update={"applications": applications, "measured_to": measured_to})


def without_room(
    evaluation: FleetEvaluation, searches: Mapping[str, MeasuredSearch], windows: Mapping[str, Window], share: float
) -> str | None:
    """Return why no other configuration may be tried after this one; None if the SLAs leave room."""
    for each in evaluation.applications:
        of, waiting = searches[each.name], windows[each.name].waiting
        sla_ms = 1_000 * of.goal.baseline.p95_s
        if each.measured is not None and each.measured.p95_ms > share * sla_ms:
            return (
                f"The p95 of {each.name} was {each.measured.p95_ms:.0f} ms, "
                f"which is more than {100 * share:.0f} % of its SLA of {sla_ms:g} ms."
            )
        queue_ms = 1_000 * waiting / of.application.capacity_per_s(graph_of(of.application, each.instances).weights)
        if queue_ms > share * sla_ms:
            return (
                f"The queue of {each.name} held {waiting} requests, which take {queue_ms:.0f} ms: "
                f"more than {100 * share:.0f} % of its SLA of {sla_ms:g} ms."
            )
    return None


def next_step(
    search: FleetSearch,
    searches: Mapping[str, MeasuredSearch],
    planned: Configuration,
    blocked: str | None,
    now: datetime,
    limit_s: float,
) -> list[AppEvaluation] | End:
    """Return what follows an evaluation: the configuration to bring up and measure next, or the end.

    Args:
        search: What was measured, including the last evaluation.
        planned: What the optimizer found, in case what runs breaks a limit.
        blocked: Why no other configuration may be tried after the present one.
        limit_s: The time after which nothing more is tried.

    Raises:
        DomainError: The measurements do not belong to these searches.
    """
    last, is_first = search.evaluations[-1], len(search.evaluations) == 1
    if is_first and last.detail is not None:
        return End(last.detail, planned)
    if is_first and (broken := _broken(last, searches)):
        return End(f"What runs breaks the limits of {broken}: the model's plan is carried out unmeasured.", planned)
    following = {name: _following(search, name, each) for name, each in searches.items()}
    best = {name: graph for name, (_, graph) in following.items()}
    if last.detail is not None:
        return End(last.detail, best)
    if (now - search.begun_at).total_seconds() >= limit_s:
        return End(f"It ended after {limit_s:.0f} s.", best)
    tried = {name: graph for name, (graph, _) in following.items() if graph is not None}
    if not tried:
        return End("The search ended by its rules: nothing better was found any more.", best)
    if blocked is None:
        return evaluations_of({**best, **tried}, searches, tried)
    if configuration_of(search.present.applications, searches) == best:
        return End(blocked, best)
    return evaluations_of(best, searches)


def _following(search: FleetSearch, name: str, of: MeasuredSearch) -> tuple[ConfigGraph | None, ConfigGraph]:
    """Return an application's next configuration to measure, None if there is none, and its best one so far.

    If its share of the GPUs cannot hold what it ran before, the search begins with what the model proposes.
    """
    outcomes: list[Outcome] = []
    for at, evaluation in enumerate(search.evaluations):
        (each,) = (each for each in evaluation.applications if each.name == name)
        if each.measured is None or not (each.is_tried or at == 0):
            continue
        graph = graph_of(of.application, each.instances)
        if can_be_cut(graph.slices, of.gpus):
            figures = each.measured
            outcomes.append(Outcome(graph, figures.accuracy_pct, figures.energy_j_per_request, figures.p95_ms / 1_000))
    if not outcomes:
        return of.first[0], of.first[0]
    following, best = of.next_graph(outcomes[0], outcomes[1:])
    return following, best.graph


def _broken(evaluation: FleetEvaluation, searches: Mapping[str, MeasuredSearch]) -> str | None:
    for each in evaluation.applications:
        figures = each.measured
        if figures and not searches[each.name].goal.allows(figures.accuracy_pct, figures.p95_ms / 1_000):
            return each.name
    return None


def found_by(
    result: PartitionResult, search: FleetSearch, searches: Mapping[str, MeasuredSearch], chosen: Configuration
) -> PartitionResult:
    """Return a plan's result with the configuration chosen by measurement and its measured figures."""
    plans: list[ApplicationPlan] = []
    for plan in result.applications:
        of, graph = searches[plan.name], chosen[plan.name]
        evaluated = (
            each
            for evaluation in reversed(search.evaluations)
            for each in evaluation.applications
            if each.name == plan.name and each.measured and graph_of(of.application, each.instances) == graph
        )
        found = next(evaluated, None)
        changes: dict[str, object] = {"instances": instances_of(of.application.variants, graph), "candidates": []}
        if found is not None and (figures := found.measured) is not None:
            changes |= {
                "objective_pct": figures.objective_pct,
                "accuracy_pct": figures.accuracy_pct,
                "accuracy_loss_pct": -delta_accuracy_pct(figures.accuracy_pct, of.goal.baseline.accuracy),
                "carbon_gco2_per_request": figures.energy_j_per_request * of.gco2_per_j,
                "energy_j_per_request": figures.energy_j_per_request,
                "p95_ms": figures.p95_ms,
                "evaluations": len(search.evaluations),
            }
        plans.append(plan.model_copy(update=changes))
    return result.model_copy(update={"applications": plans})


def held_gpus(name: str, gpus: Sequence[GpuState], instances: Sequence[Placed]) -> float:
    """Return how many GPUs an application's instances hold; a slice counts as its share of its GPU's slices."""
    sizes = {gpu.at: sum(gpu.sizes) or 7 for gpu in gpus}
    return sum(
        1.0 if each.kind[2] == WHOLE else int(each.kind[2][0]) / sizes[each.gpu]
        for each in instances
        if each.kind[0] == name and each.gpu in sizes
    )
