"""Orders are total, and sizes are ones a cluster has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.capacity import model_gpus, possible_sizes
from services.core.cycle.plan import Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.cycle.sorting import among_first, order_by, wishes_first
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.policies.registry import build_policy
from tests.support.builders import a_job, a_node, a_snapshot


def ids(*names: str) -> tuple[JobId, ...]:
    return tuple(JobId(name) for name in names)


def test_the_first_key_counts_most_and_the_id_last() -> None:
    names = ids("d", "c", "b", "a")

    order = order_by(names, np.array([1.0, 0.0, 1.0, 1.0]), np.array([5, 9, 5, 4]))

    assert [names[at] for at in order] == ["c", "a", "b", "d"]


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float64])
@pytest.mark.parametrize("seed", range(20))
def test_it_sorts_as_python_does(seed: int, kind: type) -> None:
    rng = np.random.default_rng(seed)
    names = ids(*(f"j{at}" for at in rng.permutation(50)))
    first, second = rng.integers(0, 30, 50).astype(kind), rng.integers(0, 4, 50).astype(float)

    expected = sorted(range(50), key=lambda at: (first[at], second[at], names[at]))

    assert order_by(names, first, second).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_those_among_the_first_are_found_with_all_that_tie(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 4, 40), rng.integers(0, 4, 40).astype(float)
    keys = list(zip(first.tolist(), second.tolist(), strict=True))
    count = int(rng.integers(1, 45))

    found = among_first(count, first, second)

    last = sorted(keys)[min(count, 40) - 1]
    assert sorted(found.tolist()) == [at for at in range(40) if keys[at] <= last]


def test_nobody_and_one_job_have_an_order() -> None:
    assert order_by((), np.array([])).tolist() == []
    assert order_by(ids("a"), np.array([1.0])).tolist() == [0]


def test_wishes_come_before_the_order_and_keep_it_otherwise() -> None:
    order = np.array([2, 0, 1, 3])

    assert wishes_first(order, np.array([0, 5, 0, 5])).tolist() == [1, 3, 2, 0]
    assert wishes_first(order, np.zeros(4, dtype=np.int64)) is order


def test_a_ranking_has_one_size_per_job() -> None:
    with pytest.raises(DomainError):
        Ranking(np.array([0, 1]), np.array([1]))


def test_sizes_lie_on_the_grid_within_model_and_quota() -> None:
    nodes = [a_node("n0", gpus=4), a_node("n1", gpus=8, schedulable=False), a_node("v0", gpus=2, model="V100")]
    grid = {"min_gpus": 1, "max_gpus": 7, "step_gpus": 3}
    jobs = [
        a_job("a", **grid),
        a_job("v", models=("V100",), **grid),
        a_job("poor", tenant="poor", **grid),
        a_job("wide", min_gpus=6, max_gpus=9),
        a_job("nowhere", models=("H100",)),
    ]
    snapshot = a_snapshot(jobs, nodes, quota={"poor": 3})

    assert model_gpus(snapshot).tolist() == [4, 2]
    assert possible_sizes(snapshot, np.full(5, 99)).tolist() == [4, 1, 1, 6, 1]
    assert possible_sizes(snapshot, np.full(5, 3)).tolist() == [1, 1, 1, 6, 1]
    assert possible_sizes(snapshot, np.zeros(5, dtype=np.int64)).tolist() == [1, 1, 1, 6, 1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "parameters"), [("fifo", {}), ("fifo", {"backfill": True}), ("las", {})])
def test_sifting_before_sorting_changes_no_start(name: str, parameters: dict[str, object], seed: int) -> None:
    random = np.random.default_rng(seed)
    jobs = [
        a_job(f"j{at}", min_gpus=int(random.choice([1, 1, 2, 5])), submitted_s=float(random.integers(1, 40)))
        for at in range(80)
    ]
    snapshot = a_snapshot(jobs, [a_node("n", gpus=int(random.integers(1, 9)))], trigger=Trigger.PASSIVE)
    remaining = random.integers(1, 60, 80).astype(np.float64)
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, remaining_s=remaining))
    policy = build_policy(name, parameters)

    whole = run_cycle(policy, snapshot, policy.initial()).plan.actions
    sifted = run_cycle(policy, replace(snapshot, reasons=False), policy.initial()).plan.actions

    assert sifted == tuple(action for action in whole if isinstance(action, Start))
