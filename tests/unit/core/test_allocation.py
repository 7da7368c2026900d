"""GPUs, control values and places for given jobs: PowerFlow's greedy with Heavy-Edge's places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.core.domain.errors import DomainError
from services.core.domain.solving import Method, Progress, Wait
from services.core.parallel.graph import JobGraph, Stage
from services.core.policies.allocation import Allocation, GivenJobs, GivenNodes, Shares, allocate
from services.core.policies.powerflow.allocate import Choices
from services.core.policies.powerflow.config import PowerflowConfig
from tests.support.powerflow import random_choices

TENSOR_PARALLEL_4 = JobGraph((Stage(1, 0.1, 0.2, 1e9, tensor_parallel=4),))


def nodes(*gpus: int, **options: Any) -> GivenNodes:
    """Return nodes of one GPU model whose free GPUs draw 30 W."""
    counts = np.array(gpus, dtype=np.int64)
    return GivenNodes(counts, np.zeros_like(counts), np.array([30.0]), **options)


def jobs(
    *gpus: tuple[int, ...], graphs: tuple[JobGraph | None, ...] | None = None, held: tuple[Shares, ...] | None = None
) -> GivenJobs:
    """Return jobs that scale linearly at 100 W and 1 s/s per GPU, and twice that at their second control value."""
    widest = max(map(len, gpus))
    table = np.array([[*row, *[0] * (widest - len(row))] for row in gpus], dtype=np.int64)
    both = table[:, :, None] * np.array([1.0, 2.0])
    choices = Choices(table, both, both * np.array([100.0, 150.0]))
    n_jobs = len(gpus)
    nothing: tuple[Shares, ...] = ((),) * n_jobs
    return GivenJobs(
        choices, np.zeros(n_jobs, dtype=np.int64), np.full(n_jobs, np.nan), graphs or (None,) * n_jobs, held or nothing
    )


@pytest.mark.parametrize("power_down", [False, True])
@pytest.mark.parametrize("method", [Method.HEAVY_EDGE, Method.REFINED])
@pytest.mark.parametrize(
    "config", [PowerflowConfig(), PowerflowConfig(marginal="power", queue="shortest", at_limit="skip")]
)
def test_whatever_is_given_out_is_there_once_and_within_the_limit(
    config: PowerflowConfig, method: Method, power_down: bool
) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n_jobs = int(rng.integers(1, 9))
        graphs = tuple(TENSOR_PARALLEL_4 if rng.random() < 0.3 else None for _ in range(n_jobs))
        given = GivenJobs(
            random_choices(rng, n_jobs),
            np.zeros(n_jobs, dtype=np.int64),
            rng.lognormal(8.0, 1.0, n_jobs),
            graphs,
            ((),) * n_jobs,
        )
        there = nodes(*rng.integers(1, 9, 4).tolist(), limit_w=float(rng.uniform(300, 4_000)), power_down=power_down)

        found = allocate(given, there, config, method)

        found.check(given, there)
        if there.idle_draw_w(there.gpus) <= there.limit_w:
            assert found.keeps_limit(there)


def test_a_running_gang_stays_and_the_others_get_the_rest() -> None:
    given, there = jobs((2,), (1, 2, 4, 8), held=(((1, 2),), ())), nodes(4, 4)

    found = allocate(given, there)

    found.check(given, there)
    assert found.places[0] == ((1, 2),)
    assert found.gpus.tolist() == [2, 4]
    assert found.places[1] == ((0, 4),)


def test_a_size_whose_tensor_groups_find_no_node_is_not_given_again() -> None:
    """Two groups of four do not fit beside what runs; one does, and the GPUs left go to the other job."""
    given = jobs((2,), (4, 8), (1, 2), graphs=(None, TENSOR_PARALLEL_4, None), held=(((0, 2),), (), ()))
    there = nodes(5, 7)

    found = allocate(given, there)

    found.check(given, there)
    assert found.gpus.tolist() == [2, 4, 2]
    assert found.places[1] == ((1, 4),)


def test_a_job_says_why_it_waits() -> None:
    torn = allocate(jobs((4,), graphs=(TENSOR_PARALLEL_4,)), nodes(3, 3))
    crowded = allocate(jobs((4,), (4,)), nodes(4))
    dark = allocate(jobs((2,), (2,)), nodes(4, limit_w=330.0))

    assert torn.waits == (Wait.TENSOR_GROUPS,)
    assert crowded.waits == (None, Wait.GPUS)
    assert dark.waits == (None, Wait.POWER_LIMIT)


def test_control_values_rise_as_far_as_the_limit_lets_them() -> None:
    given = jobs((2,), (2,))

    tight, roomy = (allocate(given, nodes(4, limit_w=limit_w)) for limit_w in (899.0, 1_200.0))

    assert tight.control.tolist() == [1, 0]
    assert tight.total_w == 800.0
    assert roomy.control.tolist() == [1, 1]


def test_gangs_wait_where_free_gpus_draw_more_than_packed_ones_would() -> None:
    """Three tensor groups of four on nodes of six leave two free on each, where the greedy counts on two full nodes."""
    given = jobs((4,), (4,), (4,), graphs=(TENSOR_PARALLEL_4,) * 3)
    there = nodes(6, 6, 6, power_down=True)

    waits = [allocate(given, replace(there, limit_w=limit_w)).waits for limit_w in (1_380.0, 1_379.0)]

    assert waits == [(None, None, None), (None, None, Wait.POWER_LIMIT)]


def test_an_empty_node_that_may_be_off_draws_nothing() -> None:
    given = jobs((1,))

    assert allocate(given, nodes(2, 8)).idle_w == 270.0
    assert allocate(given, nodes(2, 8, power_down=True)).idle_w == 30.0


def test_what_runs_already_may_exceed_the_limit_and_nothing_starts_then() -> None:
    given, there = jobs((2,), (1,), held=(((0, 2),), ())), nodes(4, limit_w=150.0)

    found = allocate(given, there)

    found.check(given, there)
    assert not found.keeps_limit(there)
    assert found.gpus.tolist() == [2, 0]
    assert found.control.tolist() == [0, -1]


def test_gangs_sit_by_their_graph_and_their_iteration_is_timed() -> None:
    heavy = JobGraph((Stage(1, 0.001, 0.002, 1e9),))
    found = allocate(jobs((4,), graphs=(heavy,)), nodes(2, 4, 2))

    assert found.places == (((1, 4),),)
    assert found.iteration_s[0] == pytest.approx(0.003 + 2 * 3 / 4 * 1e9 / 300e9)


def test_running_gangs_beyond_what_there_is_are_refused() -> None:
    with pytest.raises(DomainError, match="hold 5 GPUs of node 0"):
        allocate(jobs((5,), held=(((0, 5),),)), nodes(4))
    with pytest.raises(DomainError, match="size of its gang"):
        jobs((1, 2), held=(((0, 2),),))


def test_progress_never_falls_though_sizes_are_given_out_anew() -> None:
    given = jobs((4, 8), (4, 8), (1, 2), graphs=(TENSOR_PARALLEL_4, TENSOR_PARALLEL_4, None))
    told: list[Progress] = []

    allocate(given, nodes(5, 7, 6), report=told.append)

    shares = [each.share for each in told]
    assert len(shares) > len(given.held), "there was more than one round"
    assert shares == sorted(shares)
    assert shares[-1] < 1


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": np.array([2, 4])},
        {"places": (((0, 2),), ((0, 3),))},
        {"places": (((0, 2),), ((1, 2),))},
        {"total_w": 1.0},
        {"control": np.array([1, 1])},
        {"waits": (None, Wait.GPUS)},
    ],
)
def test_a_wrong_answer_is_found(change: dict[str, Any]) -> None:
    given, there = jobs((2,), (2,), held=(((0, 2),), ())), nodes(4, 1, limit_w=1_000.0)
    found: Allocation = allocate(given, there)
    found.check(given, there)

    with pytest.raises(AssertionError):
        replace(found, **change).check(given, there)
