"""The queue model, and the closed form that screens for it."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import pytest

from services.core.domain.errors import DomainError
from services.core.policies.clover.evaluation import REQUESTS, WARM_UP, Arrivals, serve
from services.core.policies.clover.prediction import predict
from tests.support.clover import a_graph, an_application, an_evaluator


def test_it_is_the_queue_that_a_textbook_would_simulate() -> None:
    arrivals = Arrivals.drawn(np.random.default_rng(3), 3_000)
    servers, service_s = np.array([2, 1]), np.array([0.9, 0.4])

    latency_s, _ = serve(arrivals, 3.9, servers, service_s, np.zeros(2))

    free = [(-2.0, 0), (-1.0, 0), (-3.0, 1)]
    waiting, latencies = sorted(free), list[float]()
    for at in arrivals.at / 3.9:
        since, kind = waiting.pop(0)
        done = max(since, at) + service_s[kind]
        latencies.append(done - at)
        heappush(waiting, (done, kind))
        waiting.sort()
    assert heappop(waiting)[0] > 0
    assert np.quantile(latency_s, 0.5) == pytest.approx(np.quantile(latencies[WARM_UP:], 0.5), rel=1e-4)
    assert np.quantile(latency_s, 0.95) == pytest.approx(np.quantile(latencies[WARM_UP:], 0.95), rel=1e-4)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1 at 70 %: the mean wait is rho / (2 (1 - rho)) services."""
    waits = [
        serve(Arrivals.drawn(np.random.default_rng(seed)), 0.7, np.array([1]), np.array([1.0]), np.array([0.0]))
        for seed in range(6)
    ]

    mean_wait_s = np.mean([latency_s.mean() - 1 for latency_s, _ in waits])

    assert mean_wait_s == pytest.approx(0.7 / (2 * 0.3), rel=0.06)
    assert all(latency_s.size == REQUESTS for latency_s, _ in waits)


def test_an_overload_is_late_and_still_counted() -> None:
    application = an_application()
    evaluator = an_evaluator(application, 2)

    late = evaluator.measure(a_graph([0, 0, 0, 0, 0], [1, 0, 0, 0, 0]))

    assert late.p95_s > 10 * evaluator.measure(application.base(2)).p95_s
    assert np.isinf(predict(application, late.graph.weights[None], 2, evaluator.rate_per_s).p95_s[0])


def test_energy_is_idle_draw_and_work() -> None:
    application = an_application()
    evaluator = an_evaluator(application, 2, load=0.5)

    found = evaluator.measure(application.base(2))

    rate_per_s = 0.5 * 2 / 0.040
    assert found.energy_j == pytest.approx(0.040 * 160 + 2 * 30 / rate_per_s)
    assert found.accuracy == pytest.approx(95)


def test_predictions_are_near_what_is_measured() -> None:
    application = an_application()
    evaluator = an_evaluator(application, 3, requests=REQUESTS)
    graphs = [application.base(3), a_graph([7, 0, 0, 0, 0], [0, 0, 0, 0, 2]), a_graph([5, 2, 1, 1, 1], [0, 0, 0, 0, 0])]

    found = predict(application, np.stack([graph.weights for graph in graphs]), 3, evaluator.rate_per_s)

    for at, graph in enumerate(graphs):
        measured = evaluator.measure(graph)
        assert found.energy_j[at] == pytest.approx(measured.energy_j, rel=0.03)
        assert found.accuracy[at] == pytest.approx(measured.accuracy, rel=0.005)
        assert found.p95_s[at] == pytest.approx(measured.p95_s, rel=0.15)


def test_an_instance_where_it_does_not_fit_is_refused() -> None:
    evaluator = an_evaluator(an_application(best_fits_from=3), 1)

    with pytest.raises(DomainError, match="variants fit"):
        evaluator.measure(a_graph([0, 0, 0, 0, 0], [1, 0, 0, 0, 0]))
