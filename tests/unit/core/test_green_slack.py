"""Beyond the paper: jobs that may wait do so in dirty hours, and no longer than they were allowed to."""

from __future__ import annotations

import numpy as np
import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.memory import dump_memory, load_memory
from services.core.policies.green.mlfq import Green
from services.core.policies.greener_hours import remaining_s
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, hourly_curve, story
from tests.support.green import a_memory, held_by

LOWER = a_memory("ab", lower="ab", gangs={"a": 0, "b": 0})
EVENING = [300] * 6 + [100] * 18
"""Six dirty hours from now, then eighteen green ones."""


def half_done(name: str, *, ran_h: float = 2.0, **columns: object) -> JobRow:
    """Return a running job that has as long to go as it ran."""
    times = {"submitted_s": NOON_S - ran_h * 3600, "attained_gpu_s": ran_h * 3600, "progress": 0.5}
    return a_job(name, **{"gpus": 1, **times, **columns})


def in_the_evening(*jobs: JobRow, trigger: Trigger = Trigger.ACTIVE, intensities: list[int] | None = None) -> Snapshot:
    """Return a snapshot with room for everybody."""
    curve = hourly_curve(intensities or EVENING, start_s=NOON_S)
    return a_snapshot(list(jobs), [a_node(gpus=8)], curve=curve, trigger=trigger)


@pytest.mark.parametrize(
    ("slack_h", "share", "waits"),
    [
        pytest.param(0, None, False, id="nothing was allowed"),
        pytest.param(5, None, False, id="its two hours would end past the slack"),
        pytest.param(8, None, True, id="two green hours lie within the slack"),
        pytest.param(8, 1.0, False, id="four hours of work allow four hours of delay"),
        pytest.param(8, 2.0, True, id="four hours of work allow eight"),
    ],
)
def test_a_job_waits_as_long_as_its_slack_allows(slack_h: float, share: float | None, waits: bool) -> None:
    config = GreenConfig(slack_s=slack_h * 3600, slack_share=share)

    result = run_cycle(Green(config), in_the_evening(half_done("a")), LOWER)

    assert held_by(result.memory) == ({"a"} if waits else set())
    assert story(result.plan) == ({"a": "preempt greener_hours -> 1"} if waits else {})


def test_nobody_waits_in_green_hours_and_new_jobs_never_do() -> None:
    config = GreenConfig(slack_s=86_400)
    queued = a_job("n", submitted_s=NOON_S - 60)

    dirty = run_cycle(Green(config), in_the_evening(half_done("a"), queued), LOWER)
    green = run_cycle(Green(config), in_the_evening(half_done("a"), intensities=[100] * 24), LOWER)

    assert story(dirty.plan) == {"a": "preempt greener_hours -> 1", "n": "start n0:1"}
    assert story(green.plan) == {}


def test_only_jobs_of_high_power_wait_if_so_configured() -> None:
    config = GreenConfig(slack_s=86_400, slack_of="high_power")
    jobs = half_done("a", gpu_power_w=300.0), half_done("b", gpu_power_w=100.0)

    assert held_by(run_cycle(Green(config), in_the_evening(*jobs), LOWER).memory) == {"a"}


@pytest.mark.parametrize(("deadline_h", "held"), [(3.0, set[str]()), (9.0, {"a"})])
def test_a_deadline_takes_the_place_of_the_slack(deadline_h: float, held: set[str]) -> None:
    job = half_done("a", deadline_s=NOON_S + deadline_h * 3600)

    assert held_by(run_cycle(Green(GreenConfig(slack_s=3_600)), in_the_evening(job), LOWER).memory) == held


def test_held_jobs_are_not_started_until_the_next_active_round() -> None:
    policy = Green(GreenConfig(slack_s=86_400))
    first = run_cycle(policy, in_the_evening(half_done("a"), half_done("b", ran_h=20)), LOWER)
    waiting = half_done("a", gpus=0), half_done("b", gpus=0, ran_h=20)

    passive = run_cycle(policy, in_the_evening(*waiting, trigger=Trigger.PASSIVE), first.memory)
    later = run_cycle(policy, in_the_evening(*waiting, intensities=[100] * 24), passive.memory)

    assert held_by(first.memory) == {"a"}
    assert story(passive.plan) == {"a": "hold greener_hours", "b": "start n0:0"}
    assert set(story(later.plan)) == {"a", "b"}
    assert all(each.startswith("start") for each in story(later.plan).values())
    assert load_memory(dump_memory(first.memory)) == first.memory


def test_a_job_that_reports_no_progress_is_taken_to_be_half_done() -> None:
    left = remaining_s(np.array([100.0, 100.0, 100.0]), np.array([np.nan, 0.2, 1.0]))

    assert left == pytest.approx([100.0, 400.0, 0.0])
