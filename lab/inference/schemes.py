"""The schemes the paper compares Clover with (§5.1): CO2OPT, BLOVER and ORACLE; BASE is ``Application.base``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import numpy as np

from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig, Search
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph, random_graph
from services.core.policies.clover.layouts import LAYOUT_COUNTS, LAYOUTS, SLICES


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
