"""Small applications for tests of Clover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Arrivals, QueueEvaluator
from services.core.policies.clover.objective import Baseline, Goal

SPEED = np.array([0.35, 0.55, 0.7, 0.8, 1.0])
"""Of the slices 1g to 7g, against a whole GPU."""


def an_application(best_fits_from: int = 0) -> Application:
    """Return a small and a large variant; the large one runs on slices from this column on."""
    service_s = np.outer([0.010, 0.040], 1 / SPEED)
    service_s[1, :best_fits_from] = np.nan
    busy_w = np.outer([60.0, 160.0], SPEED)
    return Application(("small", "large"), np.array([90.0, 95.0]), service_s, 0.02 * service_s, busy_w, idle_w=30.0)


def an_evaluator(application: Application, gpus: int, load: float = 0.8, requests: int = 4_000) -> QueueEvaluator:
    """Return an evaluator at a share of BASE's capacity."""
    rate_per_s = load * application.capacity_per_s(application.base(gpus).weights)
    return QueueEvaluator(application, gpus, rate_per_s, Arrivals.drawn(np.random.default_rng(1), requests))


def a_goal(evaluator: QueueEvaluator, carbon_weight: float = 0.5, max_accuracy_loss_pct: float | None = None) -> Goal:
    """Return the goal that BASE sets, at 1 gram per joule."""
    base = evaluator.measure(evaluator.application.base(evaluator.gpus))
    return Goal(Baseline(base.accuracy, base.energy_j, base.p95_s), carbon_weight, max_accuracy_loss_pct)


def a_graph(*rows: Sequence[int]) -> ConfigGraph:
    """Return a configuration from its counts."""
    return ConfigGraph(np.array(rows, dtype=np.int64))
