"""Equations 4 to 7: by hand, and replica by replica."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from services.core.domain.errors import DomainError
from services.core.parallel.graph import JobGraph, Stage, data_parallel
from services.core.parallel.iteration import IterationModel, Network
from services.core.parallel.mapping import counts_of
from tests.support.graphs import SLOW, cases, written_out_s

FIGURE_2 = JobGraph(
    (
        Stage(2, forward_s=0.010, backward_s=0.020, parameter_bytes=20e6, output_bytes=2e6),
        Stage(2, forward_s=0.012, backward_s=0.024, parameter_bytes=1e6, output_bytes=2e6),
        Stage(2, forward_s=0.005, backward_s=0.010, parameter_bytes=1e6),
    )
)
"""The job of A-SRPT's Figure 2: three stages of two, 20 MB rings in the first, 1 MB between replicas."""


def time_s(graph: JobGraph, counts: list[list[int]], network: Network | None = None) -> float:
    """Return the iteration time of counts by class and server."""
    return float(IterationModel(graph, network or Network()).time_s(np.array(counts)))


@pytest.mark.parametrize(
    ("graph", "counts", "expected_s"),
    [
        pytest.param(data_parallel(1, 1e9, 0.3), [[1]], 0.3, id="one GPU only computes"),
        # 2 (4-1) 0.6e9 / (4 * 300e9)
        pytest.param(data_parallel(4, 0.6e9, 0.3), [[4]], 0.3 + 0.003, id="all-reduce within a server"),
        # 2 (4-1) 0.6e9 / (4 * (1/8) 1.25e9): the server with one GPU has an eighth of its NIC
        pytest.param(data_parallel(4, 0.6e9, 0.3), [[3, 1]], 0.3 + 5.76, id="the smallest share sets the pace"),
        pytest.param(data_parallel(4, 0.6e9, 0.3), [[2, 2]], 0.3 + 2.88, id="even shares"),
        # server 1, stage 2: 36 ms + 4 MB (in from stage 1: 2 d_in = 2 MB, all there; out: 2 MB, all on servers 2, 3)
        # = 2e6/300e9 + 2e6 * 8 / 1.25e9, and its ring within: 1e6/300e9; stage 3: 15 ms + 2e6 * 8 / 1.25e9 + 6.4 ms
        pytest.param(FIGURE_2, [[2, 0, 0], [2, 0, 0], [0, 1, 1]], 0.036 + 0.0128 + 1e-5, id="Figure 2 as cut there"),
        # stage 1 across servers: 30 ms + 20e6 * 8 / 1.25e9, half of 2 MB each way
        pytest.param(
            FIGURE_2,
            [[1, 1], [1, 1], [1, 1]],
            0.030 + 0.128 + 1e6 * 8 / 1.25e9 + 1e6 / 300e9,
            id="each stage cut in two",
        ),
    ],
)
def test_small_times_by_hand(graph: JobGraph, counts: list[list[int]], expected_s: float) -> None:
    assert time_s(graph, counts) == pytest.approx(expected_s, rel=1e-9)


def test_a_tensor_group_has_its_gpus_shares_of_the_nic() -> None:
    # two replicas of two GPUs: 1e9 bytes each over 2/8 of 1.25e9 per second; 0.2e9 summed within each group
    graph = JobGraph((Stage(2, parameter_bytes=1e9, tensor_parallel=2, tensor_bytes=0.4e9),))

    assert time_s(graph, [[1, 1]]) == pytest.approx(1e9 * 8 / 2 / 1.25e9 + 0.2e9 / 300e9)
    assert time_s(graph, [[2]]) == pytest.approx(1e9 / 600e9 + 0.2e9 / 300e9)


def test_experts_are_reached_through_the_nic_where_they_sit_elsewhere() -> None:
    # four replicas in two groups of two; each sends 2 * 80e6 / 4 bytes, half of them to itself
    graph = JobGraph((Stage(4, expert_parallel=2, expert_bytes=80e6),))

    assert time_s(graph, [[2, 0], [0, 2]]) == pytest.approx(20e6 / 300e9)
    assert time_s(graph, [[1, 1], [1, 1]]) == pytest.approx(20e6 * 8 / 1.25e9)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_placement_takes_the_time_written_out(case: tuple[JobGraph, list[int]]) -> None:
    graph, _ = case
    model = IterationModel(graph, SLOW)
    every = list(product(range(2), repeat=len(graph.size)))[:: max(1, 2 ** len(graph.size) // 40)]
    counts = np.stack([counts_of(graph, np.array(server), 2) for server in every])

    expected = [written_out_s(graph, SLOW, server) for server in every]

    assert model.time_s(counts) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert model.worst_s == pytest.approx(written_out_s(graph, SLOW, range(len(graph.size))), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("wrong", [{"inter_bytes_per_s": 0.0}, {"intra_bytes_per_s": np.nan}, {"server_gpus": 0}])
def test_a_network_has_bandwidth(wrong: dict[str, float]) -> None:
    with pytest.raises(DomainError):
        Network(**wrong)  # type: ignore[arg-type]
