"""Jobs that are bound to the nodes that alone have their checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.bound import Widening, show_bound
from services.core.cycle.plan import Plan, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.sharing import may_share
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.cycle.validate import check_plan
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, story

TWO_NODES = [a_node("n0", gpus=4), a_node("n1", gpus=4)]


def bind(snapshot: Snapshot, **to: str) -> Snapshot:
    """Return the snapshot with these jobs bound, each to nodes separated by spaces."""
    return replace(snapshot, bound={JobId(job): tuple(map(NodeId, on.split())) for job, on in to.items()})


def decided(snapshot: Snapshot, policy: str = "fifo", **parameters: object) -> dict[str, str]:
    made = build_policy(policy, parameters)
    return story(run_cycle(made, snapshot, made.initial()).plan)


@pytest.mark.parametrize("policy", ["fifo", "las", "green", "joint", "a-srpt", "powerflow"])
def test_a_job_goes_back_to_its_node_though_another_one_suits_better(policy: str) -> None:
    snapshot = a_snapshot([a_job("a", min_gpus=2)], [a_node("n0", gpus=2), a_node("n1", gpus=4)])

    assert decided(snapshot, policy) == {"a": "start n0:0,1"}
    assert decided(bind(snapshot, a="n1"), policy) == {"a": "start n1:0,1"}


@pytest.mark.parametrize("policy", ["fifo", "las", "green", "joint", "a-srpt", "powerflow"])
def test_a_passive_round_starts_a_bound_job_that_nobody_waits_with(policy: str) -> None:
    snapshot = replace(a_snapshot([a_job("a")], TWO_NODES), trigger=Trigger.PASSIVE)

    assert decided(bind(snapshot, a="n1"), policy) == {"a": "start n1:0"}


def test_a_job_whose_node_is_busy_waits_and_holds_nobody_up() -> None:
    jobs = [a_job("a", gpus=3, on={"n0": (0, 1, 2)}), a_job("b", min_gpus=2), a_job("c", min_gpus=4)]
    snapshot = bind(a_snapshot(jobs, TWO_NODES), b="n0")

    assert decided(snapshot) == {"b": "hold checkpoint_node_busy", "c": "start n1:0,1,2,3"}


def test_what_is_free_on_its_node_is_kept_for_the_first_of_a_strict_queue() -> None:
    jobs = [
        a_job("a", gpus=2, on={"n0": (0, 1)}),
        a_job("z", gpus=3, on={"n1": (0, 1, 2)}),
        a_job("b", min_gpus=4),
        *(a_job(name, submitted_s=NOON_S - 60) for name in ("c", "d")),
    ]
    snapshot = bind(a_snapshot(jobs, TWO_NODES), b="n0")

    found = decided(snapshot)

    assert found["b"] == "hold checkpoint_node_busy"
    assert (found["c"], found["d"]) == ("start n1:3", "hold not_enough_free_gpus")


def test_a_better_ranked_job_stops_what_runs_on_its_node_and_nothing_else() -> None:
    jobs = [
        a_job("a", min_gpus=4, attained_gpu_s=1.0),
        a_job("b", gpus=4, on={"n0": (0, 1, 2, 3)}, attained_gpu_s=1e6),
        a_job("c", gpus=4, on={"n1": (0, 1, 2, 3)}, attained_gpu_s=2e6),
    ]

    assert decided(a_snapshot(jobs, TWO_NODES), "las")["c"].startswith("preempt")
    assert decided(bind(a_snapshot(jobs, TWO_NODES), a="n0"), "las") == {
        "b": "preempt outranked -> 4",
        "a": "hold waiting_for_release",
    }


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("drained", Reason.CHECKPOINT_NODE_CLOSED),
        ("small", Reason.CHECKPOINT_NODE_CLOSED),
        ("gone", Reason.CHECKPOINT_NODE_AWAY),
        ("n0 gone", Reason.CHECKPOINT_NODE_AWAY),
    ],
)
@pytest.mark.parametrize("policy", ["fifo", "las", "green", "joint", "a-srpt"])
def test_a_job_waits_for_a_node_that_cannot_have_it_and_says_why(policy: str, to: str, reason: Reason) -> None:
    nodes = [a_node("n0"), a_node("drained", schedulable=False), a_node("small", gpus=1)]
    snapshot = bind(a_snapshot([a_job("a", min_gpus=2), a_job("b")], nodes), a=to)

    found = decided(snapshot, policy)

    assert found["a"] == f"hold {reason}"
    assert found["b"].startswith("start")


def test_a_gang_of_several_nodes_goes_back_to_all_of_them_in_their_order() -> None:
    snapshot = a_snapshot([a_job("a", min_gpus=1, max_gpus=8)], [*TWO_NODES, a_node("n2", gpus=8)])

    assert decided(bind(snapshot, a="n1 n0")) == {"a": "start n1:0 n0:0"}
    assert decided(bind(snapshot, a="n1 n0"), gang="max") == {"a": "start n1:0,1,2,3 n0:0,1,2,3"}


def test_bound_jobs_may_grow_as_far_as_their_nodes_have_gpus() -> None:
    jobs = [
        a_job("a", gpus=1, max_gpus=8, on={"n0": (0,)}),
        a_job("b", gpus=1, max_gpus=8, on={"n0": (1,)}),
        a_job("c", gpus=1, on={"n0": (2,)}),
        a_job("d", gpus=1, max_gpus=8, on={"n1": (0,)}),
    ]
    snapshot = bind(a_snapshot(jobs, TWO_NODES), a="n0", b="n0", d="n1")
    shown = show_bound(snapshot)
    room = Widening(shown, shown.jobs.phase.nonzero()[0], shown.jobs.gpus)

    assert shown.jobs.max_gpus.tolist() == [4, 4, 1, 4]
    assert (room.allows(0, 1), room.allows(0, 2), room.allows(3, 3)) == (True, False, True)
    room.take(0, 1)
    assert not room.allows(1, 1)


def test_joint_does_not_widen_by_gpus_that_bound_jobs_cannot_have() -> None:
    jobs = [a_job(name, max_gpus=4, remaining_s=36_000.0, min_gpus=1) for name in ("a", "b", "c", "d")]
    snapshot = a_snapshot(jobs, TWO_NODES)
    bound = bind(snapshot, **dict.fromkeys(("a", "b", "c", "d"), "n0"))

    widths = [phrase.count(",") + 1 for phrase in decided(bound, "joint").values()]
    assert widths == [1, 1, 1, 1], "eight GPUs for four jobs would have been two for each, of which two find room"
    assert {phrase.count(",") + 1 for phrase in decided(snapshot, "joint").values()} == {2}


def test_a_plan_that_starts_a_bound_job_elsewhere_is_refused() -> None:
    snapshot = bind(a_snapshot([a_job("a")], TWO_NODES), a="n1")
    elsewhere = Start(JobId("a"), Placement((NodeShare(NodeId("n0"), (0,)),)), Reason.IN_ORDER)

    with pytest.raises(PlanError, match="job a cannot start on n0: its checkpoint is on n1"):
        check_plan(snapshot, Plan(snapshot.version, (elsewhere,)))


def test_a_bound_job_shares_a_gpu_of_its_own_node_alone() -> None:
    jobs = [a_job("a", gpus=1, on={"n0": (0,)}, shareable=True), a_job("b", shareable=True)]
    snapshot = a_snapshot(jobs, TWO_NODES)

    assert may_share(snapshot, 0, 1)
    assert may_share(bind(snapshot, b="n0"), 0, 1)
    assert not may_share(bind(snapshot, b="n1"), 0, 1)


def test_what_jobs_are_bound_to_is_recorded() -> None:
    snapshot = bind(a_snapshot([a_job("a")], TWO_NODES), a="n1 n0")

    assert snapshot_from_json(snapshot_to_json(snapshot)).bound == snapshot.bound
