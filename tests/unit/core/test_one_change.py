"""The one change: in which order candidates are tried, and how many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from services.core.cycle.plan import Hold, Plan, Start
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.ids import JobId, NodeId
from services.core.domain.orders import PowerOrder
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies import one_change as module
from services.core.policies.one_change import Change, Elsewhere, Predicted, changes, one_change
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot

OLD, NEW = JobId("old"), JobId("zz-new")
MINE = "min_gpus", "eligible", "preemptible", "flex", "deadline_s", "submitted_s", "remaining_s"


@dataclass
class Choosy(StatelessPolicy):
    """Starts the new job if it is as the policy wants it, and keeps what it was shown."""

    wants: Callable[[dict[str, Any]], bool] = lambda _: False
    name: str = "choosy"
    shown: list[dict[str, Any]] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        jobs = snapshot.jobs
        assert OLD not in jobs.index
        asked = {name: getattr(jobs, name)[jobs.index[NEW]].tolist() for name in MINE}
        asked["within"] = snapshot.within.get(NEW)
        self.shown.append(asked | {"trigger": snapshot.trigger})
        if not self.wants(self.shown[-1]):
            return Plan(snapshot.version, (Hold(NEW, Reason.NOT_ENOUGH_FREE_GPUS),)), None
        on = next(at for at, model in enumerate(snapshot.nodes.gpu_model) if jobs.eligible[jobs.index[NEW], model])
        devices = tuple(range(int(jobs.min_gpus[jobs.index[NEW]])))
        start = Start(NEW, Placement((NodeShare(NodeId(snapshot.nodes.ids[on]), devices),)), Reason.IN_ORDER)
        return Plan(snapshot.version, (start,)), None


def a_queue(**job: object) -> Snapshot:
    row = a_job("old", min_gpus=4, max_gpus=4, models=("A100",), **{"preemptible": False, **job})  # type: ignore[arg-type]
    return a_snapshot([row], [a_node("n0"), a_node("n1", model="V100")])


def answer(policy: Choosy, snapshot: Snapshot, why: Reason = Reason.NOT_ENOUGH_FREE_GPUS) -> Change | None:
    rounds = [replace(snapshot, trigger=trigger) for trigger in (Trigger.PASSIVE, Trigger.ACTIVE)]
    there = Elsewhere("V100", np.array([False, True]), Predicted(60.0))
    tried = changes(snapshot, OLD, why=why, one_size=True, elsewhere=[there])
    return one_change(policy, rounds, None, OLD, tried, as_id=NEW, predicted=Predicted(800.0))


def test_candidates_come_from_the_smallest_to_the_largest() -> None:
    policy = Choosy()
    snapshot = a_queue(deadline_s=NOON_S + 5 * 3_600)

    assert answer(policy, snapshot, Reason.GREENER_HOURS) is None

    first, *shown = policy.shown
    assert (first["submitted_s"], first["remaining_s"]) == (NOON_S, 200.0), "it is as it was, and submitted now"
    changed = [{name: value for name, value in each.items() if str(value) != str(first[name])} for each in shown]
    assert changed == [
        {"deadline_s": math.inf},
        {"preemptible": True},
        {"eligible": [False, True], "remaining_s": 15.0},
        {"min_gpus": 2, "remaining_s": 400.0},
        {"min_gpus": 1, "remaining_s": 800.0},
        {"deadline_s": NOON_S + 3 * 3_600},
        {"deadline_s": NOON_S + 1 * 3_600},
    ]


def test_a_larger_class_is_tried_under_an_order_alone() -> None:
    policy, snapshot = Choosy(), a_queue()
    order = PowerOrder("o", -1, math.inf, math.inf, NOON_S + 60, NOON_S + 3_600)

    answer(policy, snapshot)
    answer(policy, replace(snapshot, orders=(order,)))

    flexes = [each["flex"] for each in policy.shown if not math.isnan(each["flex"])]
    assert flexes == [0.5], "the class of a job that names none is 25 %"


@pytest.mark.parametrize(
    ("wants", "found"),
    [
        (lambda job: job["preemptible"], Change(preemptible=True)),
        (lambda job: job["deadline_s"] == math.inf, Change(deadline_s=math.inf)),
        (lambda job: job["min_gpus"] <= 2, Change(gpus=2)),
        (lambda job: job["min_gpus"] <= 2 and job["trigger"] is Trigger.PASSIVE, None),
        (lambda job: job["min_gpus"] <= 2 and job["trigger"] is Trigger.ACTIVE, None),
        (lambda _: True, None),
    ],
    ids=["preemptible", "no deadline", "fewer", "not in active rounds", "in active rounds alone", "as it is"],
)
def test_the_first_that_starts_it_in_every_round_is_named(
    wants: Callable[[dict[str, Any]], bool], found: Change | None
) -> None:
    assert answer(Choosy(wants), a_queue(deadline_s=NOON_S + 5 * 3_600)) == found


def test_rounds_are_replayed_within_a_bound() -> None:
    policy = Choosy(lambda job: job["min_gpus"] == 1)
    assert answer(policy, a_queue()) == Change(gpus=1)
    held = len(policy.shown)

    with patch.object(module, "MOST_JOBS", held - 1):
        assert answer(policy, a_queue()) is None
    assert len(policy.shown) == 2 * held - 1


def test_jobs_that_hold_gpus_or_are_bound_get_no_answer() -> None:
    policy, snapshot = Choosy(lambda _: True), a_queue()

    assert answer(policy, a_snapshot([a_job("old", gpus=1)])) is None
    assert answer(policy, replace(snapshot, bound={OLD: (NodeId("n0"),)})) is None
    assert answer(policy, a_queue(attained_gpu_s=1.0)) is None
    assert not policy.shown


@pytest.mark.parametrize(("level", "tried"), [(0, [0, 1, 2, None]), (2, [2, None]), (-1, [-1, None])])
def test_a_job_within_one_domain_is_tried_in_wider_ones_and_then_anywhere(level: int, tried: list[int | None]) -> None:
    policy = Choosy()
    found = a_queue(preemptible=True)
    domains = np.array([[0, 0, 0], [1, 0, 0]])
    tree = replace(found.nodes, domains=domains)
    snapshot = replace(found, nodes=tree, levels=("node", "rack", "block"), within={OLD: level})

    assert answer(policy, snapshot) is None

    assert [each["within"] for each in policy.shown[: len(tried)]] == tried
    assert {each["within"] for each in policy.shown[len(tried) :]} == {level}, "the others change that alone"

    policy = Choosy(wants=lambda asked: asked["within"] is None)
    assert answer(policy, snapshot) == Change(within=3)
