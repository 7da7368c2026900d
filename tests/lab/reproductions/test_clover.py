"""Clover's tables: every configuration of a GPU once, and means over seeds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lab.inference.run import InferenceRun, Scheme
from lab.reproductions.clover import all_graphs, mean_run
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.layouts import can_be_cut
from tests.support.clover import an_application


def test_all_configurations_of_a_gpu_are_those_that_can_be_cut() -> None:
    application = an_application(best_fits_from=2)
    most = ((7, 3, 2, 1, 1), (0, 0, 2, 1, 1))
    counts = product(*(range(each + 1) for row in most for each in row))
    graphs = (ConfigGraph(np.array(each, dtype=np.int64).reshape(2, 5)) for each in counts)
    expected = {graph for graph in graphs if graph.instances and can_be_cut(graph.slices, 1)}

    found = all_graphs(application)

    assert len(found) == len(set(found))
    assert set(found) == expected


def test_figures_are_means_over_seeds_and_latency_the_worst() -> None:
    options = {"carbon": "eso-march", "scheme": Scheme.CLOVER, "gpus": 1, "hours": 2, "screen": False}

    found = mean_run(seeds=(1, 2), **options)

    runs = [InferenceRun(seed=seed, **options).simulate() for seed in (1, 2)]
    assert found["objective_mean"] == pytest.approx(np.mean([run["objective_mean"] for run in runs]))
    assert found["p95_over_sla"] == max(run["p95_over_sla"] for run in runs)
