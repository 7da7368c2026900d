"""What PowerFlow's rounds make of gangs that are being measured: what they count for, and whose turn it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Preempt, ProfileControls, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.domain.ids import JobId
from services.core.policies.powerflow.profiling import PowerflowMemory
from services.core.policies.registry import build_policy
from tests.support.builders import a_job, a_node, a_snapshot

LIMITS = np.array([150.0, 200.0, 300.0])
SIZES = np.array([1, 2, 4])
TABLE = GangTable(
    SIZES, SIZES[:, None] ** 0.99 * np.array([0.6, 0.8, 1.0]), SIZES[:, None] * LIMITS, ControlKind.POWER_LIMIT, LIMITS
)
MEASURED, OTHER = JobId("a"), JobId("b")


def two_gangs(slice_w: float, *, measuring: frozenset[JobId] | None, most: int = 1) -> Snapshot:
    """Two gangs of one GPU: one in the middle of a measurement, the other at 150 W."""
    rows = [a_job(name, on={"n": (at,)}, max_gpus=most) for at, name in enumerate((MEASURED, OTHER))]
    snapshot = a_snapshot(rows, [a_node("n", gpus=4)])
    jobs = replace(snapshot.jobs, control_curve=np.zeros(2, np.int64), power_limit_w=np.array([slice_w, 150.0]))
    return replace(
        snapshot,
        jobs=jobs,
        trigger=Trigger.PASSIVE if most == 1 else Trigger.ACTIVE,
        settable=(frozenset([ControlKind.POWER_LIMIT]),),
        gangs=({0: TABLE},),
        measures=True,
        measuring=measuring,
    )


def under_measurement(snapshot: Snapshot) -> PowerflowMemory:
    return PowerflowMemory(measured={MEASURED: snapshot.now_s + 400.0}, profiled={MEASURED: (1,)})


@pytest.mark.parametrize(
    ("slice_w", "other_w"),
    [
        (float("nan"), None),  # 300 of 450 W are kept for the measured gang
        (200.0, [None]),
        (150.0, [None]),
    ],
)
def test_a_gang_counts_for_what_it_may_still_draw(slice_w: float, other_w: list[float | None] | None) -> None:
    snapshot = two_gangs(slice_w, measuring=frozenset([MEASURED]))
    policy = build_policy("powerflow", {"power_limit_w": 500.0 if other_w else 450.0})
    plan = run_cycle(policy, snapshot, under_measurement(snapshot)).plan

    assert [action.value for action in plan.actions if isinstance(action, SetControl)] == (other_w or [])
    assert all(action.job_id == OTHER for action in plan.actions)


@pytest.mark.parametrize(("measuring", "over"), [(frozenset[JobId](), True), (None, False)])
def test_a_measurement_is_over_when_that_is_told_or_else_when_it_surely_is(
    measuring: frozenset[JobId] | None, over: bool
) -> None:
    snapshot = two_gangs(150.0, measuring=measuring)
    memory = run_cycle(
        build_policy("powerflow", {"power_limit_w": 900.0}), snapshot, under_measurement(snapshot)
    ).memory
    assert (MEASURED not in memory.measured) == over

    late = replace(snapshot, now_s=snapshot.now_s + 401.0)
    memory = run_cycle(build_policy("powerflow", {"power_limit_w": 900.0}), late, under_measurement(snapshot)).memory
    assert not memory.measured


@pytest.mark.parametrize("measuring", [frozenset[JobId](), None])
def test_a_measurement_that_ends_with_its_gang_was_not_made(measuring: frozenset[JobId] | None) -> None:
    snapshot = a_snapshot([a_job(MEASURED, min_gpus=8), a_job(OTHER, on={"n": (0,)})], [a_node("n", gpus=4)])
    snapshot = replace(snapshot, trigger=Trigger.PASSIVE, measuring=measuring)
    until_s = snapshot.now_s + 400.0
    memory = PowerflowMemory({}, {MEASURED: until_s, OTHER: until_s}, {MEASURED: (2, 1), OTHER: (1,)})
    after = run_cycle(build_policy("powerflow", {}), snapshot, memory).memory
    assert after.profiled == {MEASURED: (2,), OTHER: (1,)}
    assert MEASURED not in after.measured


def test_a_gang_keeps_its_size_until_it_is_measured() -> None:
    """Both would double on four GPUs; the one being measured waits for that."""
    snapshot = two_gangs(200.0, measuring=frozenset([MEASURED]), most=2)
    policy = build_policy("powerflow", {"power_limit_w": 5_000.0, "resize_gain": 0.0})
    stopped = [
        [action.job_id for action in run_cycle(policy, snapshot, memory).plan.actions if isinstance(action, Preempt)]
        for memory in (under_measurement(snapshot), PowerflowMemory())
    ]
    assert stopped == [[OTHER], [MEASURED, OTHER]]


@pytest.mark.parametrize(
    ("profiling", "known", "already", "begins"),
    [
        ("unknown", False, (), True),
        ("unknown", True, (), False),
        ("first_run", True, (), True),
        ("first_run", True, (2,), False),
        ("each_job", True, (2,), True),
        ("each_job", True, (1,), False),
        ("never", False, (), False),
    ],
)
def test_whose_turn_it_is(profiling: str, known: bool, already: tuple[int, ...], begins: bool) -> None:
    """A job that starts on one GPU, which it was (not) measured on before."""
    snapshot = a_snapshot([a_job(MEASURED)], [a_node("n", gpus=1)])
    snapshot = replace(
        snapshot,
        jobs=replace(snapshot.jobs, control_curve=np.zeros(1, np.int64)),
        settable=(frozenset([ControlKind.POWER_LIMIT]),),
        gangs=({0: TABLE if known else TABLE.default_only()},),
        measures=True,
        measuring=frozenset(),
    )
    memory = PowerflowMemory(profiled={MEASURED: already} if already else {})
    plan = run_cycle(build_policy("powerflow", {"profiling": profiling}), snapshot, memory).plan
    assert any(isinstance(action, ProfileControls) for action in plan.actions) == begins


@pytest.mark.parametrize(("limit_w", "measured", "set_w"), [(700.0, False, 150.0), (1_200.0, True, None)])
def test_a_gang_the_limit_leaves_no_power_to_measure_starts_unmeasured(
    limit_w: float, measured: bool, set_w: float | None
) -> None:
    """Four GPUs are allocated at 150 W each; at 300 W, to be measured, the gang would wait for ever."""
    snapshot = a_snapshot([a_job(MEASURED, max_gpus=4)], [a_node("n", gpus=4)])
    snapshot = replace(
        snapshot,
        trigger=Trigger.ACTIVE,
        jobs=replace(snapshot.jobs, control_curve=np.zeros(1, np.int64)),
        settable=(frozenset([ControlKind.POWER_LIMIT]),),
        gangs=({0: TABLE},),
        measures=True,
        measuring=frozenset(),
    )
    policy = build_policy("powerflow", {"profiling": "each_job", "power_limit_w": limit_w})
    cycle = run_cycle(policy, snapshot, PowerflowMemory())
    actions = cycle.plan.actions
    assert [action.gpus for action in actions if isinstance(action, Start)] == [4]
    assert any(isinstance(action, ProfileControls) for action in actions) == measured
    assert [each.value for each in actions if isinstance(each, SetControl)] == ([] if set_w is None else [set_w])
    assert cycle.memory.profiled == ({MEASURED: (4,)} if measured else {})


def test_who_is_being_measured_is_recorded() -> None:
    for measuring in (frozenset([MEASURED]), None):
        snapshot = two_gangs(150.0, measuring=measuring)
        assert snapshot_from_json(snapshot_to_json(snapshot)).measuring == measuring
