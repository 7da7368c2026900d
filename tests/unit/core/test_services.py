"""Service instances: where they start, who gives way to them, and what the policy is left with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.services import place_services
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.validate import check_plan
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.limit import limit_w
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, story, with_services

ONE, TWO = [a_node("n0")], [a_node("n0"), a_node("n1")]


def a_round(snapshot: Snapshot, policy: str = "fifo") -> dict[str, str]:
    built = build_policy(policy, {})
    return story(run_cycle(built, snapshot, built.initial()).plan)


def asleep(snapshot: Snapshot, *names: str) -> Snapshot:
    sleeps = np.array([name in names for name in snapshot.nodes.ids])
    return replace(snapshot, nodes=replace(snapshot.nodes, asleep=sleeps, may_sleep=np.ones_like(sleeps)))


def test_a_service_starts_before_every_job_where_the_fewest_free_gpus_suffice() -> None:
    jobs = [a_job("first", max_gpus=4, submitted_s=0), a_job("s", min_gpus=2), a_job("runs", on={"n1": (0, 1)})]
    snapshot = with_services(a_snapshot(jobs, TWO, trigger=Trigger.PASSIVE), "s")

    assert a_round(snapshot) == {"s": "start n1:2,3", "first": "start n0:0"}


def test_a_node_is_woken_only_where_no_other_has_the_gpus() -> None:
    snapshot = asleep(a_snapshot([a_job("s", min_gpus=2), a_job("t", min_gpus=4)], TWO), "n0")

    assert a_round(with_services(snapshot, "s", "t")) == {"s": "start n1:0,1", "t": "start n0:0,1,2,3"}


def test_services_that_wait_together_are_placed_so_that_none_waits() -> None:
    sizes = {"a": 4, "b": 3, "c": 3, "d": 2, "e": 2, "f": 2}
    jobs = [a_job(name, min_gpus=gpus, submitted_s=at) for at, (name, gpus) in enumerate(sizes.items())]
    nodes = [a_node("n0", gpus=8), a_node("n1", gpus=8)]

    found = a_round(with_services(a_snapshot(jobs, nodes), *sizes))
    assert {phrase.split()[0] for phrase in found.values()} == {"start"}

    more = a_job("g", min_gpus=1, submitted_s=9)
    found = a_round(with_services(a_snapshot([*jobs, more], nodes), *sizes, "g"))
    assert [name for name, phrase in found.items() if phrase.startswith("hold")] == ["f"], "17 do not fit: oldest first"


def test_a_service_leaves_the_rest_of_a_node_in_blocks() -> None:
    jobs = [a_job("s", min_gpus=2), a_job("runs", on={"n0": (1,)})]

    assert a_round(with_services(a_snapshot(jobs, [a_node("n0", gpus=8)]), "s")) == {"s": "start n0:2,3"}


def giving_way(*more: JobRow) -> list[JobRow]:
    return [
        a_job("old", on={"n0": (0, 1)}, submitted_s=NOON_S - 100),
        a_job("young", on={"n0": (2,)}, submitted_s=NOON_S - 50),
        a_job("wished", on={"n0": (3,)}, submitted_s=NOON_S - 10, priority=1),
        *more,
    ]


@pytest.mark.parametrize(
    ("gpus", "stopped"),
    [(1, {"young"}), (2, {"old"}), (3, {"old", "young"}), (4, {"old", "young", "wished"})],
    ids=["the youngest", "nobody beside a wider gang", "both of no priority", "all"],
)
def test_gangs_of_the_lowest_priority_give_way_the_youngest_first(gpus: int, stopped: set[str]) -> None:
    snapshot = with_services(a_snapshot(giving_way(a_job("s", min_gpus=gpus)), ONE, trigger=Trigger.PASSIVE), "s")
    told = a_round(snapshot)

    assert told.pop("s") == "hold waiting_for_release"
    assert told.keys() == stopped
    assert all(phrase.startswith("preempt standing_service") for phrase in told.values())


def test_the_fewest_running_gpus_are_stopped() -> None:
    wide = a_job("wide", on={"n0": (0, 1, 2, 3), "n1": (0, 1)})
    narrow = a_job("narrow", on={"n1": (2, 3)}, submitted_s=NOON_S)
    jobs = [wide, narrow, a_job("s", min_gpus=2), a_job("t", min_gpus=4)]

    assert a_round(with_services(a_snapshot(jobs, TWO), "s"), "las")["narrow"] == "preempt standing_service -> 2"
    told = a_round(with_services(a_snapshot(jobs, TWO), "t"), "las")
    assert told["wide"] == "preempt standing_service -> 6"
    assert told["t"] == "hold waiting_for_release"


def test_nobody_stops_for_what_is_being_released() -> None:
    jobs = [
        a_job("stops", on={"n1": (0, 1)}, phase=Phase.PREEMPTING),
        a_job("a", on={"n0": (0, 1, 2, 3)}),
        a_job("b", on={"n1": (2,)}, preemptible=False),
        a_job("s", min_gpus=3),
        a_job("waits"),
    ]
    told = a_round(with_services(a_snapshot(jobs, TWO), "s"))

    assert told == {"s": "hold waiting_for_release", "waits": "hold not_enough_free_gpus"}


def test_a_job_as_wide_as_the_cluster_waits_for_gpus_that_services_hold_and_a_wider_one_for_a_wider_cluster() -> None:
    jobs = [a_job("s", min_gpus=2), a_job("whole", min_gpus=4), a_job("wider", min_gpus=5)]

    told = a_round(with_services(a_snapshot(jobs, ONE), "s"))

    assert told == {"s": "start n0:0,1", "whole": "hold not_enough_free_gpus", "wider": "hold no_eligible_node"}


def test_a_service_that_cannot_be_had_room_for_yet_keeps_what_falls_free() -> None:
    kept = a_job("kept", on={"n0": (0, 1)}, preemptible=False)
    jobs = [kept, a_job("runs", on={"n0": (2,)}), a_job("s", min_gpus=4), a_job("waits")]
    snapshot = with_services(a_snapshot(jobs, ONE), "s")

    assert a_round(snapshot) == {"s": "hold not_enough_free_gpus", "waits": "hold not_enough_free_gpus"}


def test_a_service_waits_for_a_node_it_may_run_on() -> None:
    snapshot = a_snapshot([a_job("s", min_gpus=2), a_job("w", min_gpus=5), a_job("r", on={"n1": (0, 1, 2)})], TWO)

    assert a_round(with_services(snapshot, "s", "w", only_on=["n1"])) == {
        "s": "hold waiting_for_release",
        "w": "hold no_eligible_node",
        "r": "preempt standing_service -> 3",
    }


def test_the_policy_sees_neither_services_nor_their_devices() -> None:
    jobs = [
        a_job("wide", on={"n0": (0, 1, 2, 3), "n1": (0,)}, gpu_power_w=300.0),
        a_job("kept", on={"n1": (3,)}, preemptible=False),
        a_job("s", min_gpus=2),
        a_job("t", min_gpus=3, submitted_s=NOON_S),
    ]
    given = replace(a_snapshot(jobs, TWO), measured_w=2_000.0, services_w=500.0, services_gpus=2)
    actions, shown = place_services(with_services(given, "s", "t"))

    assert story(Plan(7, actions)) == {
        "s": "start n1:1,2",
        "wide": "preempt standing_service -> 5",
        "t": "hold waiting_for_release",
    }
    assert shown.jobs.ids == ("wide", "kept")
    assert shown.jobs.phase.tolist() == [Phase.PREEMPTING, Phase.RUNNING]
    assert shown.jobs.placements[0] == Placement((NodeShare(NodeId("n0"), (3,)), NodeShare(NodeId("n1"), (0,))))
    assert shown.jobs.gpus.tolist() == [2, 1]
    assert shown.nodes.gpus.tolist() == [1, 2]
    assert shown.nodes.free_devices == ((), ())
    assert (shown.services, shown.services_gpus, shown.services_w) == ((), 7, 500 + 5 * 300)
    assert math.isnan(shown.measured_w)


def test_a_node_that_a_service_gets_stays_on() -> None:
    snapshot = asleep(a_snapshot([a_job("s", min_gpus=2)], TWO))
    powerflow = build_policy("powerflow", {"spare_nodes": 0})
    plan = run_cycle(powerflow, with_services(snapshot, "s"), powerflow.initial()).plan

    assert story(plan) == {"s": "start n0:0,1"}
    assert [each.node_id for each in plan.nodes] == ["n1"]


def test_services_count_in_their_tenants_quota() -> None:
    jobs = [a_job("runs", on={"n0": (0, 1)}), a_job("s", min_gpus=1), a_job("t", min_gpus=2), a_job("waits")]
    snapshot = with_services(a_snapshot(jobs, TWO, quota={"t": 4}), "s", "t")

    assert a_round(snapshot) == {"s": "start n0:2", "t": "hold tenant_quota", "waits": "hold tenant_quota"}


def test_a_limit_is_for_all_gpus_and_left_to_jobs_less_what_services_draw() -> None:
    snapshot = replace(a_snapshot([], ONE), services_gpus=4, services_w=700.0)

    assert limit_w(snapshot, PowerflowConfig(power_limit_w=2_000)) == 1_300
    assert limit_w(snapshot, PowerflowConfig(eta=0.5, gpu_max_w=400)) == 0.5 * 8 * 400 - 700


@pytest.mark.parametrize(
    ("shares", "complaint"), [((("n0", (0,)), ("n1", (0,))), "on one node"), ((("n0", (0, 1)),), "may not run on n0")]
)
def test_a_service_is_checked_to_be_where_it_may(
    shares: tuple[tuple[str, tuple[int, ...]], ...], complaint: str
) -> None:
    snapshot = with_services(a_snapshot([a_job("s", min_gpus=2)], TWO), "s", only_on=["n1"])
    placement = Placement(tuple(NodeShare(NodeId(node), devices) for node, devices in shares))

    with pytest.raises(PlanError, match=complaint):
        check_plan(snapshot, Plan(7, (Start(JobId("s"), placement, Reason.SERVICE_INSTANCE),)))


def test_a_policy_cannot_take_what_a_service_waits_for() -> None:
    class Greedy:
        name = "greedy"

        def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
            placement = Placement((NodeShare(NodeId("n0"), (3,)),))
            return Plan(snapshot.version, (Start(JobId("waits"), placement, Reason.IN_ORDER),)), memory

    jobs = [a_job("runs", on={"n0": (0, 1, 2)}), a_job("s", min_gpus=4), a_job("waits")]

    with pytest.raises(PlanError, match=r"drained|not free"):
        run_cycle(Greedy(), with_services(a_snapshot(jobs, ONE), "s"), None)  # type: ignore[arg-type]


def test_a_recorded_round_is_replayed_with_its_services() -> None:
    snapshot = with_services(a_snapshot(giving_way(a_job("s", min_gpus=2)), ONE), "s")
    again = snapshot_from_json(snapshot_to_json(replace(snapshot, services_gpus=3, services_w=9.5)))

    assert a_round(again) == a_round(snapshot)
    assert (again.services_gpus, again.services_w) == (3, 9.5)
    assert any(isinstance(action, Preempt) for action in place_services(again)[0])


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_jobs_that_only_services_leave_no_room_for_wait_for_gpus(policy: str) -> None:
    snapshot = replace(a_snapshot([a_job("fits", min_gpus=6), a_job("never", min_gpus=9)], ONE), services_gpus=4)

    assert a_round(snapshot, policy) == {"fits": "hold not_enough_free_gpus", "never": "hold no_eligible_node"}
