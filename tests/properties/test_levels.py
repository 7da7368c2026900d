"""Gangs get the narrowest domain that holds them, and those that require one start if and only if there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle.placers import PLACERS
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Saves, Snapshot, Trigger
from services.core.cycle.validate import check_plan
from services.core.domain.arrays import Ints
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, held, started, story
from tests.support.shared import shared
from tests.support.strategies import trees

LEVELS = ("node", "rack", "block")


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Draw a cluster on a tree, partly in use, with one waiting gang."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    used = {f"n{at}": draw(st.integers(0, size)) for at, size in enumerate(sizes)}
    running = [a_job(f"on-{node}", on={node: tuple(range(gpus))}) for node, gpus in used.items() if gpus]
    gpus = draw(st.integers(1, 10))
    nodes = [a_node(f"n{at}", gpus=size) for at, size in enumerate(sizes)]
    made = a_snapshot([*running, a_job("gang", min_gpus=gpus)], nodes, trigger=Trigger.PASSIVE)
    return replace(made, levels=LEVELS, nodes=replace(made.nodes, domains=draw(trees(len(nodes)))))


def holding(snapshot: Snapshot, level: int, gpus: int) -> list[int]:
    """Return what is free in each domain of a level that holds a gang, by looking at every node."""
    free: dict[int, int] = {}
    for node, domain in enumerate(snapshot.nodes.domains[:, level].tolist()):
        free[domain] = free.get(domain, 0) + len(snapshot.nodes.free_devices[node])
    return [each for each in free.values() if each >= gpus]


def spanned(snapshot: Snapshot, nodes: list[int]) -> int:
    """Return the narrowest level one of whose domains has all of these nodes; one more than the last if none has."""
    domains = snapshot.nodes.domains[nodes]
    return next((level for level in range(len(LEVELS)) if len({*domains[:, level].tolist()}) == 1), len(LEVELS))


@given(clusters())
def test_a_gang_gets_the_narrowest_domain_that_holds_it_and_of_these_the_tightest(snapshot: Snapshot) -> None:
    job = snapshot.jobs.index[JobId("gang")]
    gpus = int(snapshot.jobs.min_gpus[job])

    placed = PLACERS["consolidated"](snapshot, job, gpus, 0, FreeDevices(snapshot.nodes))

    levels = [level for level in range(len(LEVELS)) if holding(snapshot, level, gpus)]
    assert (placed is None) == (int(snapshot.nodes.free_gpus.sum()) < gpus)
    if placed is not None:
        nodes = [snapshot.nodes.index[share.node_id] for share in placed.shares]
        level = spanned(snapshot, nodes)
        assert level == min(levels, default=len(LEVELS))
        if levels:
            here = snapshot.nodes.domains[:, level] == snapshot.nodes.domains[nodes[0], level]
            assert int(snapshot.nodes.free_gpus[here].sum()) == min(holding(snapshot, level, gpus))


@pytest.mark.parametrize("placement", [each for each in PLACERS if each != "buddy"])
@pytest.mark.parametrize("policy", ["fifo", "las", "joint"])
@shared(snapshot=clusters(), level=st.integers(0, 2))
def test_a_gang_starts_if_and_only_if_a_domain_of_the_level_it_requires_has_room(
    placement: str, policy: str, snapshot: Snapshot, level: int
) -> None:
    gang = JobId("gang")
    gpus = int(snapshot.jobs.min_gpus[snapshot.jobs.index[gang]])
    snapshot = replace(snapshot, placement=placement, within={gang: level})
    made = build_policy(policy, {})

    plan = run_cycle(made, snapshot, made.initial()).plan

    assert (gang in started(plan)) == bool(holding(snapshot, level, gpus))
    if gang not in started(plan):
        why = held(plan)[gang]
        largest = np.bincount(snapshot.nodes.domains[:, level], snapshot.nodes.gpus).max()
        ever = int(snapshot.nodes.gpus.sum()) >= gpus
        assert (why is Reason.NO_ELIGIBLE_NODE) == (not ever)
        assert (why is Reason.NO_SUCH_DOMAIN) == (ever and largest < gpus)
        if int(snapshot.nodes.free_gpus.sum()) < gpus:
            assert why is not Reason.NO_ROOM_WITHIN


@given(snapshot=clusters(), level=st.integers(0, 2), placement=st.sampled_from([*PLACERS]))
def test_a_preferred_level_delays_no_gang(snapshot: Snapshot, level: int, placement: str) -> None:
    gang, policy = JobId("gang"), build_policy("fifo", {})
    snapshot = replace(snapshot, placement=placement)

    plain = run_cycle(policy, snapshot, None).plan
    preferred = run_cycle(policy, replace(snapshot, near={gang: level}), None).plan

    assert (gang in started(plain)) == (gang in started(preferred))


def of_racks(jobs: list[object], racks: Ints) -> Snapshot:
    made = a_snapshot(jobs, [a_node(f"n{at}", gpus=4) for at in range(racks.size)])  # type: ignore[arg-type]
    domains = np.stack((np.arange(racks.size), racks), axis=1)
    return replace(made, levels=("node", "rack"), nodes=replace(made.nodes, domains=domains))


def test_a_gang_that_comes_first_gets_a_rack_of_lower_ranks_and_the_next_rounds_keep_it_for_it() -> None:
    """Each rack has one older gang; the gang ahead of all stops those of one, and starts as soon as they are gone."""
    running = [a_job(f"r{at}", on={f"n{at}": (0, 1, 2, 3)}, attained_gpu_s=9e6, submitted_s=0.0) for at in range(4)]
    first = of_racks([*running, a_job("gang", min_gpus=8)], np.array([0, 0, 1, 1]))
    policy = build_policy("las", {})

    result = run_cycle(policy, replace(first, within={JobId("gang"): 1}), policy.initial())

    stopped = {each.job_id for each in result.plan.actions} - {"gang"}
    assert stopped in ({"r0", "r1"}, {"r2", "r3"})
    rows = [
        replace(each, phase=Phase.PREEMPTING) if each.name == min(stopped) else each
        for each in running
        if each.name not in stopped - {min(stopped)}
    ]
    later = of_racks([*rows, a_job("gang", min_gpus=8), a_job("small", min_gpus=4)], np.array([0, 0, 1, 1]))
    later = replace(later, trigger=Trigger.PASSIVE, within={JobId("gang"): 1})
    following = run_cycle(policy, later, result.memory).plan
    assert held(following)[JobId("gang")] is Reason.WAITING_FOR_RELEASE
    assert JobId("small") not in started(following)


def test_a_strict_queue_keeps_the_free_gpus_of_the_best_rack_for_the_gang_that_waits_for_one() -> None:
    """Others pass it, but not there: so each rack that it could have does not fill up again and again."""
    running = [
        a_job("r0", on={"n0": (0, 1, 2, 3)}, preemptible=False),
        a_job("r2", on={"n2": (0, 1)}, preemptible=False),
        a_job("r3", on={"n3": (0, 1)}, preemptible=False),
    ]
    waiting = [a_job("gang", min_gpus=8, submitted_s=1.0), *(a_job(f"s{at}", submitted_s=2.0) for at in range(9))]
    snapshot = of_racks([*running, *waiting], np.array([0, 0, 1, 1]))

    plan = run_cycle(build_policy("fifo", {}), replace(snapshot, within={JobId("gang"): 1}), None).plan

    on = {share.node_id for each in plan.actions if hasattr(each, "placement") for share in each.placement.shares}
    assert JobId("gang") in held(plan)
    assert on in ({"n1"}, {"n2", "n3"})
    assert len(started(plan)) == 4


@st.composite
def crowded(draw: st.DrawFn) -> Snapshot:
    """Draw racks in which gangs of higher rank run, and one that waits for a rack."""
    nodes = [a_node(f"n{at}", gpus=4) for at in range(6)]
    running: list[JobRow] = []
    for at, node in enumerate(nodes):
        left = 4
        while left and draw(st.booleans()):
            gpus = draw(st.integers(1, 2))
            columns = {
                "priority": draw(st.sampled_from([1, 1, 1, 1, 1, 0])),
                "preemptible": draw(st.sampled_from([True, True, True, True, True, False])),
                "waiting_since_s": NOON_S - draw(st.sampled_from([60.0, 4_000.0, 40_000.0, 40_000.0, 40_000.0])),
                "remaining_s": draw(st.sampled_from([float("nan"), 300.0, 1e5, 1e5])),
            }
            gpus = min(gpus, left)
            running.append(a_job(f"r{at}-{left}", on={node.name: tuple(range(4 - left, 4 - left + gpus))}, **columns))
            left -= gpus
    made = of_racks([*running, a_job("gang", min_gpus=draw(st.integers(5, 8)))], np.array([0, 0, 1, 1, 2, 2]))
    ago = st.sampled_from([None, None, 10.0, 3_000.0, 1e6])
    told = {each.name: draw(ago) for each in running}
    saves = {JobId(name): Saves(NOON_S - ago_s, 600.0) for name, ago_s in told.items() if ago_s is not None}
    return replace(made, within={JobId("gang"): 1}, saves=saves)


@settings(max_examples=400)
@given(snapshot=crowded())
def test_gangs_are_moved_only_where_that_makes_room_and_pays(snapshot: Snapshot) -> None:
    policy = build_policy("las", {})
    plan = run_cycle(policy, snapshot, policy.initial()).plan
    moved = [each for each in plan.actions if isinstance(each, Preempt) and each.reason is Reason.DEFRAGMENTATION]
    if not moved:
        return
    jobs, nodes = snapshot.jobs, snapshot.nodes
    gpus = int(jobs.min_gpus[jobs.index[JobId("gang")]])
    free = {node: len(devices) for node, devices in zip(nodes.ids, nodes.free_devices, strict=True)}
    cost = 0.0
    assert len(moved) == len([each for each in plan.actions if isinstance(each, Preempt)])
    for each in moved:
        job, saves = jobs.index[each.job_id], snapshot.saves.get(each.job_id)
        since_s = float(jobs.waiting_since_s[job])
        assert jobs.preemptible[job]
        assert NOON_S - since_s >= 3_600
        assert saves is None or saves.last_s >= since_s
        cost += each.next_gpus * (120.0 + (NOON_S - saves.last_s if saves else 0.0))
    racks = {int(nodes.domains[nodes.index[on.node_id], 1]) for each in moved
             for on in jobs.placements[jobs.index[each.job_id]].shares}  # fmt: skip
    assert len(racks) == 1, "of one rack"
    (rack,) = racks
    inside = {node for at, node in enumerate(nodes.ids) if nodes.domains[at, 1] == rack}
    assert sum(free[node] for node in inside) + sum(each.next_gpus for each in moved) >= gpus, "room for the gang"
    sizes = [each.next_gpus for each in moved]
    assert fit(sizes, [count for node, count in free.items() if node not in inside]), "room for those that move"
    soonest = min(released_s(snapshot, at, gpus) for at in range(3))
    assert gpus * soonest >= 2 * cost, "what the gang would wait by itself is worth it"


def fit(sizes: list[int], room: list[int]) -> bool:
    """Whether gangs fit on nodes, by trying all ways; they may span them."""
    return sum(sizes) <= sum(room)


def released_s(snapshot: Snapshot, rack: int, gpus: int) -> float:
    """Return when a rack has this many free devices if gangs run to their ends, by looking at each moment."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    free, ends = 0, list[tuple[float, int]]()
    for at in np.flatnonzero(nodes.domains[:, 1] == rack).tolist():
        free += len(nodes.free_devices[at])
        for job, placement in enumerate(jobs.placements):
            held = sum(len(on.devices) for on in placement.shares if on.node_id == nodes.ids[at]) if placement else 0
            left_s = float(jobs.remaining_s[job] * jobs.min_gpus[job] / max(int(jobs.gpus[job]), 1))
            ends.append((NOON_S - float(jobs.waiting_since_s[job]) if np.isnan(left_s) else left_s, held))
    return next((0.0 if at_s < 0 else at_s for at_s in sorted({-1.0, *(each for each, _ in ends)})
                 if free + sum(held for end_s, held in ends if end_s <= at_s) >= gpus), np.inf)  # fmt: skip


def test_the_gangs_of_one_rack_make_room_for_one_that_waits_and_are_left_alone_after_that() -> None:
    """Two of a higher priority hold half of each rack: one moves to the other rack; the next rounds move nobody."""
    rows = {
        name: {"on": {node: (0, 1, 2, 3)}, "priority": 1, "waiting_since_s": NOON_S - 9_000.0}
        for name, node in (("a", "n0"), ("b", "n2"))
    }
    policy = build_policy("las", {})

    def plan_of(jobs: list[JobRow], now_s: float = NOON_S) -> dict[str, str]:
        made = replace(of_racks(jobs, np.array([0, 0, 1, 1])), now_s=now_s, within={JobId("gang"): 1})
        return story(run_cycle(policy, made, policy.initial()).plan)

    gang = a_job("gang", min_gpus=8)
    assert plan_of([*(a_job(name, **each) for name, each in rows.items()), gang]) == {
        "a": "preempt defragmentation -> 4",
        "gang": "hold no_room_within",
    }
    rows["a"] |= {"waiting_since_s": NOON_S, "on": None}
    waits = a_job("a", **rows["a"], min_gpus=4)
    assert plan_of([a_job("b", **rows["b"]), waits, gang]) == {
        "a": "start n3:0,1,2,3",
        "gang": "start n0:0,1,2,3 n1:0,1,2,3",
    }
    rows["a"]["on"] = {"n3": (0, 1, 2, 3)}
    third = a_job("gang", min_gpus=8, submitted_s=1.0)
    again = [*(a_job(name, **each) for name, each in rows.items()), third]
    crowd = [*again[:2], a_job("c", on={"n0": (0, 1, 2, 3)}, priority=1, waiting_since_s=NOON_S), third]
    assert plan_of(crowd, NOON_S + 1_800.0) == {"gang": "hold not_enough_free_gpus"}


OLD = {"priority": 1, "waiting_since_s": NOON_S - 9_000.0}
RACKS = np.array([0, 0, 1, 1])


def in_racks(policy: str, *jobs: JobRow, saves: dict[str, float] | None = None) -> dict[str, str]:
    """Return what a policy does in two racks of two nodes; jobs whose names begin with ``gang`` need a rack."""
    made, chosen = of_racks([*jobs], RACKS), build_policy(policy, {})
    within = {each: 1 for each in made.jobs.ids if each.startswith("gang")}
    told = {JobId(name): Saves(last_s, 600.0) for name, last_s in (saves or {}).items()}
    return story(run_cycle(chosen, replace(made, within=within, saves=told), chosen.initial()).plan)


@pytest.mark.parametrize(
    ("terms", "gpus", "saves"),
    [
        ({"remaining_s": 50.0}, 8, None),  # the rack is soon free by itself
        ({"preemptible": False}, 8, None),
        ({"waiting_since_s": NOON_S - 3_000.0}, 8, None),
        ({}, 8, {"a": NOON_S - 9_500.0, "b": NOON_S - 9_500.0}),  # it would have nothing of this run
        ({}, 8, {"a": NOON_S - 8_900.0, "b": NOON_S - 8_900.0}),  # nearly all of it would be lost
    ],
)
def test_nobody_moves_where_that_does_not_pay_or_may_not_be(
    terms: dict[str, Any], gpus: int, saves: dict[str, float] | None
) -> None:
    a, b = (a_job(name, on={node: (0, 1, 2, 3)}, **(OLD | terms)) for name, node in (("a", "n0"), ("b", "n2")))
    assert in_racks("las", a, b, a_job("gang", min_gpus=gpus), saves=saves) == {"gang": "hold no_room_within"}


def test_nobody_moves_who_fits_only_where_room_is_made() -> None:
    a, fixed = a_job("a", on={"n0": (0, 1, 2, 3)}, **OLD), {"preemptible": False, **OLD}
    others = [a_job("b", on={"n2": (0, 1, 2, 3)}, **fixed), a_job("c", on={"n3": (0, 1)}, **fixed)]
    assert in_racks("las", a, *others, a_job("gang", min_gpus=6)) == {"gang": "hold no_room_within"}


def test_what_a_gang_waits_for_in_its_rack_is_kept_there_and_nothing_else() -> None:
    """It needs all of the first rack, of which a node is being released; the free node of the other is for others."""
    going = a_job("a", on={"n0": (0, 1, 2, 3)}, phase=Phase.PREEMPTING, models=())
    fixed = a_job("b", on={"n3": (0, 1, 2, 3)}, preemptible=False)
    waiting = [a_job("gang", min_gpus=8, submitted_s=0.0), a_job("small", min_gpus=4, submitted_s=1.0)]
    assert in_racks("fifo", going, fixed, *waiting) == {"gang": "hold waiting_for_release", "small": "start n2:0,1,2,3"}


def test_what_one_gang_takes_of_a_rack_is_not_kept_for_another() -> None:
    fixed = [a_job(name, on={name: (0, 1, 2, 3)}, preemptible=False) for name in ("n2", "n3")]
    gangs = [
        a_job("gang1", min_gpus=4, submitted_s=0.0),
        a_job("gang2", min_gpus=8, submitted_s=1.0),
        a_job("small", submitted_s=2.0),
    ]
    assert in_racks("fifo", *fixed, *gangs) == {
        "gang1": "start n0:0,1,2,3",
        "gang2": "hold not_enough_free_gpus",
        "small": "hold not_enough_free_gpus",
    }


def test_a_plan_that_spreads_a_gang_over_racks_is_refused() -> None:
    snapshot = replace(of_racks([a_job("gang", min_gpus=8)], RACKS), within={JobId("gang"): 1})
    placed = Placement(tuple(NodeShare(NodeId(node), (0, 1, 2, 3)) for node in ("n0", "n2")))
    with pytest.raises(PlanError, match="job gang must lie within one rack"):
        check_plan(snapshot, Plan(snapshot.version, (Start(JobId("gang"), placed, Reason.IN_ORDER),)))


def test_those_that_need_a_rack_are_placed_before_those_that_do_not_whoever_comes_first() -> None:
    fixed = a_job("n3", on={"n3": (0, 1, 2, 3)}, preemptible=False)
    first, second = a_job("any", min_gpus=5, submitted_s=0.0), a_job("gang", min_gpus=7, submitted_s=1.0)
    found = in_racks("fifo", fixed, first, second)
    assert found["gang"] == "start n0:0,1,2,3 n1:0,1,2"
    assert found["any"].startswith("start n2:0,1,2,3 n1:3")
