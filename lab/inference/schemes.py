"""The schemes the paper compares Clover with (§5.1): CO2OPT, BLOVER and ORACLE; BASE is ``Application.base``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import numpy as np

from services.core.domain.arrays import Bools
from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig, Measure, Search
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.layouts import LAYOUT_COUNTS, LAYOUTS, SLICES
from services.core.policies.clover.objective import Goal
from services.core.policies.clover.optimum import Optimum

_TRIES = 10_000


def co2opt(application: Application, gpus: int) -> ConfigGraph:
    """Return the smallest variant on every slice of layout 19.

    Raises:
        DomainError: no variant fits the smallest slice.
    """
    column = SLICES.index(LAYOUTS[-1][0])
    fitting = np.flatnonzero(application.fits[:, column])
    if not fitting.size:
        raise DomainError("no variant fits a 1g slice, on which CO2OPT runs the smallest")
    weights = np.zeros(application.service_s.shape, dtype=np.int64)
    smallest = fitting[np.argmin(application.service_s[fitting, column])]
    weights[smallest, column] = gpus * len(LAYOUTS[-1])
    return ConfigGraph(weights)


def random_search(
    search: Search, application: Application, gpus: int, rng: np.random.Generator, config: AnnealingConfig
) -> None:
    """Search as BLOVER does: random layouts and variants, with Clover's rules of stopping."""
    without_gain = 0
    while without_gain < config.patience and len(search.measured) < config.max_evaluations:
        _, better = search.try_graph(random_graph(application.fits, gpus, rng))
        without_gain = 0 if better else without_gain + 1


def uniform_graphs(application: Application, gpus: int) -> Iterator[ConfigGraph]:
    """Yield every configuration with the same layout and mixture of variants on every GPU, which ORACLE profiles."""
    for counts in LAYOUT_COUNTS:
        choices = [
            list(combinations_with_replacement(np.flatnonzero(application.fits[:, column]).tolist(), count))
            for column, count in enumerate(counts)
        ]
        for chosen in product(*choices):
            weights = np.zeros(application.service_s.shape, dtype=np.int64)
            for column, variants in enumerate(chosen):
                for variant in variants:
                    weights[variant, column] += gpus
            yield ConfigGraph(weights)


def random_graph(fits: Bools, gpus: int, rng: np.random.Generator) -> ConfigGraph:
    """Return a configuration drawn from the space of layouts and variants: a layout per GPU, a variant per slice.

    Args:
        fits: (variants, 5) where an instance may run; slices that no variant fits stay empty.
        gpus: How many GPUs there are.
        rng: The source of randomness.

    Raises:
        DomainError: none was found in which anything runs.
    """
    for _ in range(_TRIES):
        weights = np.zeros(fits.shape, dtype=np.int64)
        for layout in rng.integers(0, len(LAYOUTS), gpus):
            for size in LAYOUTS[int(layout)]:
                column = SLICES.index(size)
                variants = np.flatnonzero(fits[:, column])
                if variants.size:
                    weights[rng.choice(variants), column] += 1
        if weights.any():
            return ConfigGraph(weights)
    raise DomainError("no variant fits any slice")


def best_measured(found: Optimum, measure: Measure, goal: Goal, intensity_gco2_per_j: float) -> Outcome | None:
    """Return the best of the proposals that keeps the limits when measured; None if none does."""
    kept = [outcome for outcome in map(measure, found.proposals) if goal.allows(outcome.accuracy, outcome.p95_s)]
    return max(
        kept,
        key=lambda each: (goal.objective(each.accuracy, each.energy_j * intensity_gco2_per_j), each.graph.key),
        default=None,
    )
