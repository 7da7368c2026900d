"""What is named as starting a waiting job earlier does, by the simulation that says when jobs start, as it is claimed.

The changed queues that are held against the answer are written down anew and simulated whole, as the comparison is.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.contracts.jobs import Share
from services.contracts.live import (
    Earlier,
    EarlierRequest,
    LiveJob,
    LiveKind,
    LiveNode,
    LiveProfile,
    LiveRates,
    LiveState,
)
from services.core.policies.registry import POLICIES
from services.simulator.live import earlier
from tests.simulator.test_live import HOUR_S, a_job, a_state, outcomes
from tests.support.workloads import START_S

NOW_S = START_S + HOUR_S
VARIANTS: list[tuple[str, dict[str, object]]] = [(name, {}) for name in POLICIES]
VARIANTS += [("fifo", {"backfill": True}), ("green", {"slack_s": 86_400.0}), ("joint", {"slack_s": 86_400.0})]
VARIANTS += [("fair+las", {}), ("a-srpt", {"others": "pass"})]
QUEUES = 6
PIECE, PIECES = 100, 18  # queues of each policy at once, and how often: together they name over 10,000 changes


@dataclass(frozen=True)
class Queue:
    """A live queue with a job that waits, and what it could be instead."""

    state: LiveState
    waits: LiveJob
    instead: list[LiveJob]


def a_queue(seed: int, policy: str, parameters: dict[str, object]) -> Queue:
    draw = random.Random(seed)
    nodes = [LiveNode(kind=draw.randint(0, 1), gpus=draw.randint(1, 4), takes_work=True) for _ in range(3)]
    nodes = [each.model_copy(update={"domains": [at, at // 2]}) for at, each in enumerate(nodes)]
    free, jobs = [list(range(each.gpus)) for each in nodes], list[LiveJob]()
    for at in range(draw.randint(2, 8)):
        on = draw.randrange(3)
        gpus = draw.randint(1, 4)
        gang = None
        if len(free[on]) >= gpus and draw.random() < 0.7:
            gang = [Share(node_id=str(on), devices=[free[on].pop() for _ in range(gpus)])]
        known = {"profile": nodes[on].kind if gang else draw.randint(0, 2), "preemptible": draw.random() < 0.6}
        known |= {"priority": draw.choice((0, 0, 1)), "work_s": draw.choice((900.0, 7_200.0, 50_000.0))}
        jobs.append(a_job(f"j{at}", at_s=draw.randint(0, 3_600), gpus=gpus, gang=gang, **known))
    gpus, profile, long_s = draw.choice((2, 4, 4)), draw.randint(0, 1), draw.choice((600.0, 7_200.0))
    deadline_s = draw.choice((None, NOW_S + 30 * HOUR_S))
    asked: dict[str, Any] = {"gpus": gpus, "profile": profile, "work_s": long_s, "deadline_s": deadline_s}
    asked |= {"preemptible": draw.random() < 0.5, "tenant": draw.choice("ab"), "within": draw.choice((None, 0, 1))}
    again = {**asked, "at_s": HOUR_S}
    tried = [{}, {"deadline_s": None}, {"preemptible": True}, {"within": 1}, {"within": None}, {"profile": 1 - profile}]
    tried += [{"gpus": gpus // 2, "work_s": 2 * long_s}, {"profile": 2}]
    state = a_state(
        *jobs,
        nodes=tuple(nodes),
        policy=policy,
        parameters=parameters,
        kinds=[LiveKind(gpu_model="A100", idle_w=50.0), LiveKind(gpu_model="V100", idle_w=40.0)],
        profiles=[a_profile(0), a_profile(1), a_profile(0, 1)],
        levels=["node", "rack"],
        times_s=[START_S + HOUR_S * hour for hour in range(48)],
        intensity_gco2_per_kwh=[draw.uniform(50, 700) for _ in range(48)],
        tenant_guarantees=draw.choice(({}, {}, {"a": 2})),
    )
    return Queue(state, a_job("waits", **asked), [a_job("zz", **{**again, **each}) for each in tried])


def a_profile(*kinds: int) -> LiveProfile:
    rates = {each: LiveRates(speed=[0.5, 1.0, 2.0, 3.5], power_w=[200.0] * 4) for each in kinds}
    return LiveProfile(gpus=[1, 2, 4, 8], rates=rates)


def start_s(folder: Path, queue: Queue, job: LiveJob) -> float | None:
    """Return when a job starts, by the comparison of policies."""
    state = queue.state.model_copy(update={"jobs": [*queue.state.jobs, job]})
    document = outcomes(folder, state, state.policy)
    columns = document["policies"][0]["jobs"]["starts_at_s"]
    found: float | None = columns[document["job_ids"].index(job.id)]
    return found


def asked_of(queue: Queue) -> Earlier:
    state = queue.state.model_copy(update={"jobs": [*queue.state.jobs, queue.waits]})
    return earlier(EarlierRequest(state=state, job_id="waits", instead=[*queue.instead]))


def held_against_replays(folder: Path, name: str, parameters: dict[str, object], seeds: range) -> Counter[int]:
    named = Counter[int]()
    for seed in seeds:
        queue = a_queue(seed, name, parameters)
        found = asked_of(queue)
        if found.change is None:
            continue
        planned_s, starts_s = start_s(folder, queue, queue.waits), start_s(folder, queue, queue.instead[found.change])
        assert found.starts_s == pytest.approx(starts_s, abs=1), (seed, found)
        assert starts_s is not None, (seed, found)
        if planned_s is None:
            assert found.planned_s is None, (seed, found)
        else:
            assert found.planned_s == pytest.approx(planned_s, abs=1), (seed, found)
            assert starts_s <= planned_s - 59, (seed, found)
        named[found.change] += 1
    return named


def busy(name: str, device: int, left_s: float) -> LiveJob:
    return a_job(name, work_s=left_s, gang=[Share(node_id="0", devices=[device])], preemptible=False)


@pytest.mark.parametrize(
    ("instead", "planned_s", "found"),
    [
        ((2, 1), None, Earlier(change=1, starts_s=NOW_S + HOUR_S, planned_s=NOW_S + 2 * HOUR_S)),
        ((2, None, 1), None, Earlier(change=2, starts_s=NOW_S + HOUR_S, planned_s=NOW_S + 2 * HOUR_S)),
        ((1, 1), None, Earlier()),
        ((2, 1), NOW_S + 1.5 * HOUR_S, Earlier(change=1, starts_s=NOW_S + HOUR_S, planned_s=NOW_S + 1.5 * HOUR_S)),
        ((2, 1), NOW_S + HOUR_S + 30, Earlier()),
    ],
    ids=["fewer", "one that could run nowhere", "as it is", "planned by the policy", "not a minute earlier"],
)
def test_the_first_that_starts_earlier_is_named(
    instead: tuple[int | None, ...], planned_s: float | None, found: Earlier
) -> None:
    """One of two GPUs is free in an hour, the other in two; the job asks for both."""
    state = a_state(busy("a", 0, HOUR_S), busy("b", 1, 2 * HOUR_S), a_job("waits", gpus=2, at_s=60.0))
    asked = [None if gpus is None else a_job("zz", gpus=gpus, at_s=HOUR_S) for gpus in instead]
    request = EarlierRequest(state=state, job_id="waits", instead=asked, planned_s=planned_s)

    assert earlier(request) == found


under_every_policy = pytest.mark.parametrize(
    ("name", "parameters"), VARIANTS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(VARIANTS)]
)


@under_every_policy
def test_what_is_named_starts_the_job_as_much_earlier_as_claimed(
    name: str, parameters: dict[str, object], tmp_path: Path
) -> None:
    assert held_against_replays(tmp_path, name, parameters, range(QUEUES))


@pytest.mark.slow
@pytest.mark.parametrize("first", [QUEUES + at * PIECE for at in range(PIECES)])
@under_every_policy
def test_what_is_named_starts_the_job_earlier_in_thousands_of_replays(
    name: str, parameters: dict[str, object], first: int, tmp_path: Path
) -> None:
    named = held_against_replays(tmp_path, name, parameters, range(first, first + PIECE))
    print(name, parameters, first, named.total(), dict(named))
    assert named.total() > PIECE / 4
