"""Annealing, the schemes beside it, and the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lab.inference.schemes import best_measured, co2opt, random_search, uniform_graphs
from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig, Search, anneal
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Arrivals, Outcome, QueueEvaluator
from services.core.policies.clover.layouts import can_be_cut
from services.core.policies.clover.objective import Baseline, Goal
from services.core.policies.clover.optimum import optimum
from services.core.policies.clover.screen import Screen, search_screened
from tests.support.clover import a_goal, a_graph, an_application, an_evaluator

CONFIG = AnnealingConfig()


def a_search(evaluator: QueueEvaluator, goal: Goal, intensity: float = 1.0) -> Search:
    base = evaluator.measure(evaluator.application.base(evaluator.gpus))
    return Search(goal, intensity, evaluator.measure, base)


def screened_by_model(search: Search, evaluator: QueueEvaluator, rng: np.random.Generator) -> None:
    """Search with a screen whose queue model serves other requests than those that are measured."""
    application, gpus, rate_per_s = evaluator.application, evaluator.gpus, evaluator.rate_per_s
    model = QueueEvaluator(application, gpus, rate_per_s, Arrivals.drawn(np.random.default_rng(99), 4_000))
    search_screened(search, Screen(application, gpus, rate_per_s, model.measure, rng), CONFIG)


def every_graph(application: Application, gpus: int) -> list[ConfigGraph]:
    """Return all configurations of a GPU or two."""
    columns = [
        [counts for counts in product(range(most + 1), repeat=2) if sum(counts) <= most]
        for most in (7 * gpus, 3 * gpus, 2 * gpus, gpus, gpus)
    ]
    found = [ConfigGraph(np.array(chosen, dtype=np.int64).T) for chosen in product(*columns)]
    return [graph for graph in found if graph.instances and can_be_cut(graph.slices, gpus)]


def test_temperature_falls_from_1_to_a_tenth_and_stays() -> None:
    assert [CONFIG.temperature(at) for at in (0, 1, 18, 40)] == pytest.approx([1.0, 0.95, 0.1, 0.1])


@pytest.mark.parametrize("intensity", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("screened", [False, True])
def test_what_is_chosen_keeps_the_limits_and_is_never_worse_than_the_incumbent(
    intensity: float, screened: bool
) -> None:
    evaluator = an_evaluator(an_application(), 3)
    goal = a_goal(evaluator, max_accuracy_loss_pct=3.0)
    for seed in range(4):
        search = a_search(evaluator, goal, intensity)
        rng = np.random.default_rng(seed)
        if screened:
            screened_by_model(search, evaluator, rng)
        else:
            anneal(search, evaluator.application, 3, rng, CONFIG)
        assert goal.allows(search.best.accuracy, search.best.p95_s)
        assert search.objective(search.best) >= search.objective(search.start)
        assert len(search.measured) <= CONFIG.max_evaluations


def test_equal_seeds_search_equally() -> None:
    evaluator = an_evaluator(an_application(), 2)
    trails: list[list[bytes]] = []
    for _ in range(2):
        search = a_search(evaluator, a_goal(evaluator))
        anneal(search, evaluator.application, 2, np.random.default_rng(5), CONFIG)
        trails.append([outcome.graph.key for outcome in search.measured])

    assert trails[0] == trails[1]


def test_it_stops_after_five_evaluations_without_gain() -> None:
    evaluator = an_evaluator(an_application(), 1)
    search = a_search(evaluator, a_goal(evaluator, carbon_weight=0.0))  # nothing is more accurate than BASE

    anneal(search, evaluator.application, 1, np.random.default_rng(1), CONFIG)

    assert len(search.measured) == 5


def test_screening_reaches_the_true_optimum_with_fewer_evaluations() -> None:
    """All graphs of one GPU, measured: the optimum is known."""
    application = an_application()
    evaluator = an_evaluator(application, 1, load=0.6)
    goal = a_goal(evaluator)
    known = [evaluator.measure(graph) for graph in every_graph(application, 1)]
    allowed = [outcome for outcome in known if goal.allows(outcome.accuracy, outcome.p95_s)]
    plain, screened = a_search(evaluator, goal), a_search(evaluator, goal)
    best = max(map(plain.objective, allowed))

    anneal(plain, application, 1, np.random.default_rng(1), CONFIG)
    screened_by_model(screened, evaluator, np.random.default_rng(1))

    assert screened.objective(screened.best) >= best - 0.01 * abs(best)
    assert len(screened.measured) <= len(plain.measured) / 2


def test_the_bound_is_above_every_graph_and_near_the_best() -> None:
    application = an_application()
    evaluator = an_evaluator(application, 1, load=0.6)
    goal = a_goal(evaluator)
    search = a_search(evaluator, goal)
    known = [evaluator.measure(graph) for graph in every_graph(application, 1)]
    best = max(search.objective(each) for each in known if goal.allows(each.accuracy, each.p95_s))

    found = optimum(application, 1, evaluator.rate_per_s, goal, 1.0)

    assert found is not None
    assert best <= found.bound + 0.1
    measured = best_measured(found, evaluator.measure, goal, 1.0)
    assert measured is not None
    assert search.objective(measured) >= best - 0.02 * abs(best)


def test_a_floor_that_only_the_best_variant_keeps_leaves_only_that() -> None:
    evaluator = an_evaluator(an_application(), 2)
    goal = a_goal(evaluator, carbon_weight=1.0, max_accuracy_loss_pct=0.0)
    search = a_search(evaluator, goal)

    screened_by_model(search, evaluator, np.random.default_rng(2))

    assert not search.best.graph.weights[0].any()
    proposed = optimum(evaluator.application, 2, evaluator.rate_per_s, goal, 1.0)
    assert proposed is not None
    assert not any(graph.weights[0].any() for graph in proposed.proposals)


@pytest.mark.parametrize(("gpus", "incumbent"), [(2, "below the floor"), (1, "overloaded")])
def test_an_incumbent_that_breaks_a_limit_is_left(gpus: int, incumbent: str) -> None:
    """As when the floor is raised, or the load has grown."""
    application = an_application()
    evaluator = an_evaluator(application, gpus, load=0.7)
    goal = a_goal(evaluator, max_accuracy_loss_pct=2.0)
    graph = co2opt(application, gpus) if incumbent == "below the floor" else a_graph([0] * 5, [2, 0, 0, 0, 0])
    start = evaluator.measure(graph)
    assert not goal.allows(start.accuracy, start.p95_s)
    search = Search(goal, 1.0, evaluator.measure, start)

    screened_by_model(search, evaluator, np.random.default_rng(3))

    assert goal.allows(search.best.accuracy, search.best.p95_s)


@pytest.mark.parametrize("max_accuracy_loss_pct", [1.5, 2.5, 4.0])
def test_a_tight_floor_is_used_up(max_accuracy_loss_pct: float) -> None:
    """Against all graphs of a GPU, measured: within a per cent of the true optimum, in half the paper's evaluations."""
    application = an_application()
    evaluator = an_evaluator(application, 1, load=0.6)
    goal = a_goal(evaluator, max_accuracy_loss_pct=max_accuracy_loss_pct)
    known = [evaluator.measure(graph) for graph in every_graph(application, 1)]
    kept = [each for each in known if goal.allows(each.accuracy, each.p95_s)]
    for seed in range(3):
        search, printed = a_search(evaluator, goal), a_search(evaluator, goal)

        screened_by_model(search, evaluator, np.random.default_rng(seed))
        anneal(printed, application, 1, np.random.default_rng(seed), CONFIG)

        assert search.objective(search.best) >= 0.99 * max(map(search.objective, kept)) > 0
        assert len(search.measured) <= len(printed.measured) / 2


@pytest.mark.parametrize(("load", "max_accuracy_loss_pct"), [(0.03, 1.0), (0.15, 2.0), (0.15, 3.1)])
def test_a_floor_is_used_up_where_many_configurations_are_predicted_to_miss_it_barely(
    load: float, max_accuracy_loss_pct: float
) -> None:
    """On many idle GPUs more of them lie within the tolerance than the queue model is run for."""
    application = an_application()
    evaluator = an_evaluator(application, 41, load=load)
    goal = a_goal(evaluator, max_accuracy_loss_pct=max_accuracy_loss_pct)
    search = a_search(evaluator, goal)

    screened_by_model(search, evaluator, np.random.default_rng(1))

    found = optimum(application, 41, evaluator.rate_per_s, goal, 1.0, intervals=6)
    assert found is not None
    assert search.objective(search.best) >= 0.97 * found.bound > 0


def test_where_nothing_keeps_the_limits_the_least_broken_is_found() -> None:
    """One GPU at twice what its best variant can serve, with a floor that only that variant keeps."""
    application = an_application()
    evaluator = an_evaluator(application, 1, load=2.0)
    base = evaluator.measure(application.base(1))
    goal = Goal(Baseline(base.accuracy, base.energy_j, 0.1), max_accuracy_loss_pct=0.0)
    assert optimum(application, 1, evaluator.rate_per_s, goal, 1.0) is None
    start = evaluator.measure(a_graph([0] * 5, [1, 0, 0, 0, 0]))
    search = Search(goal, 1.0, evaluator.measure, start)

    screened_by_model(search, evaluator, np.random.default_rng(1))

    assert goal.keeps_floor(search.best.accuracy)
    assert search.best.p95_s < start.p95_s


def test_what_turned_out_to_break_a_limit_is_not_proposed_again() -> None:
    """As with a model that is wrong: it promises the same configuration in the next hour."""
    application = an_application()
    evaluator = an_evaluator(application, 2)
    goal = a_goal(evaluator)
    screen = Screen(application, 2, evaluator.rate_per_s, evaluator.measure, np.random.default_rng(1))
    proposed: list[ConfigGraph] = []

    def late(graph: ConfigGraph) -> Outcome:
        proposed.append(graph)
        return replace(evaluator.measure(graph), p95_s=9 * goal.baseline.p95_s)

    for _ in range(2):
        base = evaluator.measure(application.base(2))
        search_screened(Search(goal, 1.0, late, base), screen, CONFIG)

    assert len(proposed) == 2 * CONFIG.patience
    assert len(set(proposed)) == len(proposed)


def test_what_is_known_is_not_measured_again() -> None:
    evaluator = an_evaluator(an_application(), 2)
    goal = a_goal(evaluator)
    first = a_search(evaluator, goal)
    screened_by_model(first, evaluator, np.random.default_rng(1))
    again = a_search(evaluator, goal)

    again.best = max((again.best, *first.measured), key=again.worth)
    screened_by_model(again, evaluator, np.random.default_rng(2))

    assert first.measured
    assert len(again.measured) <= 1
    assert again.objective(again.best) >= first.objective(first.best)


def test_co2opt_is_the_smallest_variant_on_sevenths() -> None:
    assert co2opt(an_application(), 2) == a_graph([14, 0, 0, 0, 0], [0, 0, 0, 0, 0])


def test_oracle_tries_every_layout_with_every_mixture_once() -> None:
    found = list(uniform_graphs(an_application(), 2))

    assert len(found) == len(set(found))
    assert a_graph([6, 0, 0, 0, 0], [8, 0, 0, 0, 0]) in found
    assert all((graph.weights % 2 == 0).all() and can_be_cut(graph.slices, 2) for graph in found)


def test_blover_searches_until_five_do_not_gain() -> None:
    evaluator = an_evaluator(an_application(), 2)
    search = a_search(evaluator, a_goal(evaluator))

    random_search(search, evaluator.application, 2, np.random.default_rng(1), CONFIG)

    assert 5 <= len(search.measured) <= CONFIG.max_evaluations
    assert all(can_be_cut(outcome.graph.slices, 2) for outcome in search.measured)


def test_an_application_that_makes_no_sense_is_refused() -> None:
    nowhere = np.full((1, 5), np.nan)
    with pytest.raises(DomainError, match="variant huge fits no slice"):
        Application(("huge",), np.array([90.0]), nowhere, nowhere, nowhere, 30.0)
    sliced = np.array([[0.1, 0.1, 0.1, 0.1, np.nan]])
    application = Application(("sliced",), np.array([90.0]), sliced, sliced, sliced, 30.0)
    with pytest.raises(DomainError, match="does not run on a whole GPU"):
        application.base(1)
