"""Guaranteed GPUs of tenants, borrowing and reclaim: what each rule says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.snapshot import JobTable, Saves, Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, held, started

HOUR_S = 3_600.0
EIGHT = [a_node(gpus=8)]


def runs(name: str, first: int, gpus: int, began_h: float = 1.0, **columns: Any) -> JobRow:
    """Return a job of the tenant ``b`` that runs on devices of n0 and began so many hours ago."""
    on = {"n0": tuple(range(first, first + gpus))}
    given: dict[str, Any] = {"tenant": "b", "min_gpus": gpus, "gpus": gpus, "on": on} | columns
    return a_job(name, waiting_since_s=NOON_S - began_h * HOUR_S, **given)


def waits(name: str, gpus: int = 1, tenant: str = "a", **columns: Any) -> JobRow:
    """Return a job that waits."""
    return a_job(name, tenant=tenant, min_gpus=gpus, **columns)


def plan_of(
    jobs: list[JobRow],
    guarantees: dict[str, int],
    policy: str = "fifo",
    nodes: list[NodeRow] = EIGHT,
    trigger: Trigger = Trigger.PASSIVE,
    quota: dict[str, int] | None = None,
    **changed: Any,
) -> Plan:
    snapshot = a_snapshot(jobs, nodes, trigger=trigger, quota=quota)
    return planned(snapshot.again(tenant_guarantees=guarantees, **changed), policy)


def planned(snapshot: Snapshot, policy: str = "fifo") -> Plan:
    made = build_policy(policy, {})
    return run_under_orders(made, snapshot, made.initial()).plan


def given_back(plan: Plan) -> dict[str, str]:
    """Return the tenants that have GPUs back, by the job that gives them."""
    return {each.job_id: each.to for each in plan.actions if isinstance(each, Preempt) and each.to}


FULL = [runs("old", 0, 4, 9.0), runs("new", 4, 3, 1.0), runs("newest", 7, 1, 0.1)]


@pytest.mark.parametrize("policy", [*POLICIES, f"{FAIR}las"])
@pytest.mark.parametrize("trigger", list(Trigger))
def test_who_borrowed_last_gives_back_first_and_no_more_than_is_needed(policy: str, trigger: Trigger) -> None:
    plan = plan_of([*FULL, waits("mine", 3)], {"a": 4}, policy, trigger=trigger)

    assert given_back(plan) == {"new": "a"}, "newest is spared, as new suffices"
    assert held(plan)["mine"] == "waiting_for_release"


def test_as_many_stop_as_are_needed() -> None:
    assert set(given_back(plan_of([*FULL, waits("mine", 4)], {"a": 4}))) == {"new", "newest"}
    assert set(given_back(plan_of([*FULL, waits("mine"), waits("more", 3)], {"a": 4}))) == {"new", "newest"}


def test_nothing_stops_that_would_not_suffice() -> None:
    firm = [runs("firm", 0, 6, preemptible=False), runs("soft", 6, 2)]

    assert given_back(plan_of([*firm, waits("mine", 4)], {"a": 4})) == {}
    assert set(given_back(plan_of([*firm, waits("mine", 4), waits("small", 2)], {"a": 4}))) == {"soft"}


def test_what_a_tenant_is_guaranteed_is_not_given_back() -> None:
    jobs = [*FULL, waits("mine", 4)]

    assert given_back(plan_of(jobs, {"a": 4, "b": 8})) == {}, "12 of 8: each is reduced in proportion, a to 2"
    assert given_back(plan_of([*FULL, waits("mine", 2)], {"a": 4, "b": 8})) == {"new": "a"}
    assert given_back(plan_of(jobs, {"a": 4, "b": 4})) == {"new": "a", "newest": "a"}, "old is within b's guarantee"


def test_a_gang_wider_than_its_guarantee_is_borrowed_as_a_whole() -> None:
    assert given_back(plan_of([runs("wide", 0, 8), waits("mine", 2)], {"a": 2, "b": 6})) == {"wide": "a"}
    assert given_back(plan_of([*FULL, waits("mine", 5)], {"a": 4})) == {}, "nor does one reclaim"


def test_free_gpus_go_first_to_whom_they_are_guaranteed() -> None:
    earlier = waits("theirs", 2, "b", submitted_s=NOON_S - 9 * HOUR_S)
    plan = plan_of([runs("r", 0, 6), earlier, waits("mine", 2)], {"a": 4})

    assert started(plan) == {"mine": 2}
    assert given_back(plan) == {}
    assert held(plan)["theirs"] == "guaranteed"


@pytest.mark.parametrize("policy", ["las", "green", "joint", f"{FAIR}las"])
def test_an_active_round_takes_nothing_within_a_guarantee_for_others(policy: str) -> None:
    mine = [a_job(f"a{at}", tenant="a", on={"n0": (at,)}, gpus=1, attained_gpu_s=1e9) for at in range(8)]
    others = [waits(f"b{at}", tenant="b") for at in range(8)]

    plan = plan_of([*mine, *others], {"a": 6}, policy, trigger=Trigger.ACTIVE)

    assert sum(isinstance(each, Preempt) for each in plan.actions) <= 2


def test_a_policy_chooses_among_a_tenants_jobs_what_is_within_its_guarantee() -> None:
    old = [a_job(f"a{at}", tenant="a", on={"n0": (at,)}, gpus=1, attained_gpu_s=1e9) for at in range(4)]
    theirs = [runs(f"b{at}", 4 + at, 1, attained_gpu_s=1e8) for at in range(4)]
    new = [waits(f"new{at}") for at in range(4)]

    plan = plan_of([*old, *theirs, *new], {"a": 4, "b": 4}, "las", trigger=Trigger.ACTIVE, quota={"a": 4})

    assert {each.job_id for each in plan.actions if isinstance(each, Preempt)} == {"a0", "a1", "a2", "a3"}


def test_what_is_said_of_the_next_active_round_keeps_guarantees() -> None:
    mine = a_job("mine", tenant="a", gpus=4, min_gpus=4, on={"n0": (0, 1, 2, 3)}, attained_gpu_s=1e9)
    jobs = [mine, runs("firm", 4, 4, preemptible=False), waits("theirs", 4, "b")]

    assert held(plan_of(jobs, {}, "las"))["theirs"] == "waiting_for_round"
    assert held(plan_of(jobs, {"a": 4}, "las"))["theirs"] == "not_enough_free_gpus"


def test_what_may_not_be_stopped_borrows_only_what_is_guaranteed_to_nobody() -> None:
    firm = [waits(f"b{at}", 2, "b", preemptible=False, submitted_s=NOON_S - 9_000 + at) for at in range(4)]

    plan = plan_of(firm, {"a": 3, "b": 1})

    assert started(plan) == {"b0": 2, "b1": 2}, "1 is its own, 4 are nobody's"
    assert held(plan)["b2"] == "guaranteed"
    soft = [waits("soft", 4, "b")]
    assert started(plan_of([*firm, *soft], {"a": 3, "b": 1}))["soft"] == 4, "what may be stopped may borrow the rest"


def test_a_job_that_its_policy_keeps_for_greener_hours_claims_nothing() -> None:
    snapshot = a_snapshot([*FULL, waits("mine", 3)], EIGHT).again(tenant_guarantees={"a": 4})
    policy = build_policy("joint", {"slack_s": 43_200.0})
    memory = policy.load({**policy.dump(policy.initial()), "held": {"mine": 0.0}})

    plan = run_under_orders(policy, snapshot.again(trigger=Trigger.PASSIVE), memory).plan

    assert held(plan)["mine"] == "greener_hours"
    assert given_back(plan) == {}


def test_gangs_with_a_guaranteed_run_give_back_later() -> None:
    assert given_back(plan_of([*FULL, waits("mine", 1)], {"a": 4}, min_run_s=HOUR_S / 2)) == {"new": "a"}
    assert given_back(plan_of([*FULL, waits("mine", 1)], {"a": 4}, min_run_s=20 * HOUR_S)) == {}


def test_a_stop_waits_for_a_save_as_others_do() -> None:
    saves = {JobId("new"): Saves(NOON_S - 500.0, 900.0)}

    plan = plan_of([*FULL, waits("mine", 3)], {"a": 4}, saves=saves, save_wait_s=1_800.0)

    assert [each.wait_s > 0 for each in plan.actions if isinstance(each, Preempt)] == [True]


def test_an_elastic_gang_is_to_come_back_on_what_is_not_needed() -> None:
    wide = runs("wide", 0, 8, min_gpus=2, max_gpus=8)

    [stop] = [each for each in plan_of([wide, waits("mine", 3)], {"a": 4}).actions if isinstance(each, Preempt)]

    assert (stop.next_gpus, stop.reason) == (5, Reason.GUARANTEED)


def test_only_gpus_that_the_job_may_use_are_taken_back() -> None:
    nodes = [a_node("n0", gpus=4), a_node("n1", gpus=4, model="V100")]
    there = [a_job(f"v{at}", tenant="b", min_gpus=2, gpus=2, on={"n1": (2 * at, 2 * at + 1)}) for at in range(2)]
    jobs = [runs("r", 0, 4, 9.0), *there, waits("mine", 2, models=("A100",))]

    assert given_back(plan_of(jobs, {"a": 4}, nodes=nodes)) == {"r": "a"}


def test_gpus_of_engines_with_queues_of_their_own_are_not_divided() -> None:
    nodes = [a_node("n0", gpus=4), a_node("s0", gpus=8, model="slurm")]
    theirs = a_job("theirs", tenant="b", gpus=8, min_gpus=8, on={"s0": tuple(range(8))})
    apart = {"nodes": nodes, "undivided": frozenset({1})}

    assert given_back(plan_of([theirs, waits("mine", 4, models=("slurm",))], {"a": 4}, **apart)) == {}
    assert (
        given_back(plan_of([runs("r", 0, 4), theirs, waits("mine", 3, models=("A100",))], {"a": 4, "b": 4}, **apart))
        == {}
    )
    assert given_back(
        plan_of([runs("r", 0, 4), theirs, waits("mine", 2, models=("A100",))], {"a": 4, "b": 4}, **apart)
    ) == {"r": "a"}


def test_a_ceiling_holds_within_a_guarantee() -> None:
    assert given_back(plan_of([*FULL, waits("mine", 3)], {"a": 4}, quota={"a": 2})) == {}


def test_shares_by_weight_divide_what_is_not_guaranteed() -> None:
    jobs = [waits(f"{tenant}{at}", tenant=tenant) for tenant in "abc" for at in range(8)]

    found = started(plan_of(jobs, {"a": 2}, f"{FAIR}fifo", tenant_weights={"b": 2.0}))

    assert {name[0]: sum(each[0] == name[0] for each in found) for name in found} == {"a": 2, "b": 4, "c": 2}


def test_an_elastic_gang_within_its_guarantee_uses_what_nobody_else_wants() -> None:
    mine = a_job("mine", tenant="a", min_gpus=1, max_gpus=8)
    alone = plan_of([mine], {"a": 2}, "joint", trigger=Trigger.ACTIVE)
    without = plan_of([mine], {}, "joint", trigger=Trigger.ACTIVE)

    assert started(alone) == started(without)


def test_columns_of_the_table_are_left_alone() -> None:
    snapshot = a_snapshot([*FULL, waits("mine", 4)], EIGHT).again(tenant_guarantees={"a": 4})
    before = {name: np.copy(column) for name, column in vars(snapshot.jobs).items() if isinstance(column, np.ndarray)}

    planned(snapshot, "las")

    assert isinstance(snapshot.jobs, JobTable)
    assert all(np.array_equal(getattr(snapshot.jobs, name), column, equal_nan=True) for name, column in before.items())


@pytest.mark.parametrize("trigger", list(Trigger))
def test_a_policy_that_chooses_a_gpu_model_keeps_no_tenant_from_its_guarantee_on_another(trigger: Trigger) -> None:
    """PowerFlow counts the power of each job on one model: here on that which a gang of the same tenant holds."""
    nodes = [a_node("n0", gpus=3), a_node("n1", gpus=6, model="V100")]
    own = runs("own", 0, 3, 50.0, tenant="a", min_gpus=1, max_gpus=4, models=("A100",))
    lent = runs("lent", 0, 5, 1.0, min_gpus=3, max_gpus=5, models=("V100",), on={"n1": (0, 1, 2, 3, 4)})
    last = runs("last", 5, 1, 0.1, models=("V100",), on={"n1": (5,)})
    plan = plan_of([waits("claims", 3), own, lent, last], {"a": 6}, "powerflow", nodes, trigger)
    assert "lent" in given_back(plan) or held(plan).get(JobId("claims")) is Reason.WAITING_FOR_RELEASE
