"""FIFO and Tiresias' discretised LAS."""

from __future__ import annotations

from collections.abc import Mapping

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Trigger
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.core.policies.baselines.las import Las, LasConfig, LasMemory
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story
from tests.support.harness import Harness


def remembering(started_s: Mapping[str, float], promoted: Mapping[str, tuple[float, float]] | None = None) -> LasMemory:
    """Return the memory of a round in which these jobs had started then."""
    return Las(LasConfig()).load({"started_s": started_s, "promoted": promoted or {}})


def waiting(name: str, minutes: float, **columns: object) -> JobRow:
    """Return a job that was submitted, and has waited, for so many minutes."""
    at = NOON_S - 60 * minutes
    return a_job(name, submitted_s=at, waiting_since_s=at, **columns)


def test_fifo_starts_in_order_of_submission_and_blocks_behind_the_head() -> None:
    jobs = [a_job("run", gpus=2), waiting("slim", 3), waiting("wide", 5, min_gpus=3), waiting("first", 9)]

    plan = run_cycle(Fifo(FifoConfig()), a_snapshot(jobs), None).plan
    filled = run_cycle(Fifo(FifoConfig(backfill=True)), a_snapshot(jobs), None).plan

    assert story(plan) == {
        "first": "start n0:2",
        "wide": "hold not_enough_free_gpus",
        "slim": "hold not_enough_free_gpus",
    }
    assert story(filled) == {"first": "start n0:2", "slim": "start n0:3", "wide": "hold not_enough_free_gpus"}


def test_fifo_never_preempts_and_can_run_jobs_at_their_widest() -> None:
    jobs = [a_job("run", gpus=3, submitted_s=NOON_S), waiting("a", 9, max_gpus=3)]

    assert story(run_cycle(Fifo(FifoConfig()), a_snapshot(jobs), None).plan) == {"a": "start n0:3"}
    wide = run_cycle(Fifo(FifoConfig(gang="max")), a_snapshot(jobs), None).plan
    assert story(wide) == {"a": "hold not_enough_free_gpus"}


def test_users_wishes_come_before_submission() -> None:
    jobs = [waiting("a", 9), waiting("b", 1, priority=2)]

    plan = run_cycle(Fifo(FifoConfig()), a_snapshot(jobs, [a_node(gpus=1)]), None).plan

    assert story(plan) == {"b": "start n0:0", "a": "hold not_enough_free_gpus"}


def test_las_ranks_by_queue_then_by_first_start_then_by_submission() -> None:
    # Thresholds 3600 and 36000 GPU seconds: a wide gang crosses them sooner (the second dimension).
    jobs = [
        a_job("d", gpus=1, attained_gpu_s=40_000),
        a_job("c", gpus=1, attained_gpu_s=3_600),
        a_job("b", gpus=1, attained_gpu_s=35_999),
        a_job("a", gpus=1, attained_gpu_s=3_599),
        waiting("n", 1),
        waiting("m", 2),
    ]
    policy = Las(LasConfig(queue_thresholds_gpu_s=(3_600, 36_000)))
    memory = remembering({"b": NOON_S - 9e4, "c": NOON_S - 8e4})

    plan = run_cycle(policy, a_snapshot(jobs), memory).plan

    # a runs and stays; n and m are in its queue; then b, which started before c; d is last.
    assert story(plan) == {
        "c": "preempt outranked -> 1",
        "d": "preempt outranked -> 1",
        "m": "hold waiting_for_release",
        "n": "hold waiting_for_release",
    }


def test_las_does_not_preempt_within_a_queue() -> None:
    jobs = [a_job("run", gpus=4, attained_gpu_s=3_000, submitted_s=NOON_S - 60), waiting("older", 90, min_gpus=4)]

    result = run_cycle(Las(LasConfig()), a_snapshot(jobs), LasMemory())

    assert story(result.plan) == {"older": "hold not_enough_free_gpus"}
    assert result.memory == remembering({"run": NOON_S - 3600})


def test_las_passive_rounds_fill_free_gpus_and_promise_the_next_round() -> None:
    jobs = [a_job("old", gpus=3, attained_gpu_s=9_000), waiting("slim", 1), waiting("wide", 2, min_gpus=2)]

    plan = run_cycle(Las(LasConfig()), a_snapshot(jobs, trigger=Trigger.PASSIVE), LasMemory()).plan

    assert story(plan) == {"slim": "start n0:3", "wide": "hold waiting_for_round"}


def test_las_promotes_a_job_that_waited_a_multiple_of_what_it_ran() -> None:
    # It ran 1 h on 2 GPUs from 4 h ago on, so it has waited 3 h.
    job = waiting("a", 300, min_gpus=2, attained_gpu_s=7_200)
    memory = remembering({"a": NOON_S - 4 * 3600})
    snapshot = a_snapshot([job])

    assert run_cycle(Las(LasConfig()), snapshot, memory).memory.promoted == {}
    assert run_cycle(Las(LasConfig(promote_knob=3.01)), snapshot, memory).memory.promoted == {}
    promoted = run_cycle(Las(LasConfig(promote_knob=3.0)), snapshot, memory).memory
    assert promoted.promoted == {"a": (7_200, NOON_S)}

    policy = Las(LasConfig(promote_knob=3.0))
    again = a_job("a", gpus=2, attained_gpu_s=7_200 + 3_000)
    rival = waiting("new", 1, min_gpus=4)
    assert story(run_cycle(policy, a_snapshot([again, rival]), promoted).plan) == {"new": "hold not_enough_free_gpus"}
    demoted = a_job("a", gpus=2, attained_gpu_s=7_200 + 3_250)
    assert story(run_cycle(policy, a_snapshot([demoted, rival]), promoted).plan)["a"] == "preempt outranked -> 2"


def test_las_counts_waiting_from_the_last_promotion() -> None:
    # Promoted an hour ago; since then half an hour on 2 GPUs and half an hour of waiting.
    job = waiting("a", 900, min_gpus=2, attained_gpu_s=7_200 + 3_600)
    memory = remembering({"a": NOON_S - 10 * 3600}, {"a": (7_200, NOON_S - 3_600)})

    assert run_cycle(Las(LasConfig(promote_knob=1.01)), a_snapshot([job]), memory).memory == memory
    again = run_cycle(Las(LasConfig(promote_knob=1.0)), a_snapshot([job]), memory).memory
    assert again.promoted == {"a": (10_800, NOON_S)}


def test_las_forgets_jobs_that_ended() -> None:
    memory = remembering({"gone": 1.0}, {"gone": (1.0, 1.0)})

    result = run_cycle(Las(LasConfig()), a_snapshot([a_job("a", phase=Phase.QUEUED)]), memory)

    assert result.memory == LasMemory()


def test_las_lets_short_jobs_pass_a_long_one() -> None:
    """Worked by hand on one GPU with the default threshold of 3,250 GPU seconds."""
    harness = Harness("las", nodes=[a_node(gpus=1)])
    harness.submit("long", work_s=7200)
    harness.submit("short", work_s=900, at_s=2000)

    harness.run_until_idle()

    # Active round at 3600 s: long (3,600 GPU s) leaves the first queue and is stopped; 120 s later short starts.
    assert harness.ended["short"].ended_s - NOON_S == 3600 + 120 + 60 + 900
    assert harness.ended["long"].ended_s - NOON_S == 3600 + 120 + 960 + 60 + (7200 - 3540)
