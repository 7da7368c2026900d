"""GREEN's upper queue: a job grows while its efficiency holds, and no further than its cap."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase
from services.core.domain.ids import JobId
from services.core.policies.green.config import GammaCompares, GreenConfig
from services.core.policies.green.efficiency import (
    BeforeGrowth,
    degradation,
    gamma_at,
    largest_gang,
    last_step,
    occupancy_of,
)
from services.core.policies.green.memory import GreenMemory, dump_memory, load_memory
from services.core.policies.green.mlfq import Green, scale
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story
from tests.support.green import gangs_of, lower_of

NAN = float("nan")
FIXED_GAMMA = GreenConfig(gamma_empty=0.9, gamma_full=0.9)


def a_measured_job(name: str, degraded: float, *, gpus: int = 1, max_gpus: int = 8, **columns: object) -> JobRow:
    """Return a running job whose efficiency is ``degraded`` times that of one GPU."""
    return a_job(
        name,
        gpus=gpus,
        min_gpus=1,
        max_gpus=max_gpus,
        waiting_since_s=NOON_S - 1800,
        efficiency_base=0.002,
        efficiency_now=0.002 * degraded,
        **columns,
    )


def test_equation_4_compares_with_the_minimum_gang() -> None:
    base, now = np.array([2.0, 2.0, NAN, 2.0, 0.0]), np.array([1.8, NAN, 1.8, 0.0, 1.0])

    ratio = degradation(base, now)

    assert ratio[0] == pytest.approx(0.9)
    assert np.isnan(ratio[[1, 2, 4]]).all()
    assert 0 < ratio[3] < 1e-6


def test_gamma_rises_linearly_from_an_empty_to_a_full_cluster() -> None:
    assert [gamma_at(share, 0.70, 0.95) for share in (0.0, 0.4, 1.0)] == [0.70, pytest.approx(0.80), 0.95]


def test_occupancy_counts_devices_of_nodes_that_take_work() -> None:
    nodes = [a_node("n0", gpus=4), a_node("n1", gpus=4, schedulable=False)]

    assert occupancy_of(a_snapshot([a_job("a", on={"n0": (0,)})], nodes)) == 0.25
    assert occupancy_of(a_snapshot([], [a_node(gpus=2, schedulable=False)])) == 1.0


@pytest.mark.parametrize(("nodes", "gang"), [(8, 2), (1, 1)])
def test_a_full_cluster_asks_for_more_efficiency(nodes: int, gang: int) -> None:
    snapshot = a_snapshot(
        [a_measured_job("a", 0.85), a_job("b", gpus=3)], [a_node(f"n{at}", gpus=4) for at in range(nodes)]
    )

    scaling = scale(snapshot, Green(GreenConfig()).initial(), GreenConfig(theta=1.0))

    assert scaling.gangs[0] == gang
    assert scaling.lower[0] == (gang == 1)


def test_a_job_grows_step_by_step_until_its_efficiency_falls_below_gamma() -> None:
    policy, memory = Green(FIXED_GAMMA), Green(FIXED_GAMMA).initial()
    nodes = [a_node("n0", gpus=16)]
    plans: list[dict[str, str]] = []
    for gpus, degraded in ((1, 1.0), (2, 0.97), (3, 0.92), (4, 0.86), (4, 0.99)):
        snapshot = a_snapshot([a_measured_job("a", degraded, gpus=gpus)], nodes)
        result = run_cycle(policy, snapshot, memory)
        memory = result.memory
        plans.append(story(result.plan))

    assert plans == [
        {"a": "preempt scale_out -> 2"},
        {"a": "preempt scale_out -> 3"},
        {"a": "preempt scale_out -> 4"},
        {},
        {},
    ]
    assert lower_of(memory) == {"a"}
    assert gangs_of(memory)["a"] == 4


def test_a_job_at_gamma_grows() -> None:
    job = a_job("a", gpus=1, max_gpus=2, efficiency_base=1.0, efficiency_now=0.9)

    assert story(run_cycle(Green(FIXED_GAMMA), a_snapshot([job]), Green(FIXED_GAMMA).initial()).plan) == {
        "a": "preempt scale_out -> 2"
    }


def test_a_job_grows_by_its_own_step() -> None:
    job = a_job("a", gpus=2, min_gpus=2, max_gpus=8, step_gpus=2, efficiency_base=1.0, efficiency_now=1.0)
    snapshot = a_snapshot([job], [a_node(gpus=16)])

    assert story(run_cycle(Green(FIXED_GAMMA), snapshot, Green(FIXED_GAMMA).initial()).plan) == {
        "a": "preempt scale_out -> 4"
    }


def test_no_job_grows_beyond_its_cap() -> None:
    config = GreenConfig(job_cap_gpus=2)
    snapshot = a_snapshot([a_measured_job("a", 1.0), a_measured_job("b", 1.0, gpus=2)], [a_node(gpus=16)])

    result = run_cycle(Green(config), snapshot, Green(config).initial())

    assert story(result.plan) == {"a": "preempt scale_out -> 2"}
    assert lower_of(result.memory) == {"b"}
    assert largest_gang(np.array([1, 4]), np.array([8, 8]), 2).tolist() == [2, 4]


def test_a_job_whose_efficiency_is_not_measured_yet_stays_as_it_is() -> None:
    waits = a_job("a", gpus=1, max_gpus=4, waiting_since_s=NOON_S - 1800)
    overdue = a_job("b", gpus=1, max_gpus=4, waiting_since_s=NOON_S - 7200)

    result = run_cycle(Green(GreenConfig()), a_snapshot([waits, overdue]), Green(GreenConfig()).initial())

    assert story(result.plan) == {}
    assert lower_of(result.memory) == {"b"}


def test_a_job_that_cannot_grow_leaves_the_upper_queue_once_it_runs() -> None:
    jobs = [a_job("inelastic", gpus=1), a_job("starting", gpus=1, phase=Phase.STARTING), a_job("queued")]

    memory = run_cycle(Green(GreenConfig()), a_snapshot(jobs), Green(GreenConfig()).initial()).memory

    assert lower_of(memory) == {"inelastic"}


def test_a_job_that_may_not_be_preempted_does_not_grow() -> None:
    snapshot = a_snapshot([a_measured_job("a", 1.0, preemptible=False)])

    assert lower_of(run_cycle(Green(FIXED_GAMMA), snapshot, Green(FIXED_GAMMA).initial()).memory) == {"a"}


def test_growing_waits_for_a_free_gpu_and_keeps_its_place() -> None:
    config = GreenConfig(gamma_empty=0.9, gamma_full=0.9, theta=1.0)
    jobs = [a_measured_job("a", 1.0, gpus=2), a_job("rock", gpus=2, preemptible=False)]

    result = run_cycle(Green(config), a_snapshot(jobs), Green(config).initial())

    assert story(result.plan) == {}
    assert "a" not in lower_of(result.memory)


@pytest.mark.parametrize(("fixed", "sizes"), [(1, {"a": 1, "b": 2, "c": 1}), (2, {"a": 2, "b": 2, "c": 1})])
def test_fixed_gpus_runs_every_job_at_one_size_or_the_nearest_it_may_have(fixed: int, sizes: dict[str, int]) -> None:
    policy = Green(GreenConfig(fixed_gpus=fixed))
    jobs = [a_job("a", max_gpus=4), a_job("b", min_gpus=2, max_gpus=4), a_job("c")]

    result = run_cycle(policy, a_snapshot(jobs, [a_node(gpus=16)]), policy.initial())

    assert gangs_of(result.memory) == sizes


@pytest.mark.parametrize(("step_back", "size"), [(False, 3), (True, 2)])
def test_a_job_may_step_back_from_the_size_that_proved_too_wide(step_back: bool, size: int) -> None:
    config = GreenConfig(gamma_empty=0.9, gamma_full=0.9, step_back=step_back)
    snapshot = a_snapshot([a_measured_job("a", 0.8, gpus=3), a_measured_job("b", 0.8)], [a_node(gpus=16)])

    result = run_cycle(Green(config), snapshot, Green(config).initial())

    assert lower_of(result.memory) == {"a", "b"}
    assert gangs_of(result.memory) == {"a": size, "b": 1}
    assert story(result.plan) == ({"a": "preempt scale_in -> 2"} if step_back else {})


def test_a_job_at_its_cap_is_measured_before_it_is_said_to_fit() -> None:
    config = GreenConfig(gamma_empty=0.9, gamma_full=0.9, job_cap_gpus=2, step_back=True)
    unmeasured = a_job("a", gpus=2, min_gpus=1, max_gpus=8, efficiency_base=1.0, waiting_since_s=NOON_S - 60)

    assert not lower_of(run_cycle(Green(config), a_snapshot([unmeasured]), Green(config).initial()).memory)


def test_the_last_step_alone_can_be_judged() -> None:
    """At 2 GPUs 600 W made 1.2 of what 300 W made at one: 0.6 per joule in all, 0.2 of the added watts."""
    job = a_measured_job("a", 0.6, gpus=2, energy_j=300_000 + 600 * 500, attained_gpu_s=1_000 + 2 * 500)
    snapshot = a_snapshot([job, a_measured_job("b", 0.7), a_job("c", gpus=1)], [a_node(gpus=16)])
    grown = {JobId("a"): BeforeGrowth(1, 0.002, 300.0, 300_000.0, 1_000.0)}
    present = np.array([2, 1, 1])

    assert last_step(snapshot, present, grown, marginal=False)[:2] == pytest.approx([0.6, 1.0])
    assert last_step(snapshot, present, grown, marginal=True)[:2] == pytest.approx([0.2, 1.0])
    assert np.isnan(last_step(snapshot, present, grown, marginal=True)[2])


@pytest.mark.parametrize(("compares", "gang"), [("minimum", 2), ("previous", 3), ("marginal", 2)])
def test_what_gamma_is_held_against_decides(compares: GammaCompares, gang: int) -> None:
    """A job lost a tenth of its efficiency at the first step, and next to nothing more at the second."""
    config = GreenConfig(gamma_empty=0.95, gamma_full=0.95, gamma_compares=compares)
    job = a_measured_job("a", 0.9, gpus=2, energy_j=2_000.0, attained_gpu_s=10.0)
    memory = GreenMemory(grown={JobId("a"): BeforeGrowth(1, 0.002 * 0.91, 100.0, 1_000.0, 5.0)})

    following = run_cycle(Green(config), a_snapshot([job], [a_node(gpus=16)]), memory).memory

    assert gangs_of(following) == {"a": gang}
    assert ("a" in lower_of(following)) == (gang == 2)


def test_what_jobs_were_before_they_grew_is_remembered_and_stored() -> None:
    config = GreenConfig(gamma_empty=0.9, gamma_full=0.9, gamma_compares="marginal")
    job = a_measured_job("a", 1.0, energy_j=3_000.0, attained_gpu_s=10.0)

    memory = run_cycle(Green(config), a_snapshot([job], [a_node(gpus=16)]), GreenMemory()).memory

    assert memory.grown == {"a": BeforeGrowth(1, 0.002, 300.0, 3_000.0, 10.0)}
    assert load_memory(dump_memory(memory)) == memory
