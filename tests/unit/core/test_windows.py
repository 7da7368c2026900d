"""The edges of windows, one case each; ``tests/properties/test_windows.py`` has what holds in any cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.snapshot import Phase, Snapshot
from services.core.domain.ids import NodeId
from services.core.domain.windows import Ending, Window, most_taken
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy
from services.core.policies.windows import slots
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story

N0 = NodeId("n0")


def window(ahead_s: float, holder: str | None = None, gpus: int = 4, lasts_s: float = 3_600.0) -> Window:
    return Window("w", NOON_S + ahead_s, NOON_S + ahead_s + lasts_s, {N0: gpus}, holder)


def cluster(*jobs: JobRow, windows: tuple[Window, ...], left_s: float = math.inf, grace_s: float = 120.0) -> Snapshot:
    snapshot = a_snapshot(jobs, [a_node("n0", gpus=4)])
    endings = {job_id: Ending(left_s, grace_s) for job_id in snapshot.jobs.ids}
    return replace(snapshot, windows=windows, endings=endings)


def decided(snapshot: Snapshot) -> dict[str, str]:
    policy = build_policy("fifo", {})
    return story(run_under_orders(policy, snapshot, policy.initial()).plan)


@pytest.mark.parametrize(
    ("ahead_s", "left_s", "preemptible", "starts"),
    [
        (500.0, 500.0, False, True),
        (500.0, 501.0, False, False),
        (500.0, 501.0, True, False),
        (731.0, math.inf, True, True),
        (729.0, math.inf, True, False),
        (9e6, math.inf, False, False),
    ],
)
def test_what_will_be_gone_in_time_starts(ahead_s: float, left_s: float, preemptible: bool, starts: bool) -> None:
    job = a_job("j", preemptible=preemptible)
    found = decided(cluster(job, windows=(window(ahead_s),), left_s=left_s))
    assert ("start" in found["j"]) == starts
    assert starts or "reserved" in found["j"]


@pytest.mark.parametrize(
    ("ahead_s", "left_s", "grace_s", "stops"),
    [
        (130.0, math.inf, 120.0, True),
        (131.0, math.inf, 120.0, False),
        (131.0, math.inf, 300.0, True),
        (130.0, 130.0, 120.0, False),
        (130.0, 131.0, 120.0, True),
    ],
)
def test_a_gang_is_stopped_its_grace_period_ahead(ahead_s: float, left_s: float, grace_s: float, stops: bool) -> None:
    job = a_job("j", phase=Phase.RUNNING, gpus=2)
    found = decided(cluster(job, windows=(window(ahead_s),), left_s=left_s, grace_s=grace_s))
    assert ("reserved" in found.get("j", "")) == stops


def test_of_a_part_no_more_is_stopped_than_needed() -> None:
    jobs = [a_job(name, phase=Phase.RUNNING, gpus=1, waiting_since_s=NOON_S - at) for at, name in enumerate("abcd")]
    assert decided(cluster(*jobs, windows=(window(0.0, "x", 2),))).keys() == {"a", "b"}, "the youngest"


@pytest.mark.parametrize(("since_s", "starts"), [(599.0, False), (600.0, True)])
def test_what_its_holder_leaves_is_lent(since_s: float, starts: bool) -> None:
    found = decided(cluster(a_job("j"), windows=(window(-since_s, "x"),)))
    assert ("start" in found["j"]) == starts


def test_windows_that_follow_each_other_are_not_added_up() -> None:
    windows = (window(0.0, "x", 3), replace(window(3_600.0, "y", 2), id="v"))
    assert most_taken(windows, N0, NOON_S, NOON_S + 9_000) == 3
    snapshot = cluster(windows=windows)
    usable = np.ones(1, dtype=np.bool_)
    assert [
        slot.start_s - NOON_S for slot in slots(snapshot, usable, 2, 600, [NOON_S, NOON_S + 3_599, NOON_S + 3_600])
    ] == [3_600]
