"""Pollux' rounds: who grows, who shrinks, who waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.policies.pollux.config import PolluxConfig
from lab.policies.pollux.memory import PolluxMemory
from lab.policies.pollux.policy import Pollux
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.ids import JobId
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, story

SIZES = np.arange(1, 9)
CURVES = np.stack([np.stack([SIZES**power] * 2) for power in (1.0, 0.3, 0.0)])
"""Goodput of a job that scales perfectly, of one that hardly does, of one that does not."""
FOUR = (a_node(gpus=4),)


def decided(
    *jobs: JobRow, curves: list[int], nodes: tuple[NodeRow, ...] = FOUR, memory: PolluxMemory | None = None
) -> dict[str, str]:
    """Return the story of an active round over jobs with these curves."""
    seen = with_curves(a_snapshot(list(jobs), list(nodes)), curves)
    return story(run_cycle(Pollux(PolluxConfig()), seen, memory or PolluxMemory()).plan)


def with_curves(snapshot: Snapshot, curves: list[int]) -> Snapshot:
    jobs = replace(snapshot.jobs, goodput_curve=np.array(curves))
    return replace(snapshot, jobs=jobs, goodput_curves=CURVES)


def elastic(name: str, gpus: int = 0, **columns: object) -> JobRow:
    """Return a job of 1 to 8 GPUs that was submitted an hour ago."""
    return a_job(name, **{"gpus": gpus, "min_gpus": 1, "max_gpus": 8, **columns})


def test_gpus_go_where_they_speed_up_most() -> None:
    assert decided(elastic("a"), elastic("b"), curves=[0, 2]) == {"a": "start n0:0,1,2", "b": "start n0:3"}


def test_a_running_job_grows_into_what_is_free_and_one_that_gains_nothing_stays() -> None:
    assert decided(elastic("a", 1), elastic("b", 1), curves=[0, 2]) == {"a": "preempt scale_out -> 3"}


def test_a_young_job_is_not_restarted_for_a_small_gain() -> None:
    """2 ** 0.3 is 1.23 times the speed; after 60 s a restart leaves two thirds of it."""
    young = elastic("a", 1, max_gpus=2, submitted_s=NOON_S - 60, waiting_since_s=NOON_S - 60)

    assert decided(young, curves=[1]) == {}
    assert decided(elastic("a", 1, max_gpus=2), curves=[1]) == {"a": "preempt scale_out -> 2"}


def test_the_more_often_a_job_was_restarted_the_less_it_is() -> None:
    often = PolluxMemory(restarts={JobId("a"): 60})

    assert decided(elastic("a", 1), curves=[1], memory=often) == {}


def test_running_jobs_shrink_for_those_that_wait() -> None:
    assert decided(elastic("a", 4), elastic("b"), curves=[0, 0]) == {
        "a": "preempt scale_in -> 2",
        "b": "hold waiting_for_release",
    }


def test_without_a_curve_a_job_at_most_doubles() -> None:
    assert decided(elastic("a", 1), curves=[-1]) == {"a": "preempt scale_out -> 2"}


@pytest.mark.parametrize("avoids", [True, False])
def test_a_gang_waits_rather_than_share_a_node_with_another_that_spans_nodes(avoids: bool) -> None:
    nodes = [a_node("n0", gpus=3), a_node("n1", gpus=3)]
    spanning = a_job("a", gpus=4, on={"n0": (0, 1), "n1": (0, 1)})
    seen = a_snapshot([spanning, a_job("b", min_gpus=2, max_gpus=2)], nodes)
    policy = Pollux(PolluxConfig(avoid_interference=avoids))

    plan = run_cycle(policy, seen, policy.initial()).plan

    assert (story(plan)["b"] == "start n0:2 n1:2") is not avoids


def test_a_passive_round_follows_the_last_sizes_and_lets_new_jobs_start_small() -> None:
    policy = Pollux(PolluxConfig())
    seen = with_curves(a_snapshot([elastic("a"), elastic("b")], list(FOUR), trigger=Trigger.PASSIVE), [0, 0])

    plan = run_cycle(policy, seen, PolluxMemory(sizes={JobId("b"): 3})).plan

    assert story(plan) == {"b": "start n0:0,1,2", "a": "start n0:3"}


def test_a_higher_priority_goes_without_last() -> None:
    jobs = [a_job(name, min_gpus=4, max_gpus=4, priority=wish) for name, wish in (("a", 0), ("b", 2), ("c", 1))]

    assert decided(*jobs, curves=[0, 0, 0])["b"] == "start n0:0,1,2,3"


def test_stops_are_counted() -> None:
    policy = Pollux(PolluxConfig())
    seen = with_curves(a_snapshot([elastic("a", 1)], list(FOUR)), [0])

    memory = run_cycle(policy, seen, PolluxMemory(restarts={JobId("a"): 2, JobId("gone"): 7})).memory

    assert memory.restarts == {"a": 3}
    assert policy.load(policy.dump(memory)) == memory
