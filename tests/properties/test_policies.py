"""What must hold for every policy of the product, whatever the cluster; ``tests/lab`` asks it of the lab's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.plan import Hold, Plan, Preempt, ProfileControls, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.sharing import hosts_and_guests
from services.core.cycle.snapshot import RUNNING, STARTING, JobTable, Phase, Snapshot, Trigger
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId, NodeId
from services.core.domain.reasons import Reason
from services.core.policies.registry import FAIR, POLICIES, build_policy, policy_entry
from tests.support.builders import story
from tests.support.shared import shared
from tests.support.strategies import snapshots, with_levels

SHARED = ("a-srpt", "green", "joint", "las")
"""Wrapped, too: one with a queue of its own, by blocks, elastic with controls, and in order of columns."""
VARIANTS = [(name, {}) for name in (*POLICIES, *(FAIR + each for each in SHARED))] + [
    ("fifo", {"gang": "max", "backfill": True}),
    ("las", {"gang": "max", "promote_knob": 1.0, "queue_thresholds_gpu_s": [2.0, 3_250.0]}),
    ("a-srpt", {"others": "pass", "tau": 100.0}),
    ("green", {"mu": 1.0, "theta": 0.0, "starvation_s": None}),
    ("green", {"fixed_gpus": 2, "carbon_factor": "gpu_seconds"}),
    ("green", {"theta": 1.0, "gamma_empty": 0.9, "gamma_full": 0.9, "job_cap_gpus": 3, "unmeasured_s": 0.0}),
]


def two_rounds(name: str, parameters: dict[str, object], first: Snapshot, second: Snapshot) -> tuple[Plan, Plan]:
    """Return the plans of two rounds, the second with the memory of the first."""
    policy = build_policy(name, parameters)
    result = run_cycle(policy, first, policy.initial())
    return result.plan, run_cycle(policy, second, result.memory).plan


Pair = tuple[Snapshot, Snapshot]


@dataclass(frozen=True)
class Case:
    """The snapshots of two rounds, and what promises ask about beside them: the same ones changed."""

    usual: Pair
    reordered: Pair
    bound: Pair
    with_levels: Pair


@st.composite
def cases(draw: st.DrawFn, first: st.SearchStrategy[Snapshot], second: st.SearchStrategy[Snapshot]) -> Case:
    """Draw two rounds."""
    now = draw(first)
    then = submitted_once(now, draw(second))

    def both(change: Callable[[Snapshot], Snapshot]) -> Pair:
        return change(now), change(then)

    return Case(
        (now, then),
        both(lambda each: replace(each, jobs=rows(each.jobs, draw(st.permutations(range(len(each.jobs))))))),
        both(lambda each: with_bound(each, draw)),
        both(lambda each: draw(with_levels(each))),
    )


@dataclass(frozen=True)
class Rounds:
    """Two rounds of one policy, the second with the memory of the first, and their plans."""

    name: str
    parameters: dict[str, object]
    case: Case
    snapshots: Pair
    plans: tuple[Plan, Plan]

    @classmethod
    def of(cls, name: str, parameters: dict[str, object], case: Case) -> Rounds:
        """Return the rounds of a policy with a case."""
        return cls(name, parameters, case, case.usual, two_rounds(name, parameters, *case.usual))

    def on(self, snapshots: Pair) -> Rounds:
        """Return those on other snapshots."""
        return replace(self, snapshots=snapshots, plans=self.again(*snapshots))

    def again(self, first: Snapshot, second: Snapshot) -> tuple[Plan, Plan]:
        """Return the plans of other snapshots."""
        return two_rounds(self.name, self.parameters, first, second)

    def __iter__(self) -> Iterator[tuple[Snapshot, Plan]]:
        return zip(self.snapshots, self.plans, strict=True)


def devices_are_given_once_and_gangs_are_whole(rounds: Rounds) -> None:
    for snapshot, plan in rounds:
        jobs, index = snapshot.jobs, {job_id: at for at, job_id in enumerate(snapshot.jobs.ids)}
        free = {
            (node, device)
            for at, node in enumerate(snapshot.nodes.ids)
            if snapshot.nodes.schedulable[at]
            for device in snapshot.nodes.free_devices[at]
        }
        taken = Counter(
            (share.node_id, device)
            for action in plan.actions
            if isinstance(action, Start)
            for share in action.placement.shares
            for device in share.devices
        )
        assert set(taken) <= free, "a device that another gang holds"
        assert set(taken.values()) <= {1}
        for action in plan.actions:
            job = index[action.job_id]
            if not isinstance(action, Hold):
                size = action.gpus if isinstance(action, Start) else action.next_gpus
                grid = range(int(jobs.min_gpus[job]), int(jobs.max_gpus[job]) + 1, int(jobs.step_gpus[job]))
                assert size in grid


def no_device_is_given_to_a_second_job(rounds: Rounds) -> None:
    """Gandiva alone packs jobs, and not before it has measured them."""
    assert not any(isinstance(action, Start) and action.shares for _, plan in rounds for action in plan.actions)


def only_who_says_so_sets_controls_or_powers_nodes(rounds: Rounds) -> None:
    """Bounds count on that."""
    first, second = (with_controls(each) for each in rounds.snapshots)

    for plan in rounds.again(first, second):
        sets = [each for each in plan.actions if isinstance(each, SetControl | ProfileControls)]
        assert policy_entry(rounds.name).sets_controls or not sets
        assert policy_entry(rounds.name).powers_nodes or not plan.nodes


def guests_are_stopped_by_all_policies_but_gandiva(rounds: Rounds) -> None:
    first, second = (with_pairs(each) for each in rounds.snapshots)
    guests = {guest for _, guest in hosts_and_guests(first)}

    plan, _ = rounds.again(first, second)

    stopped = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
    going = {job_id for job_id in guests if first.jobs.phase[first.jobs.index[job_id]] in (STARTING, RUNNING)}
    if rounds.name != "gandiva":
        assert going <= stopped
    assert {guest for host, guest in hosts_and_guests(first) if host in stopped} & going <= stopped


def every_waiting_job_starts_or_has_one_reason(rounds: Rounds) -> None:
    for snapshot, plan in rounds:
        phases = dict(zip(snapshot.jobs.ids, snapshot.jobs.phase.tolist(), strict=True))
        waiting = Counter(action.job_id for action in plan.actions if isinstance(action, Start | Hold))
        assert waiting == Counter(job_id for job_id, phase in phases.items() if phase == Phase.QUEUED)


def only_active_rounds_preempt_and_only_what_may_be_preempted(rounds: Rounds) -> None:
    for snapshot, plan in rounds:
        index = {job_id: at for at, job_id in enumerate(snapshot.jobs.ids)}
        preempts = [action for action in plan.actions if isinstance(action, Preempt) and not action.to]
        assert snapshot.trigger is Trigger.ACTIVE or not preempts
        assert policy_entry(rounds.name).preempts or not preempts
        for action in preempts:
            job = index[action.job_id]
            assert snapshot.jobs.preemptible[job]
            assert snapshot.jobs.phase[job] == Phase.RUNNING or not action.reason.startswith("scale")


def the_order_of_the_jobs_in_a_snapshot_does_not_matter(rounds: Rounds) -> None:
    assert rounds.again(*rounds.snapshots) == rounds.plans
    assert [story(plan) for plan in rounds.again(*rounds.case.reordered)] == [story(plan) for plan in rounds.plans]


def two_zones_with_one_grid_are_as_one_zone(rounds: Rounds) -> None:
    first, second = (
        replace(each, outlooks=each.outlooks * 2, nodes=replace(each.nodes, zone=np.arange(len(each.nodes)) % 2))
        for each in rounds.snapshots
    )

    assert [story(plan) for plan in rounds.again(first, second)] == [story(plan) for plan in rounds.plans]


def memory_goes_through_json_and_decides_the_same(rounds: Rounds) -> None:
    first, second = rounds.snapshots
    policy = build_policy(rounds.name, rounds.parameters)
    memory = run_cycle(policy, first, policy.initial()).memory
    stored = json.dumps(policy.dump(memory), allow_nan=False)

    restored = policy.load(json.loads(stored))

    assert restored == memory
    assert run_cycle(policy, second, restored) == run_cycle(policy, second, memory)
    assert policy.load({}) == policy.initial()
    after = policy.dump(run_cycle(policy, replace(second, trigger=Trigger.ACTIVE), restored).memory)
    assert all(f'"{job_id}"' not in json.dumps(after) for job_id in set(first.jobs.ids) - set(second.jobs.ids))


def a_plan_without_reasons_has_the_same_starts_and_stops(rounds: Rounds) -> None:
    first, second = (replace(each, reasons=False) for each in rounds.snapshots)

    for plan, without in zip(rounds.plans, rounds.again(first, second), strict=True):
        assert without.actions == tuple(action for action in plan.actions if not isinstance(action, Hold))


def keeps_the_usual_promises(rounds: Rounds) -> Iterator[tuple[Snapshot, Plan]]:
    """Check those that everything else must not break, and yield each snapshot with its plan."""
    devices_are_given_once_and_gangs_are_whole(rounds)
    every_waiting_job_starts_or_has_one_reason(rounds)
    only_active_rounds_preempt_and_only_what_may_be_preempted(rounds)
    a_plan_without_reasons_has_the_same_starts_and_stops(rounds)
    return iter(rounds)


def bound_jobs_start_where_they_are_bound_to_or_wait(rounds: Rounds) -> None:
    for snapshot, plan in keeps_the_usual_promises(rounds.on(rounds.case.bound)):
        for action in plan.actions:
            on = snapshot.bound.get(action.job_id)
            if on is not None and isinstance(action, Start):
                assert tuple(share.node_id for share in action.placement.shares) == on
            if on is not None and isinstance(action, Hold):
                assert action.reason is not Reason.NO_ELIGIBLE_NODE
                gone = any(node_id not in snapshot.nodes.index for node_id in on)
                assert gone == (action.reason is Reason.CHECKPOINT_NODE_AWAY)


def gangs_lie_within_the_domains_that_they_require_or_wait(rounds: Rounds) -> None:
    for snapshot, plan in keeps_the_usual_promises(rounds.on(rounds.case.with_levels)):
        for action in plan.actions:
            level = snapshot.within.get(action.job_id)
            if level is not None and isinstance(action, Start):
                nodes = [snapshot.nodes.index[share.node_id] for share in action.placement.shares]
                assert level >= 0
                assert len({int(snapshot.nodes.domains[node, level]) for node in nodes}) == 1


PROMISES = (
    devices_are_given_once_and_gangs_are_whole,
    no_device_is_given_to_a_second_job,
    only_who_says_so_sets_controls_or_powers_nodes,
    guests_are_stopped_by_all_policies_but_gandiva,
    every_waiting_job_starts_or_has_one_reason,
    only_active_rounds_preempt_and_only_what_may_be_preempted,
    the_order_of_the_jobs_in_a_snapshot_does_not_matter,
    two_zones_with_one_grid_are_as_one_zone,
    memory_goes_through_json_and_decides_the_same,
    a_plan_without_reasons_has_the_same_starts_and_stops,
    bound_jobs_start_where_they_are_bound_to_or_wait,
    gangs_lie_within_the_domains_that_they_require_or_wait,
)


@pytest.mark.parametrize(
    ("name", "parameters"), VARIANTS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(VARIANTS)]
)
@shared(case=cases(snapshots(Trigger.ACTIVE), snapshots()))
def test_every_policy_keeps_every_promise(name: str, parameters: dict[str, object], case: Case) -> None:
    rounds = Rounds.of(name, parameters, case)
    for promise in PROMISES:
        promise(rounds)


@given(first=snapshots(Trigger.ACTIVE), second=snapshots())
def test_mu_of_one_is_no_shifting_at_all(first: Snapshot, second: Snapshot) -> None:
    def unshifted(snapshot: Snapshot) -> Snapshot:
        unknown = np.full(len(snapshot.jobs), np.nan)
        return replace(snapshot, jobs=replace(snapshot.jobs, gpu_power_w=unknown))

    without = two_rounds("green", {"mu": 4.0}, unshifted(first), unshifted(second))

    assert two_rounds("green", {"mu": 1.0}, first, second) == without


def with_pairs(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with every second job that holds one device on that of the one before it."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    narrow = np.flatnonzero((jobs.gpus == 1) & jobs.preemptible).tolist()
    placements, free = list(jobs.placements), [set(devices) for devices in nodes.free_devices]
    pairs: list[tuple[JobId, JobId]] = []
    for host, guest in zip(narrow[::2], narrow[1::2], strict=False):
        placement = placements[guest]
        on = placement.shares[0] if placement is not None else None
        where = placements[host]
        if on is None or where is None:
            continue
        model = {nodes.gpu_model[nodes.index[each]] for each in (on.node_id, where.shares[0].node_id)}
        if len(model) == 1:
            free[nodes.index[on.node_id]].update(on.devices)
            placements[guest] = where
            pairs.append((jobs.ids[host], jobs.ids[guest]))
    free_devices = tuple(tuple(sorted(devices)) for devices in free)
    counted = np.array([len(devices) for devices in free], dtype=np.int64)
    return replace(
        snapshot,
        jobs=replace(jobs, placements=tuple(placements)),
        nodes=replace(nodes, free_devices=free_devices, free_gpus=counted),
        shared=tuple(pairs),
    )


def submitted_once(first: Snapshot, second: Snapshot) -> Snapshot:
    """Return the second snapshot in which jobs of the first were submitted when they were there.

    Policies break ties by that time, and a memory that was stored has broken them already.
    """
    known = dict(zip(first.jobs.ids, first.jobs.submitted_s.tolist(), strict=True))
    drawn = zip(second.jobs.ids, second.jobs.submitted_s.tolist(), strict=True)
    submitted_s = np.array([known.get(job_id, at_s) for job_id, at_s in drawn], dtype=np.float64)
    return replace(second, jobs=replace(second.jobs, submitted_s=submitted_s))


def with_bound(snapshot: Snapshot, draw: st.DrawFn) -> Snapshot:
    """Return the snapshot with some jobs bound: those that hold GPUs to their nodes, others to any, also one gone."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    bound: dict[JobId, tuple[NodeId, ...]] = {}
    choices = st.lists(st.sampled_from([*nodes.ids, *nodes.ids, NodeId("gone")]), min_size=1, max_size=2, unique=True)
    for job_id, placement in zip(jobs.ids, jobs.placements, strict=True):
        if placement is not None and draw(st.booleans()):
            bound[job_id] = tuple(share.node_id for share in placement.shares)
        elif placement is None and draw(st.booleans()):
            bound[job_id] = tuple(draw(choices))
    return replace(snapshot, bound=bound)


def with_controls(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot of a cluster whose GPUs take limits and can be measured, and whose nodes may sleep."""
    may_sleep = np.ones(len(snapshot.nodes), dtype=np.bool_)
    return replace(
        snapshot,
        settable=(frozenset(ControlKind),) * len(snapshot.gpu_models),
        measures=True,
        nodes=replace(snapshot.nodes, may_sleep=may_sleep),
    )


def rows(jobs: JobTable, order: list[int]) -> JobTable:
    """Return the table with its rows in this order."""
    columns: dict[str, object] = {}
    for column in fields(JobTable):
        values = getattr(jobs, column.name)
        columns[column.name] = values[order] if isinstance(values, np.ndarray) else tuple(values[at] for at in order)
    return JobTable(**columns)  # type: ignore[arg-type]
