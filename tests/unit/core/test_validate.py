"""Every invariant of a plan, broken once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.plan import Action, Hold, Plan, PowerNode, Preempt, ProfileControls, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.cycle.validate import check_plan
from services.core.domain.controls import ControlKind
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from tests.support.builders import a_job, a_node, a_snapshot

NODES = [a_node("n0", gpus=4), a_node("n1", gpus=4, schedulable=False), a_node("v0", gpus=4, model="V100")]
JOBS = [
    a_job("q", min_gpus=2, max_gpus=6, step_gpus=2, models=("A100",)),
    a_job("p", tenant="poor"),
    a_job("run", on={"n0": (0,)}, max_gpus=2),
    a_job("rock", on={"v0": (0,)}, preemptible=False),
    a_job("stopping", on={"v0": (1,)}, phase=Phase.PREEMPTING),
    a_job("wide", min_gpus=2, max_gpus=8),
]


def start(name: str, **shares: tuple[int, ...]) -> Start:
    """Start a job on the devices given by node."""
    placement = Placement(tuple(NodeShare(NodeId(node), devices) for node, devices in shares.items()))
    return Start(JobId(name), placement, Reason.IN_ORDER)


def hold(name: str) -> Hold:
    return Hold(JobId(name), Reason.NOT_ENOUGH_FREE_GPUS)


def preempt(name: str, next_gpus: int = 1) -> Preempt:
    return Preempt(JobId(name), Reason.OUTRANKED, next_gpus)


def limit(name: str, power_limit_w: float | None = 200.0) -> SetControl:
    return SetControl(JobId(name), ControlKind.POWER_LIMIT, power_limit_w, Reason.LEAST_COST)


def snapshot() -> Snapshot:
    """A100s take power limits and clocks, V100s power limits alone."""
    settable = (frozenset(ControlKind), frozenset([ControlKind.POWER_LIMIT]))
    return replace(a_snapshot(JOBS, NODES, quota={"poor": 0}), settable=settable, measures=True)


def test_a_sound_plan_passes() -> None:
    clock = SetControl(JobId("q"), ControlKind.CLOCK, 1_200, Reason.LEAST_COST)
    settings = (limit("q"), clock, limit("rock", None), ProfileControls(JobId("wide"), ControlKind.POWER_LIMIT, 5.0))
    actions = (start("q", n0=(1, 2)), preempt("run", 2), hold("p"), start("wide", v0=(2, 3)), *settings)

    check_plan(snapshot(), Plan(7, actions))


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        ((hold("ghost"),), "ghost is not in the snapshot"),
        ((hold("q"), start("q", n0=(1, 2))), "q has more than one action"),
        ((hold("run"),), "run cannot be held: it is running"),
        ((start("run", n0=(1,)),), "run cannot start: it is running"),
        ((start("stopping", n0=(1,)),), "stopping cannot start: it is preempting"),
        ((preempt("q"),), "q cannot be preempted: it is queued"),
        ((preempt("stopping"),), "stopping cannot be preempted: it is preempting"),
        ((preempt("rock"),), "rock may not be preempted"),
        ((preempt("run", 3),), "run cannot have 3 GPUs: 1 to 2 in steps of 1"),
        ((start("q", n0=(1,)),), "q cannot have 1 GPUs"),
        ((start("q", n0=(1, 2, 3)),), "q cannot have 3 GPUs: 2 to 6 in steps of 2"),
        ((start("q", n9=(1, 2)),), "there is no such node"),
        ((start("q", n1=(1, 2)),), "it is drained"),
        ((start("q", n0=(0, 1)),), "device 0 of n0 is not free"),
        ((start("q", n0=(1, 4)),), "device 4 of n0 is not free"),
        ((start("q", n0=(1, 1)),), "device 1 of n0 is given twice"),
        ((start("q", n0=(1, 2)), start("wide", n0=(2, 3))), "device 2 of n0 is given twice, also to job wide"),
        ((start("wide", n0=(1, 2), v0=()),), "names a node without devices"),
        ((start("wide", n0=(1,), v0=(2,)),), "wide spans GPU models"),
        ((start("q", v0=(2, 3)),), "q may not use the GPU model"),
        ((start("p", n0=(1,)),), "tenant poor would hold 1 GPUs of its 0"),
        ((limit("ghost"),), "ghost is not in the snapshot"),
        ((limit("q"),), "q cannot have its power limit set: it neither runs on nor starts"),
        ((limit("q"), hold("q")), "it neither runs on nor starts"),
        ((limit("stopping"),), "it neither runs on nor starts"),
        ((limit("run"), preempt("run")), "it neither runs on nor starts"),
        ((limit("run"), limit("run", None)), "run has its power limit set twice"),
        ((limit("run"), ProfileControls(JobId("run"), ControlKind.POWER_LIMIT, 5.0)), "set twice"),
        ((limit("run", 0.0),), "run cannot have a power limit or window of 0.0"),
        ((limit("run", float("nan")),), "run cannot have a power limit or window of nan"),
        ((ProfileControls(JobId("run"), ControlKind.CLOCK, -1.0),), "clock or window of -1.0"),
        (
            (SetControl(JobId("rock"), ControlKind.CLOCK, 1_200, Reason.LEAST_COST),),
            "rock cannot have its clock set: its GPUs do not take",
        ),
    ],
)
def test_a_plan_that_breaks_an_invariant_is_refused(actions: tuple[Action, ...], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check_plan(snapshot(), Plan(7, actions))


def test_a_stale_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="for snapshot 6, not 7"):
        check_plan(snapshot(), Plan(6, ()))


def test_a_round_of_a_policy_that_breaks_an_invariant_yields_nothing() -> None:
    class Broken:
        name = "broken"

        def initial(self) -> int:
            return 0

        def decide(self, snapshot: Snapshot, memory: int) -> tuple[Plan, int]:
            return Plan(snapshot.version, (hold("run"),)), memory + 1

        def dump(self, memory: int) -> dict[str, int]:
            return {"rounds": memory}

        def load(self, stored: dict[str, int]) -> int:
            return stored["rounds"]

    with pytest.raises(PlanError):
        run_cycle(Broken(), snapshot(), 0)


def test_only_idle_nodes_that_may_sleep_are_powered_down_and_only_sleeping_ones_woken() -> None:
    snapshot = a_snapshot([a_job("a", on={"n0": (0,)}), a_job("b")], [a_node(f"n{at}", gpus=2) for at in range(4)])
    nodes = replace(
        snapshot.nodes, may_sleep=np.array([True, True, True, False]), asleep=np.array([False, False, True, False])
    )
    snapshot = replace(snapshot, nodes=nodes)

    def checked(*actions: PowerNode, starts: tuple[Start, ...] = ()) -> None:
        check_plan(snapshot, Plan(7, starts, actions))

    def power(name: str, on: bool) -> PowerNode:
        return PowerNode(NodeId(name), on, Reason.UNUSED)

    checked(power("n1", False), power("n2", True))
    for action, why in (
        (power("n0", False), "in use"),
        (power("n1", True), "awake already"),
        (power("n2", False), "asleep already"),
        (power("n3", False), "cannot be powered"),
        (power("nowhere", True), "cannot be powered"),
    ):
        with pytest.raises(PlanError, match=why):
            checked(action)
    with pytest.raises(PlanError, match="twice"):
        checked(power("n1", False), power("n1", False))
    start = Start(JobId("b"), Placement((NodeShare(NodeId("n1"), (0,)),)), Reason.IN_ORDER)
    with pytest.raises(PlanError, match="in use"):
        checked(power("n1", False), starts=(start,))
