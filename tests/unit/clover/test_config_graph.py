"""Configuration graphs: their distance and their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.inference.schemes import random_graph
from services.core.domain.errors import DomainError
from services.core.policies.clover.config_graph import GED_THRESHOLD, ConfigGraph, random_neighbour
from services.core.policies.clover.layouts import can_be_cut
from tests.support.clover import a_graph, an_application


def test_figure_7_from_graph_one_to_graph_two_costs_8() -> None:
    """Four edges of weight 1 go; two of weight 1 and one of weight 2 come."""
    one = a_graph([1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0])
    two = a_graph([0, 2, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0])

    assert one.distance(two) == two.distance(one) == 8


def test_another_variant_or_another_slice_for_one_instance_costs_2() -> None:
    graph = a_graph([1, 0, 0, 0, 0], [0, 0, 0, 0, 1])

    assert graph.distance(a_graph([0, 0, 0, 0, 0], [1, 0, 0, 0, 1])) == 2
    assert graph.distance(a_graph([0, 1, 0, 0, 0], [0, 0, 0, 0, 1])) == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), gpus=st.integers(1, 6), fits_from=st.integers(0, 4))
def test_a_walk_over_neighbours_stays_among_what_can_be_cut(seed: int, gpus: int, fits_from: int) -> None:
    application = an_application(best_fits_from=fits_from)
    rng = np.random.default_rng(seed)
    graph = random_graph(application.fits, gpus, rng)
    for _ in range(8):
        found = random_neighbour(graph, application.fits, gpus, rng)
        assert 1 <= graph.distance(found) <= GED_THRESHOLD
        assert can_be_cut(found.slices, gpus)
        assert found.instances > 0
        assert not found.weights[~application.fits].any()
        graph = found


def test_equal_graphs_are_one() -> None:
    assert {a_graph([1, 0, 0, 0, 0]), a_graph([1, 0, 0, 0, 0])} == {a_graph([1, 0, 0, 0, 0])}


def test_counts_below_zero_are_refused() -> None:
    with pytest.raises(DomainError, match="at least 0"):
        ConfigGraph(np.full((1, 5), -1))
