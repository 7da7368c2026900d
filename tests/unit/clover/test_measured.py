"""The search that is decided anew from what was measured so far."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.evaluation import Outcome, QueueEvaluator
from services.core.policies.clover.measured import MeasuredSearch
from tests.support.clover import a_goal, a_graph, an_application, an_evaluator


def a_measured_search(evaluator: QueueEvaluator, seed: int = 3) -> MeasuredSearch:
    proposed = [a_graph([2, 1, 0, 0, 0], [0] * 5), a_graph([0] * 5, [0, 0, 1, 0, 0])]
    goal = a_goal(evaluator)
    return MeasuredSearch(
        evaluator.application, evaluator.gpus, evaluator.rate_per_s, goal, 1.0, proposed, seed, AnnealingConfig()
    )


def all_measured(search: MeasuredSearch, evaluator: QueueEvaluator) -> tuple[Outcome, list[Outcome], Outcome]:
    """Measure what is asked for, deciding from the beginning each time; return incumbent, outcomes and the best."""
    start = evaluator.measure(evaluator.application.base(evaluator.gpus))
    measured: list[Outcome] = []
    while True:
        graph, best = search.next_graph(start, measured)
        if graph is None:
            return start, measured, best
        measured.append(evaluator.measure(graph))


def test_proposals_are_measured_first_and_then_neighbours_that_the_model_allows() -> None:
    evaluator = an_evaluator(an_application(), 2)
    search = a_measured_search(evaluator)
    start, measured, best = all_measured(search, evaluator)
    assert [each.graph for each in measured[:2]] == list(search.first)
    assert len(measured) > 2
    assert all(search.may_run(each.graph) for each in measured[2:])
    graphs = [start.graph, *(each.graph for each in measured)]
    assert len(set(graphs)) == len(graphs), "nothing is measured twice"
    allowed = [each for each in (start, *measured) if search.goal.allows(each.accuracy, each.p95_s)]
    worths = [search.objective(each.accuracy, each.energy_j) for each in allowed]
    assert search.objective(best.accuracy, best.energy_j) == max(worths)


def test_it_ends_after_five_evaluations_in_a_row_without_a_better_one() -> None:
    evaluator = an_evaluator(an_application(), 2)
    search = a_measured_search(evaluator)
    _, measured, best = all_measured(search, evaluator)
    at = next((at for at, each in enumerate(measured) if each.graph == best.graph), -1)
    assert len(measured) - 1 - at == 5


def test_what_is_measured_decides_where_the_search_goes() -> None:
    """The same seed; one configuration turned out worse than it was."""
    evaluator = an_evaluator(an_application(), 2)
    search = a_measured_search(evaluator)
    start, measured, best = all_measured(search, evaluator)
    at = next(at for at, each in enumerate(measured) if each.graph == best.graph)
    worse = [*measured[:at], replace(measured[at], energy_j=10 * measured[at].energy_j)]
    assert search.next_graph(start, worse)[1].graph != best.graph


def test_outcomes_of_another_search_are_refused() -> None:
    evaluator = an_evaluator(an_application(), 2)
    search = a_measured_search(evaluator)
    start, measured, _ = all_measured(search, evaluator)
    with pytest.raises(DomainError, match="not of this search"):
        search.next_graph(start, measured[::-1])
    with pytest.raises(DomainError, match="not of this search"):
        search.next_graph(start, [*measured, measured[0]])


def test_a_model_that_allows_no_neighbour_ends_the_search() -> None:
    evaluator = an_evaluator(an_application(), 2)
    search = a_measured_search(evaluator)
    tight = replace(search.goal, baseline=replace(search.goal.baseline, p95_s=1e-4))
    search = replace(search, goal=tight, first=())
    start = evaluator.measure(evaluator.application.base(2))
    assert search.next_graph(start, []) == (None, start)


def test_instances_that_cannot_serve_the_requests_have_no_prediction() -> None:
    evaluator = an_evaluator(an_application(), 2, load=0.9)
    search = a_measured_search(evaluator)
    assert search.predicted(a_graph([0] * 5, [1, 0, 0, 0, 0])) is None
    assert search.predicted(evaluator.application.base(2)) is not None
