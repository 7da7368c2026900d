"""Model variants, slices and partitions, converted between messages and the core."""

from collections.abc import Sequence

import numpy as np

from services.contracts import partition as contracts
from services.core.domain.solving import Backend, Report, SolveStatus, unreported
from services.core.domain.units import J_PER_KWH
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.layouts import LAYOUTS, SLICES, counts_of
from services.core.policies.clover.objective import delta_accuracy_pct
from services.core.policies.clover.partition import Demand, Fleet, Share, partition


def demand_of(asked: contracts.PartitionApplication, idle_w: float) -> Demand:
    """Convert an application with its load and limits to the core's; ``idle_w`` is that of a GPU."""
    shape = (len(asked.variants), len(SLICES))
    service_s, jitter_s, busy_w = (np.full(shape, np.nan) for _ in range(3))
    for row, variant in enumerate(asked.variants):
        for profile in variant.profiles:
            at = row, contracts.SLICE_NAMES.index(profile.slice)
            service_s[at] = profile.service_ms / 1_000
            late_ms = profile.service_ms if profile.p95_ms is None else profile.p95_ms
            jitter_s[at] = max(late_ms - profile.service_ms, 0.0) / 1_644.9
            busy_w[at] = profile.busy_w
    running = np.zeros(shape, dtype=np.int64)
    rows = {variant.name: row for row, variant in enumerate(asked.variants)}
    for each in asked.running:
        running[rows[each.variant], contracts.SLICE_NAMES.index(each.slice)] += each.count
    accuracy = np.array([variant.accuracy_pct for variant in asked.variants])
    return Demand(
        asked.name,
        Application(tuple(rows), accuracy, service_s, jitter_s, busy_w, idle_w),
        asked.requests_per_s,
        asked.carbon_weight,
        asked.max_accuracy_loss_pct,
        None if asked.sla_p95_ms is None else asked.sla_p95_ms / 1_000,
        ConfigGraph(running) if asked.running else None,
    )


def demands_of(problem: contracts.PartitionRequest) -> tuple[list[Demand], Fleet]:
    """Convert applications and GPUs to the core's."""
    baseline = problem.baseline_gco2_per_kwh or problem.intensity_gco2_per_kwh
    layouts = tuple(layout - 1 for layout in problem.layouts or [1] * problem.gpus)
    fleet = Fleet(problem.gpus, layouts, problem.intensity_gco2_per_kwh / J_PER_KWH, baseline / J_PER_KWH)
    return [demand_of(each, problem.idle_w) for each in problem.applications], fleet


def solve_partition(problem: contracts.PartitionProblem, report: Report = unreported) -> contracts.PartitionResult:
    """Return the answer to a problem; ``DomainError`` if the problem makes no sense as a whole."""
    demands, fleet = demands_of(problem)
    config = AnnealingConfig(max_evaluations=problem.max_evaluations)
    shares, realised = partition(demands, fleet, problem.seed, config, screen=problem.screen, report=report)
    plans = [_plan(demand, share, fleet, problem.candidates) for demand, share in zip(demands, shares, strict=True)]
    held = np.sum([counts_of(LAYOUTS[layout]) for layout in realised.layouts], axis=0)
    if (np.sum([share.outcome.graph.slices for share in shares], axis=0) > held).any():
        raise AssertionError("the layouts do not hold the instances")
    kept = all(share.keeps_limits for share in shares)
    return contracts.PartitionResult(
        status=SolveStatus.FEASIBLE if kept else SolveStatus.INFEASIBLE,
        solver=Backend.HIGHS,
        objective=float(np.mean([plan.objective_pct for plan in plans])),
        bound=None,
        note="" if kept else "no configuration was found that keeps the limits of every application",
        applications=plans,
        layouts=[layout + 1 for layout in realised.layouts],
        recut=list(realised.recut),
    )


def instances_of(variants: Sequence[str], graph: ConfigGraph) -> list[contracts.VariantInstances]:
    """Return a configuration's instances, by variant and slice."""
    return [
        contracts.VariantInstances(
            variant=variants[row], slice=contracts.SLICE_NAMES[column], count=int(graph.weights[row, column])
        )
        for row, column in np.argwhere(graph.weights).tolist()
    ]


def _plan(demand: Demand, share: Share, fleet: Fleet, candidates: int) -> contracts.ApplicationPlan:
    outcome, goal, variants = share.outcome, share.goal, demand.application.variants

    def candidate(found: Outcome) -> contracts.PartitionCandidate:
        return contracts.PartitionCandidate(
            instances=instances_of(variants, found.graph),
            objective_pct=goal.objective(found.accuracy, found.energy_j * fleet.gco2_per_j),
            accuracy_pct=found.accuracy,
            energy_j_per_request=found.energy_j,
            p95_ms=1_000 * found.p95_s,
        )

    return contracts.ApplicationPlan(
        name=demand.name,
        gpus=share.gpus,
        instances=instances_of(variants, outcome.graph),
        keeps_limits=share.keeps_limits,
        objective_pct=share.objective,
        bound_pct=share.bound,
        accuracy_pct=outcome.accuracy,
        accuracy_loss_pct=-delta_accuracy_pct(outcome.accuracy, goal.baseline.accuracy),
        carbon_gco2_per_request=outcome.energy_j * fleet.gco2_per_j,
        energy_j_per_request=outcome.energy_j,
        p95_ms=1_000 * outcome.p95_s,
        sla_p95_ms=1_000 * goal.baseline.p95_s,
        evaluations=share.evaluations,
        candidates=[candidate(found) for found in share.leading[:candidates]],
    )
