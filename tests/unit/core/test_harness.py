"""The harness tells the time and the truth."""

from __future__ import annotations

import pytest

from services.core.cycle.snapshot import Phase
from tests.support.builders import a_node, story
from tests.support.harness import Harness


def test_a_job_starts_on_arrival_works_and_ends() -> None:
    harness = Harness("fifo", nodes=[a_node(gpus=1)])
    harness.submit("a", work_s=3600, gpu_power_w=1000)
    harness.submit("b", work_s=600, at_s=60)

    harness.run(hours=2)

    assert harness.ended["a"].jct_s == pytest.approx(3660)
    assert harness.ended["b"].jct_s == pytest.approx(3600 + 660)
    assert harness.ended["a"].carbon_gco2 == pytest.approx(3660 / 3600 * 300)


def test_a_preempted_job_releases_its_devices_after_its_grace_and_loses_no_work() -> None:
    harness = Harness("las", nodes=[a_node(gpus=1)])
    harness.submit("long", work_s=3 * 3600)
    harness.submit("new", work_s=600, at_s=3601)

    harness.run(hours=1.51)

    assert harness.jobs["long"].phase == Phase.PREEMPTING
    harness.run_until_idle()
    assert list(harness.ended) == ["new", "long"]
    assert harness.ended["long"].preemptions == 1
    assert harness.ended["long"].jct_s == pytest.approx(3 * 3600 + 60 + 120 + 660 + 60)


def test_a_refused_plan_changes_nothing_and_the_next_round_makes_up_for_it() -> None:
    harness = Harness("green", nodes=[a_node(gpus=1)])
    harness.submit("a", work_s=600)
    harness.reject_next = 1
    before = harness.memory

    harness.run(hours=0.4)

    assert [why for _, why in harness.rejections] == ["the cluster has changed since the snapshot"]
    assert harness.memory is before
    harness.run(hours=0.2)
    assert story(harness.plans[0][1]) == {"a": "start n0:0"}
