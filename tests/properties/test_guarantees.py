"""Guaranteed GPUs under every policy of the product; ``tests/lab`` asks the same of the lab's."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.capacity import Capacity
from services.core.cycle.plan import Hold, Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import QUEUED, RUNNING, STARTING, Phase, Snapshot, Trigger
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import FAIR, POLICIES, build_policy, policy_entry
from tests.properties.test_policies import PROMISES, Case, Rounds, cases
from tests.support.builders import NOON_S, NodeRow, a_node, a_snapshot
from tests.support.harness import Harness
from tests.support.shared import shared
from tests.support.strategies import job_rows, snapshots

NAMES = (*POLICIES, f"{FAIR}las", f"{FAIR}joint")
TENANTS = ("red", "blue")
ASKED_FOR = (Reason.NOT_ENOUGH_FREE_GPUS, Reason.WAITING_FOR_ROUND, Reason.GUARANTEED, Reason.FAIR_SHARE)
"""Why jobs wait that would run if there were GPUs for them."""

gpus = st.integers(0, 8)
guarantees = st.fixed_dictionaries(
    {"red": st.sampled_from([4, 3, 6, 2, 8, 1])}, optional={"blue": st.integers(0, 4), "gone": st.just(2)}
)
HOLDS = (Phase.RUNNING, Phase.RUNNING, Phase.RUNNING, Phase.STARTING, Phase.PREEMPTING)


@st.composite
def crowded(draw: st.DrawFn, trigger: Trigger | None = None) -> Snapshot:
    """Draw a cluster whose GPUs are nearly all held, and jobs that wait for them."""
    models = draw(st.sampled_from([("A100",), ("A100", "V100")]))
    nodes = [
        a_node(f"n{at}", gpus=draw(st.integers(2, 6)), model=models[at % len(models)])
        for at in range(draw(st.integers(1, 3)))
    ]
    free = {node.name: set(range(node.gpus)) for node in nodes}
    runs = [draw(job_rows(f"r{at}", nodes, free, HOLDS)) for at in range(draw(st.integers(4, 9)))]
    waits = [draw(job_rows(f"q{at}", nodes, free, (Phase.QUEUED,))) for at in range(draw(st.integers(1, 4)))]
    jobs = [replace(job, tenant=draw(st.sampled_from(["blue", "green", "green", "red"]))) for job in runs if job.gpus]
    jobs += [replace(job, tenant=draw(st.sampled_from(["red", "red", "blue", "green"]))) for job in waits]
    jobs = [replace(job, models=draw(st.sampled_from([None, None, job.models])), priority=0) for job in jobs]
    return a_snapshot(draw(st.permutations(jobs)), nodes, trigger=trigger or draw(st.sampled_from(list(Trigger))))


@st.composite
def guaranteed(draw: st.DrawFn, trigger: Trigger | None = None) -> Snapshot:
    """Draw a cluster with guarantees, at times more than it has GPUs; some gangs may have a guaranteed run, too."""
    found = draw(st.one_of(crowded(trigger), crowded(trigger), crowded(trigger), snapshots(trigger)))
    return found.again(tenant_guarantees=draw(guarantees), min_run_s=draw(st.sampled_from([0.0, 0.0, 0.0, 60_000.0])))


class Seen:
    """A snapshot and a plan for it, counted anew."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        self.snapshot, self.plan, self.jobs = snapshot, plan, snapshot.jobs
        total, stated = snapshot.total_gpus, snapshot.tenant_guarantees
        promised = sum(stated.values())
        scale = min(total / promised, 1.0) if promised else 1.0
        quota = snapshot.tenant_gpu_quota
        self.most = {each: min(int(of * scale + 1e-9), quota.get(each, 99)) for each, of in stated.items()}
        self.spare = total - sum(self.most.values())
        self.capacity = Capacity(snapshot)
        self.stops = {each.job_id: each for each in plan.actions if isinstance(each, Preempt)}
        self.starts = {each.job_id: each.gpus for each in plan.actions if isinstance(each, Start)}
        self.holds = {each.job_id: each.reason for each in plan.actions if isinstance(each, Hold)}

    @property
    def runs(self) -> list[int]:
        """Return the gangs that hold GPUs and are not stopping."""
        return np.flatnonzero((self.jobs.phase == RUNNING) | (self.jobs.phase == STARTING)).tolist()

    @property
    def borrowed(self) -> list[int]:
        """Return those of them that are not wholly within a guarantee: the oldest are, and what may not be stopped."""
        jobs, left, found = self.jobs, dict(self.most), list[int]()
        for job in sorted(self.runs, key=lambda job: (jobs.preemptible[job], jobs.waiting_since_s[job], jobs.ids[job])):
            if left.get(jobs.tenants[job], 0) >= jobs.gpus[job]:
                left[jobs.tenants[job]] -= int(jobs.gpus[job])
            else:
                found.append(job)
        return found

    @property
    def lenders(self) -> list[int]:
        """Return the borrowed gangs that may be stopped, and go on."""
        now_s, run_s, jobs = self.snapshot.now_s, self.snapshot.min_run_s, self.jobs
        return [
            job
            for job in self.borrowed
            if jobs.preemptible[job]
            and jobs.ids[job] not in self.stops
            and (not run_s or (jobs.phase[job] == RUNNING and now_s - jobs.waiting_since_s[job] >= run_s))
        ]

    def could_have(self, tenant: str) -> int:
        """Return the most GPUs that a tenant will hold by the plan: gangs that come back may be as wide as they may."""
        jobs, found = self.jobs, 0
        for job, job_id in enumerate(jobs.ids):
            if jobs.tenants[job] != tenant:
                continue
            if job_id in self.starts:
                found += self.starts[job_id]
            elif self.holds.get(job_id) is Reason.WAITING_FOR_RELEASE or jobs.phase[job] == Phase.PREEMPTING:
                found += int(max(jobs.max_gpus[job], jobs.gpus[job]))
            elif job_id in self.stops:
                found += int(max(self.stops[job_id].next_gpus, jobs.gpus[job]))
            else:
                found += int(jobs.gpus[job])
        return found


def planned(name: str, snapshot: Snapshot) -> Seen:
    policy = build_policy(name, {})
    return Seen(snapshot, run_under_orders(policy, snapshot, policy.initial()).plan)


def none_is_below_while_others_borrow(seen: Seen) -> None:
    jobs, held = seen.jobs, defaultdict[int, int](int)
    for job in seen.lenders:
        held[int(seen.capacity.model[job])] += int(seen.capacity.held[job])
    for job_id, reason in seen.holds.items():
        job = jobs.index[job_id]
        tenant, least = jobs.tenants[job], int(jobs.min_gpus[job])
        if reason in ASKED_FOR and seen.could_have(tenant) + least <= seen.most.get(tenant, 0):
            assert all(held[model] < least for model in np.flatnonzero(jobs.eligible[job]).tolist()), job_id


def stops_have_a_claimant_and_who_borrowed_last_gives_back_first(seen: Seen) -> None:
    jobs, capacity = seen.jobs, seen.capacity
    given_back = [jobs.index[job_id] for job_id, each in seen.stops.items() if each.to]
    assert set(given_back) <= set(seen.borrowed)
    waits = {jobs.tenants[jobs.index[each]] for each, why in seen.holds.items() if why is Reason.WAITING_FOR_RELEASE}
    for job in given_back:
        to = seen.stops[jobs.ids[job]].to
        assert to != jobs.tenants[job]
        assert sum(int(jobs.gpus[each]) for each in seen.runs if jobs.tenants[each] == to) < seen.most[to]
        assert to in waits, "nobody waits for what it releases"
        for other in seen.lenders:
            later = (jobs.waiting_since_s[other], jobs.ids[job]) > (jobs.waiting_since_s[job], jobs.ids[other])
            if later and capacity.model[other] == capacity.model[job]:
                assert capacity.held[other] < capacity.held[job], "one that began later could have gone in its place"


def what_could_not_be_had_back_is_not_lent(seen: Seen) -> None:
    jobs, firm, before = seen.jobs, Counter[str](), Counter[str]()
    for job in np.flatnonzero(~jobs.preemptible & (jobs.phase != Phase.PREEMPTING)).tolist():
        before[jobs.tenants[job]] += int(jobs.gpus[job])
        firm[jobs.tenants[job]] += int(jobs.gpus[job]) + seen.starts.get(jobs.ids[job], 0)
    beyond, was = (sum(max(of - seen.most.get(each, 0), 0) for each, of in found.items()) for found in (firm, before))
    assert not seen.most or beyond <= max(seen.spare, was)


@pytest.mark.parametrize("name", NAMES)
@shared(snapshot=guaranteed())
def test_guarantees_are_kept(name: str, snapshot: Snapshot) -> None:
    seen = planned(name, snapshot)

    none_is_below_while_others_borrow(seen)
    stops_have_a_claimant_and_who_borrowed_last_gives_back_first(seen)
    what_could_not_be_had_back_is_not_lent(seen)
    if snapshot.trigger is Trigger.PASSIVE or not policy_entry(name).preempts:
        assert all(each.to for each in seen.stops.values())


@given(snapshot=guaranteed(), name=st.sampled_from(["las", "green", "joint"]))
def test_no_gpu_idles_while_somebody_could_borrow_it(snapshot: Snapshot, name: str) -> None:
    seen = planned(name, replace(snapshot, jobs=replace(snapshot.jobs, preemptible=np.ones(len(snapshot.jobs), bool))))
    jobs, free = seen.jobs, list(seen.capacity.free)
    index = {node: int(model) for node, model in zip(snapshot.nodes.ids, snapshot.nodes.gpu_model, strict=True)}
    for each in seen.plan.actions:
        for share in each.placement.shares if isinstance(each, Start) else ():
            free[index[share.node_id]] -= len(share.devices)
    claimed = sum(
        int(jobs.max_gpus[jobs.index[each]]) for each, why in seen.holds.items() if why is Reason.WAITING_FOR_RELEASE
    )
    claimed += sum(int(jobs.max_gpus[job]) for job in np.flatnonzero(jobs.phase == Phase.PREEMPTING).tolist())
    for job_id, reason in seen.holds.items():
        job = jobs.index[job_id]
        if reason in (Reason.GUARANTEED, Reason.NOT_ENOUGH_FREE_GPUS):
            least = int(jobs.max_gpus[job])
            assert all(free[model] - claimed < least for model in np.flatnonzero(jobs.eligible[job]).tolist())


@pytest.mark.parametrize("name", ["a-srpt", "joint", "powerflow"])
@shared(case=cases(guaranteed(Trigger.ACTIVE), guaranteed()))
def test_policies_keep_their_promises_with_guarantees(name: str, case: Case) -> None:
    rounds = Rounds.of(name, {}, case)
    for promise in PROMISES:
        promise(rounds)


@pytest.mark.parametrize("name", NAMES)
@shared(snapshot=st.one_of(crowded(), snapshots()))
def test_without_guarantees_nothing_changes(name: str, snapshot: Snapshot) -> None:
    policy = build_policy(name, {})
    none = run_cycle(policy, snapshot.again(tenant_guarantees={"gone": 0}), policy.initial())

    assert run_cycle(policy, snapshot, policy.initial()) == none


@st.composite
def stories(draw: st.DrawFn) -> Harness:
    """Draw a cluster and jobs that do not end, some there from the beginning and some that arrive later."""
    nodes: list[NodeRow] = [a_node(f"n{at}", gpus=draw(st.integers(1, 4))) for at in range(draw(st.integers(1, 3)))]
    whole = sum(node.gpus for node in nodes)
    red = draw(st.integers(0, whole))
    found = Harness(draw(st.sampled_from(NAMES)), nodes=nodes, guarantees={"red": red, "blue": draw(gpus)})
    for at in range(draw(st.integers(1, 8))):
        low = draw(st.sampled_from([1, 1, 2, 3]))
        found.submit(
            f"j{at}",
            work_s=1e9,
            at_s=draw(st.sampled_from([0.0, 0.0, 2_000.0, 4_000.0])),
            min_gpus=low,
            max_gpus=low + draw(st.sampled_from([0, 0, 1, 3])),
            tenant=draw(st.sampled_from([*TENANTS, "green"])),
            preemptible=draw(st.sampled_from([True, True, True, False])),
        )
    return found


@given(story=stories())
def test_no_job_gives_back_what_it_was_given_twice(story: Harness) -> None:
    """The queue stays as it is from the last arrival on."""
    story.run(hours=8)

    late = [plan for at_s, plan in story.plans if at_s > NOON_S + 6_000.0]
    given_back = Counter(each.job_id for plan in late for each in plan.actions if isinstance(each, Preempt) and each.to)
    assert not story.rejections
    assert max(given_back.values(), default=0) <= 1, given_back


def test_nothing_waits_for_its_turn_that_is_guaranteed() -> None:
    """The whole way, under a policy that stops nothing itself."""
    harness = Harness("fifo", nodes=[a_node(gpus=8)], guarantees={"red": 4})
    for at in range(4):
        harness.submit(f"b{at}", work_s=1e6, at_s=100.0 * at, min_gpus=2, max_gpus=2, tenant="blue")
    harness.submit("r", work_s=3_600.0, at_s=1_000.0, min_gpus=4, max_gpus=4, tenant="red")

    harness.run(hours=0.5)

    assert [harness.jobs[name].phase for name in ("b0", "b1", "b2", "b3", "r")] == [
        RUNNING,
        RUNNING,
        QUEUED,
        QUEUED,
        RUNNING,
    ]
    stops = [each for _, plan in harness.plans for each in plan.actions if isinstance(each, Preempt)]
    assert [(each.job_id, each.reason, each.to) for each in stops] == [
        ("b3", Reason.GUARANTEED, "red"),
        ("b2", Reason.GUARANTEED, "red"),
    ] or {each.job_id for each in stops} == {"b2", "b3"}
    harness.run(hours=2)
    assert all(job.phase == RUNNING for job in harness.jobs.values()), "what red no longer needs is lent again"
