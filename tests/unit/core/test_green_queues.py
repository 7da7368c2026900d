"""GREEN's two queues in one ranking: theta, transitions, shifting, passive rounds, starvation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.rounds import every_job
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.sorting import order_by
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.memory import GreenMemory, dump_memory
from services.core.policies.green.mlfq import Green, passive_ranking
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, hourly_curve, story
from tests.support.green import a_memory, gangs_of, lower_of


def in_order(memory: GreenMemory) -> list[str]:
    return [memory.jobs[job] for job in memory.order.tolist()]


def ranking_of(snapshot: Snapshot, memory: GreenMemory, config: GreenConfig) -> str:
    """Return the active ranking as a string of one-letter jobs."""
    following = run_cycle(Green(config), snapshot, memory).memory
    return "".join(in_order(following))


def queued_at(name: str, minute: float, **columns: object) -> JobRow:
    """Return a job submitted that many minutes ago, waiting since."""
    at = NOON_S - 60 * minute
    return a_job(name, submitted_s=at, waiting_since_s=at, **columns)


def test_the_upper_queue_comes_first_in_order_of_submission() -> None:
    jobs = [queued_at("b", 10), queued_at("a", 20), a_job("x", gpus=1, carbon_gco2=1.0)]

    assert ranking_of(a_snapshot(jobs, [a_node(gpus=16)]), a_memory("x", lower="x"), GreenConfig()) == "abx"


def test_the_lower_queue_is_ordered_by_footprint_over_degradation() -> None:
    jobs = [
        a_job("a", gpus=1, carbon_gco2=100, efficiency_base=1.0, efficiency_now=0.5),  # 200
        a_job("b", gpus=1, carbon_gco2=150, efficiency_base=1.0, efficiency_now=1.0),  # 150
        a_job("c", gpus=1, carbon_gco2=180),  # 180: not measured
    ]

    assert ranking_of(a_snapshot(jobs), a_memory("abc", lower="abc"), GreenConfig()) == "bca"


@pytest.mark.parametrize(("now_hour", "order"), [(0, "hl"), (12, "lh")])
def test_high_power_jobs_run_in_green_hours(now_hour: int, order: str) -> None:
    jobs = [a_job("h", gpus=1, carbon_gco2=120, gpu_power_w=350), a_job("l", gpus=1, carbon_gco2=100, gpu_power_w=150)]
    curve = hourly_curve([100] * 12 + [300] * 24, start_s=NOON_S - now_hour * 3600)

    snapshot = a_snapshot(jobs, curve=curve)

    assert ranking_of(snapshot, a_memory("hl", lower="hl"), GreenConfig(mu=2)) == order
    assert ranking_of(snapshot, a_memory("hl", lower="hl"), GreenConfig(mu=1)) == "lh"


def test_gpu_seconds_can_stand_in_for_the_footprint() -> None:
    jobs = [
        a_job("a", gpus=1, carbon_gco2=10, attained_gpu_s=900),
        a_job("b", gpus=1, carbon_gco2=20, attained_gpu_s=100),
    ]
    memory = a_memory("ab", lower="ab")

    assert ranking_of(a_snapshot(jobs), memory, GreenConfig()) == "ab"
    assert ranking_of(a_snapshot(jobs), memory, GreenConfig(carbon_factor="gpu_seconds")) == "ba"


def test_beyond_theta_the_most_efficient_stay_ahead_and_the_rest_rank_in_the_lower_queue() -> None:
    def upper(name: str, minute: int, degraded: float) -> JobRow:
        at = NOON_S - 60 * minute
        efficiency = {"efficiency_base": 1.0, "efficiency_now": degraded}
        since = {"submitted_s": at, "waiting_since_s": NOON_S - 1800}
        return a_job(name, gpus=1, max_gpus=2, carbon_gco2=7, **since, **efficiency)

    lower = [a_job("x", gpus=1, carbon_gco2=5), a_job("y", gpus=1, carbon_gco2=9)]
    jobs = [upper("a", 50, 0.91), upper("b", 40, 0.99), upper("c", 30, 0.95), *lower]
    snapshot = a_snapshot(jobs, [a_node(gpus=10)])
    config = GreenConfig(gamma_empty=0.9, gamma_full=0.9, theta=0.3)

    result = run_cycle(Green(config), snapshot, a_memory("xy", lower="xy"))

    # All three are to have 2 GPUs, and theta allows 3: b takes 2, c crosses the line, a's footprint is between x and y.
    assert in_order(result.memory) == ["b", "c", "x", "a", "y"]
    assert result.memory.ahead == 2
    assert story(result.plan) == {"b": "preempt scale_out -> 2", "c": "preempt scale_out -> 2"}
    assert gangs_of(result.memory)["a"] == 1


def test_leaving_the_upper_queue_need_not_interrupt_a_job() -> None:
    jobs = [a_job("a", gpus=2, max_gpus=4, efficiency_base=1.0, efficiency_now=0.5), queued_at("b", 5)]

    result = run_cycle(Green(GreenConfig()), a_snapshot(jobs), GreenMemory())

    assert story(result.plan) == {"b": "start n0:2"}
    assert lower_of(result.memory) == {"a"}


def test_an_active_round_preempts_the_jobs_that_emitted_most() -> None:
    jobs = [a_job(name, gpus=1, carbon_gco2=at) for at, name in enumerate("abcd")] + [queued_at("n", 5, min_gpus=2)]

    plan = run_cycle(Green(GreenConfig()), a_snapshot(jobs), a_memory("abcd", lower="abcd")).plan

    assert story(plan) == {
        "c": "preempt outranked -> 1",
        "d": "preempt outranked -> 1",
        "n": "hold waiting_for_release",
    }


def test_a_passive_round_starts_jobs_by_the_last_ranking() -> None:
    jobs = [
        queued_at(name, minute, carbon_gco2=carbon) for name, minute, carbon in (("a", 9, 0), ("b", 5, 9), ("c", 7, 5))
    ]
    snapshot = a_snapshot(jobs, [a_node(gpus=2)], trigger=Trigger.PASSIVE)

    result = run_cycle(Green(GreenConfig()), snapshot, a_memory("bca", lower="abc"))

    assert story(result.plan) == {"b": "start n0:0", "c": "start n0:1", "a": "hold not_enough_free_gpus"}
    assert result.memory == a_memory("bca", lower="abc")


def test_arrivals_stand_right_behind_the_jobs_that_were_ahead_of_the_lower_queue() -> None:
    jobs = [queued_at(name, minute, max_gpus=4) for name, minute in (("o", 2), ("m", 3), ("n", 4), ("u", 9))]
    jobs += [queued_at("l", 9), queued_at("x", 9), a_job("r", gpus=1)]
    snapshot = a_snapshot(jobs, [a_node(gpus=6)], trigger=Trigger.PASSIVE)

    memory = a_memory("ulrx", ahead=1, lower="lr")
    keys, gangs, _ = passive_ranking(snapshot, memory, GreenConfig(), every_job(snapshot))

    ranked = order_by(snapshot.jobs.ids, *keys, snapshot.jobs.submitted_s)
    assert "".join(snapshot.jobs.ids[job] for job in ranked) == "unmolrx"
    assert gangs.tolist() == [1] * 7


def test_a_size_fixed_for_all_holds_for_arrivals_and_beyond_theta() -> None:
    jobs = [queued_at(name, minute, max_gpus=4) for name, minute in (("a", 9), ("b", 5))]
    policy = Green(GreenConfig(fixed_gpus=2, theta=0.0))
    nodes = [a_node(gpus=4)]

    passive = run_cycle(policy, a_snapshot(jobs, nodes, trigger=Trigger.PASSIVE), GreenMemory())
    active = run_cycle(policy, a_snapshot(jobs, nodes), GreenMemory())

    assert story(passive.plan) == story(active.plan) == {"a": "start n0:0,1", "b": "start n0:2,3"}
    assert active.memory.ahead == 1


def test_a_starving_job_is_placed_first_and_its_footprint_is_forgotten() -> None:
    hog = a_job("h", waiting_since_s=NOON_S - 86_400, carbon_gco2=5000, attained_gpu_s=70, min_gpus=4)
    others = [a_job(name, gpus=1, carbon_gco2=1) for name in "abcd"]
    memory = a_memory("abcdh", lower="abcdh", gangs={"h": 4})

    patient = run_cycle(Green(GreenConfig(starvation_s=None)), a_snapshot([hog, *others]), memory)
    result = run_cycle(Green(GreenConfig()), a_snapshot([hog, *others]), memory)

    assert story(patient.plan) == {"h": "hold not_enough_free_gpus"}
    assert story(result.plan)["h"] == "hold waiting_for_release"
    assert dump_memory(result.memory)["counted_from"] == {"h": [5000, 70]}
    runs = a_job("h", gpus=1, carbon_gco2=5003, waiting_since_s=NOON_S)
    later = a_snapshot([runs, a_job("a", gpus=1, carbon_gco2=4), a_job("b", gpus=1, carbon_gco2=2)])
    assert ranking_of(later, result.memory, GreenConfig()) == "bha"


def test_a_stopping_job_comes_back_at_the_size_it_was_to_have() -> None:
    grows = a_job("a", gpus=1, max_gpus=4, efficiency_base=1.0, efficiency_now=1.0)
    policy = Green(GreenConfig())
    first = run_cycle(policy, a_snapshot([grows]), policy.initial())
    stopping = a_job("a", gpus=1, max_gpus=4, phase=Phase.PREEMPTING)
    second = run_cycle(policy, a_snapshot([stopping, a_job("n", min_gpus=3)], trigger=Trigger.PASSIVE), first.memory)
    third = run_cycle(policy, a_snapshot([a_job("a", max_gpus=4)], trigger=Trigger.PASSIVE), second.memory)

    assert story(first.plan) == {"a": "preempt scale_out -> 2"}
    assert story(second.plan) == {"n": "hold not_enough_free_gpus"}
    assert story(third.plan) == {"a": "start n0:0,1"}


def test_a_size_the_cluster_no_longer_has_is_cut_to_what_it_has() -> None:
    memory = a_memory("a", lower="a", gangs={"a": 4})

    plan = run_cycle(Green(GreenConfig()), a_snapshot([a_job("a", max_gpus=4)], [a_node(gpus=3)]), memory).plan

    assert story(plan) == {"a": "start n0:0,1,2"}


def test_vanished_jobs_are_forgotten_and_users_wishes_come_first() -> None:
    memory = replace(a_memory("gone", lower="gone"), counted_from=np.array([[1.0], [1.0]]))
    jobs = [queued_at("a", 9), queued_at("b", 5, priority=1)]

    result = run_cycle(Green(GreenConfig()), a_snapshot(jobs, [a_node(gpus=1)]), memory)

    assert story(result.plan) == {"b": "start n0:0", "a": "hold not_enough_free_gpus"}
    assert set(result.memory.jobs) == {"a", "b"}
    assert (lower_of(result.memory), dump_memory(result.memory)["counted_from"]) == (set(), {})
