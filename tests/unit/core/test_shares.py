"""GPUs between tenants, on top of any policy (``fair+``)."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.policy import PacksJobs, PlacesGangs, PowerLimited
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.errors import PolicyConfigError
from services.core.policies.fair import FairMemory, Usage
from services.core.policies.levers import ExplainsLevers
from services.core.policies.memory import dumped, loaded
from services.core.policies.parameters import describe_parameters
from services.core.policies.registry import POLICIES, build_policy, entry_of, policy_entry
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, held, started, story

DAY_S = 86_400.0


def queue(tenant: str, jobs: int, since_s: float = NOON_S - 3_600.0, **columns: Any) -> list[JobRow]:
    """Return waiting jobs of a tenant, named by it."""
    return [
        a_job(f"{tenant}{at}", tenant=tenant, submitted_s=since_s + at, waiting_since_s=since_s + at, **columns)
        for at in range(jobs)
    ]


def running(tenant: str, jobs: int, first: int = 0, **columns: Any) -> list[JobRow]:
    """Return running jobs of one GPU of a tenant, on devices of the node n0 from ``first`` on."""
    return [
        a_job(f"{tenant}{at}", tenant=tenant, on={"n0": (first + at,)}, submitted_s=NOON_S - 9_000.0 + at, **columns)
        for at in range(jobs)
    ]


def decided(
    name: str, snapshot: Snapshot, used_gpu_s: dict[str, float] | None = None, weights: dict[str, float] | None = None
) -> Plan:
    """Return the plan of a policy whose tenants have used so much."""
    policy = build_policy(name, {})
    memory = FairMemory(policy.initial().inner, Usage(snapshot.now_s, used_gpu_s or {}))
    return run_cycle(policy, snapshot.again(tenant_weights=weights or {}), memory).plan


def by_tenant(plan: Plan) -> dict[str, int]:
    """Return the GPUs that a plan starts, by tenant (the first letters of a job's name)."""
    found: dict[str, int] = {}
    for job_id, gpus in started(plan).items():
        found[job_id.rstrip("0123456789")] = found.get(job_id.rstrip("0123456789"), 0) + gpus
    return found


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_a_policy_may_do_besides_it_still_does(name: str) -> None:
    inner, wrapped = build_policy(name, {}), build_policy(f"fair+{name}", {})
    for what in (PacksJobs, PlacesGangs, PowerLimited, ExplainsLevers):
        assert isinstance(wrapped, what) == isinstance(inner, what), what
    if isinstance(inner, ExplainsLevers) and isinstance(wrapped, ExplainsLevers):
        snapshot = a_snapshot(queue("a", 2), [a_node(gpus=1)])
        alone, fair = (run_cycle(each, snapshot, each.initial()).memory for each in (inner, wrapped))
        job_id = snapshot.jobs.ids[1]
        assert wrapped.levers(snapshot, fair, job_id) == inner.levers(snapshot, alone, job_id) != ()


def test_free_gpus_are_divided_by_weight_and_inside_a_tenant_the_policy_decides() -> None:
    jobs = queue("early", 20, NOON_S - 9_000.0) + queue("late", 20)
    snapshot = a_snapshot(jobs, [a_node(gpus=8)])

    alone = run_cycle(build_policy("fifo", {}), snapshot, None).plan
    equal = decided("fair+fifo", snapshot)
    weighted = decided("fair+fifo", snapshot, weights={"late": 3.0})

    assert by_tenant(alone) == {"early": 8}
    assert set(started(equal)) == {f"{name}{at}" for name in ("early", "late") for at in range(4)}
    assert by_tenant(weighted) == {"early": 2, "late": 6}
    assert held(equal)["early4"] == "fair_share"


def test_what_others_leave_is_borrowed_and_no_device_is_idle() -> None:
    snapshot = a_snapshot(queue("a", 1) + queue("b", 20), [a_node(gpus=8)])

    assert by_tenant(decided("fair+las", snapshot)) == {"a": 1, "b": 7}


def test_who_has_used_less_comes_first() -> None:
    snapshot = a_snapshot(running("a", 7, preemptible=False) + queue("b", 3) + queue("c", 3), [a_node(gpus=8)])

    assert by_tenant(decided("fair+fifo", snapshot, {"b": 4e6, "c": 5e6})) == {"b": 1}
    assert by_tenant(decided("fair+fifo", snapshot, {"b": 5e6, "c": 4e6})) == {"c": 1}
    assert by_tenant(decided("fair+fifo", snapshot, {"b": 5e6, "c": 4e6}, {"b": 2.0})) == {"b": 1}


def test_only_what_was_borrowed_is_taken_back_and_only_from_jobs_that_may_be_stopped() -> None:
    borrowed = a_snapshot(running("a", 8) + queue("b", 8), [a_node(gpus=8)])
    stuck = a_snapshot(running("a", 6, preemptible=False) + running("b", 2, 6) + queue("c", 8), [a_node(gpus=8)])

    stops = {
        job: words for job, words in story(decided("fair+las", borrowed, {"a": 9e9})).items() if "preempt" in words
    }
    kept = story(decided("fair+las", stuck, {"a": 9e9, "b": 9e9}))

    assert list(stops.values()) == ["preempt fair_share -> 1"] * 4, "what a holds within its share stays its own"
    assert not any("preempt" in words for words in kept.values()), (
        "a cannot be stopped, and b holds less than its share"
    )


def test_a_passive_round_stops_nobody() -> None:
    snapshot = a_snapshot(running("a", 8) + queue("b", 2), [a_node(gpus=8)], trigger=Trigger.PASSIVE)

    assert set(held(decided("fair+las", snapshot)).values()) == {"waiting_for_round"}


@pytest.mark.parametrize(("used", "runs"), [({"narrow": 9e4}, "wide"), ({"wide": 9e4}, "narrow")])
def test_a_gang_wider_than_its_tenants_share_has_turns(used: dict[str, float], runs: str) -> None:
    snapshot = a_snapshot(queue("wide", 1, min_gpus=8) + queue("narrow", 8), [a_node(gpus=8)])

    assert by_tenant(decided("fair+las", snapshot, used)) == {runs: 8}


@pytest.mark.usefixtures("the_lab")
@pytest.mark.parametrize(("ahead_s", "stopped"), [(1_700.0, False), (1_900.0, True)])
def test_turns_last(ahead_s: float, stopped: bool) -> None:
    wide = a_job("wide", tenant="wide", on={"n0": tuple(range(8))})
    snapshot = a_snapshot([wide, *queue("other", 1, min_gpus=8)], [a_node(gpus=8)])

    plan = decided("fair+srtf", snapshot, {"wide": 8 * ahead_s})

    assert ("preempt" in story(plan).get("wide", "")) is stopped


@pytest.mark.usefixtures("the_lab")
def test_an_elastic_gang_leaves_others_their_share() -> None:
    jobs = queue("a", 1, min_gpus=1, max_gpus=8) + queue("b", 8)
    nodes: list[NodeRow] = [a_node(gpus=8)]

    assert by_tenant(decided("fair+pollux", a_snapshot(jobs, nodes)))["b"] >= 4


def test_users_priorities_count_among_their_tenants_jobs_alone() -> None:
    jobs = queue("a", 8, priority=5) + queue("b", 8)

    assert by_tenant(decided("fair+fifo", a_snapshot(jobs, [a_node(gpus=8)]))) == {"a": 4, "b": 4}


def test_a_tenants_quota_leaves_its_share_to_others() -> None:
    snapshot = a_snapshot(queue("a", 8) + queue("b", 8), [a_node(gpus=8)], quota={"a": 2})

    assert by_tenant(decided("fair+las", snapshot)) == {"a": 2, "b": 6}


def test_usage_fades_with_its_half_life_and_counts_what_is_held() -> None:
    usage = Usage(0.0, {"a": 1_000.0}, {"b": 2})

    later = usage.at(DAY_S, DAY_S)
    forever = usage.at(1e9, DAY_S)

    assert later.used_gpu_s["a"] == pytest.approx(500.0)
    assert later.used_gpu_s["b"] == pytest.approx(2 * DAY_S / 2 / 0.693147, rel=1e-6)
    assert list(forever.used_gpu_s) == ["b"]
    assert loaded(Usage, dumped(later)) == later
    assert usage.at(-5.0, DAY_S) is usage


def test_gangs_that_an_order_held_or_narrowed_count_as_they_were() -> None:
    """The plan was to start two GPUs of each tenant; what came of it shows in the next round."""
    policy, nodes = build_policy("fair+las", {}), [a_node(gpus=8)]
    jobs = [a_job(each, tenant=each, min_gpus=2, submitted_s=NOON_S, waiting_since_s=NOON_S) for each in "ab"]
    planned = run_cycle(policy, a_snapshot(jobs, nodes), policy.initial())
    began = [jobs[0], a_job("b", tenant="b", on={"n0": (0, 1)}, submitted_s=NOON_S)]

    after = policy.decide(a_snapshot(began, nodes, now_s=NOON_S + 100.0), planned.memory)[1]

    assert started(planned.plan) == {"a": 2, "b": 2}
    assert after.usage.used_gpu_s == {"b": pytest.approx(200.0, rel=1e-3)}


def test_any_policy_wears_it() -> None:
    described = describe_parameters(policy_entry("fair+green").config)

    assert build_policy("fair+green", {"mu": 1.0}).name == "fair+green"
    assert {"mu", "share_half_life_s"} <= {each.name for each in described}
    assert entry_of("fair+fair+las") is None
    with pytest.raises(PolicyConfigError, match="at least 60"):
        build_policy("fair+las", {"share_half_life_s": 1.0})


@pytest.mark.parametrize("reasons", [True, False])
def test_whether_a_round_gives_reasons_does_not_change_the_order_of_its_stops(reasons: bool) -> None:
    """`b` was there first, so that all its jobs stand before those of `a` in the ranking; by shares they take turns."""
    there = [
        a_job(f"{name}{at}", tenant=name, on={"n0": (first + at,)}, submitted_s=NOON_S - since_s + at)
        for name, jobs, first, since_s in (("b", 3, 0, 9_000.0), ("a", 5, 3, 5_000.0))
        for at in range(jobs)
    ]
    snapshot = a_snapshot([*there, *queue("c", 8)], [a_node(gpus=8)])
    told = snapshot.again(reasons=reasons)

    plan = decided("fair+las", told, weights={"c": 20.0})

    stopped = [action.job_id for action in plan.actions if isinstance(action, Preempt)]
    assert stopped == ["b1", "a1", "b2", "a2", "a3", "a4"]
