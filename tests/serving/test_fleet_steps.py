"""How a plan of a fleet is carried out, in a world of GPUs and instances that does what it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.apps import FleetPlanState
from services.contracts.serving import InstanceState
from services.core.policies.clover.layouts import LAYOUTS
from services.serving.fleets.assignment import (
    Gpu,
    GpuState,
    Kind,
    Placed,
    Sizes,
    assign,
    base,
    fitting,
    layout_of,
    ordered,
    sizes_of,
    slots_of,
)
from services.serving.fleets.problem import PlannedApp, SlaModel
from services.serving.fleets.steps import KeepsSla, Limits, NextStep, Progress, at_rest, carry_out
from services.serving.repository.fleets import STORED_ASSIGNMENT, STORED_PROGRESS
from tests.serving.fleets import an_app

LIMITS = Limits(cut_s=60, start_s=300, wait_s=900)
READY = InstanceState.READY


@dataclass
class World:
    """GPUs, the instances on them, and what is wanted: a scheduler, an agent and a controller in a few lines."""

    gpus: dict[Gpu, GpuState]
    assignment: dict[Gpu, tuple[Kind, ...]]
    instances: list[Placed] = field(default_factory=list[Placed])
    now_s: float = 0.0
    made: int = 0
    refuses: frozenset[Gpu] = frozenset()
    crashes: frozenset[Kind] = frozenset()
    least_ready: int = 99
    best: Mapping[str, Kind] | None = None
    late: frozenset[str] = frozenset()

    def obey(self, step: NextStep) -> None:
        """Do what a step says, a little of it: what leaves is gone, what is wanted is placed, what is cut is cut."""
        self.assignment = dict(step.assignment)
        if step.cut is not None:
            gpu, sizes = step.cut
            self.gpus[gpu] = replace(self.gpus[gpu], wanted=sizes, state="pending")
        there = Counter(each.kind for each in self.instances)
        for kind, count in (there - step.wanted).items():  # only what is too much leaves, as the controller has it
            mine = [each for each in self.instances if each.kind == kind]
            for each in sorted(mine, key=lambda each: each.id not in step.leave)[:count]:
                self.instances.remove(each)
        for kind in (step.wanted - there).elements():
            self.made += 1
            self.instances.append(Placed(f"i{self.made}", kind, InstanceState.WANTED, None))
        self.cut()
        self.least_ready = min(self.least_ready, sum(self.there().values()))
        self.place()
        self.now_s += 10

    def cut(self) -> None:
        cutting = [gpu for gpu, state in self.gpus.items() if state.state == "pending"]
        assert len(cutting) <= 1, "one GPU at a time"
        for gpu in cutting:
            state = self.gpus[gpu]
            if any(each.gpu == gpu for each in self.instances):
                continue
            refused = gpu in self.refuses and state.wanted != state.sizes
            self.gpus[gpu] = (
                replace(state, state="failed", detail="the driver says no")
                if refused
                else replace(state, sizes=state.wanted, state="applied")
            )

    def place(self) -> None:
        for at, each in enumerate(self.instances):
            if each.gpu is not None:
                if each.state is not READY and each.kind not in self.crashes:
                    self.instances[at] = replace(each, state=READY)
                continue
            for gpu, state in sorted(self.gpus.items()):
                taken = Counter(other.kind[2] for other in self.instances if other.gpu == gpu)
                if state.state != "pending" and (slots_of(state.sizes) - taken)[each.kind[2]] > 0:
                    self.instances[at] = replace(each, gpu=gpu)
                    break

    def run(self, progress: Progress, keeps_sla: KeepsSla = lambda _: None) -> NextStep:
        """Carry a plan out to its end."""
        for _ in range(500):
            step = carry_out(
                STORED_PROGRESS.validate_python(STORED_PROGRESS.dump_python(progress, mode="json")),
                STORED_ASSIGNMENT.validate_python(STORED_ASSIGNMENT.dump_python(self.assignment, mode="json")),
                self.gpus,
                self.instances,
                keeps_sla,
                self.now_s,
                LIMITS,
                self.best,
                late=self.late,
            )
            for each in self.instances:
                if each.id in step.leave and each.gpu is not None and self.gpus[each.gpu].is_up:
                    assert each.gpu == (step.progress and step.progress.current), "only the open GPU is drained"
            self.obey(step)
            if step.outcome is not None:
                return step
            assert step.progress is not None
            progress = step.progress
        raise AssertionError("the plan does not end")

    def there(self) -> Counter[Kind]:
        return Counter(each.kind for each in self.instances if each.state is READY)


def a_gpu(at: int, sizes: Sizes = ()) -> GpuState:
    return GpuState(("n0", at), sizes, sizes, "applied", True)


def a_world(*sizes: Sizes, app: str = "a") -> World:
    """GPUs that are cut so, each slice with the variant `big`."""
    gpus = {("n0", at): a_gpu(at, each) for at, each in enumerate(sizes)}
    world = World(
        gpus,
        {gpu: tuple((app, "big", size) for size in slots_of(state.sizes).elements()) for gpu, state in gpus.items()},
    )
    world.obey(at_rest(world.assignment, gpus, []))
    world.place()
    return world


def a_plan(world: World, layouts: Mapping[Gpu, Sizes], wanted: Mapping[Kind, int]) -> Progress:
    sizes = {gpu: state.sizes for gpu, state in world.gpus.items()}
    return Progress(layouts, assign(layouts, wanted, sizes, world.assignment), world.now_s)


LAYOUT = st.sampled_from(range(1, 20)).map(sizes_of)


@given(
    now=st.lists(LAYOUT, min_size=1, max_size=4),
    then=st.lists(LAYOUT, min_size=4, max_size=4),
    variants=st.lists(st.sampled_from(["big", "small", None]), min_size=28, max_size=28),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_carried_out_one_gpu_at_a_time(
    now: list[Sizes], then: list[Sizes], variants: list[str | None]
) -> None:
    world = a_world(*now)
    layouts = {gpu: then[at] for at, gpu in enumerate(sorted(world.gpus))}
    slots = [size for sizes in layouts.values() for size in slots_of(sizes).elements()]
    wanted = Counter(("a", variant, size) for variant, size in zip(variants, slots, strict=False) if variant)
    progress = a_plan(world, layouts, wanted)
    for gpu, kinds in progress.after.items():
        assert fitting(kinds, layouts[gpu]) == kinds

    step = world.run(progress)

    assert step.outcome is FleetPlanState.APPLIED
    assert world.there() == wanted
    assert {gpu: state.sizes for gpu, state in world.gpus.items()} == layouts
    assert Counter(kind for kinds in world.assignment.values() for kind in kinds) == wanted


def test_what_stays_on_a_gpu_is_not_touched() -> None:
    world = a_world((), (4, 3))
    before = {each.id for each in world.instances if each.gpu == ("n0", 1)}
    layouts = {("n0", 0): (3, 2, 2), ("n0", 1): (4, 3)}
    wanted = {("a", "big", "4g"): 1, ("a", "big", "3g"): 1, ("a", "small", "3g"): 1, ("a", "small", "2g"): 2}

    assert world.run(a_plan(world, layouts, wanted)).outcome is FleetPlanState.APPLIED

    assert before <= {each.id for each in world.instances}


def test_a_gpu_that_cannot_be_spared_is_waited_for_and_the_plan_given_up_at_last() -> None:
    world = a_world((), ())
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2})

    step = world.run(progress, lambda wanted: "a" if sum(wanted.values()) < 2 else None)

    assert (step.outcome, step.detail) == (FleetPlanState.FAILED, "No GPU could be spared within the SLA of a.")
    assert world.there() == {("a", "big", "7g"): 2}


def test_an_application_that_is_late_already_waits_for_no_gpu_that_nobody_can_spare() -> None:
    world = a_world((), ())
    world.late, world.best = frozenset({"a"}), {"a": ("a", "big", "7g")}
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2})

    step = world.run(progress, lambda wanted: "a" if sum(wanted.values()) < 2 else None)

    assert (step.outcome, world.there()) == (FleetPlanState.APPLIED, {("a", "small", "4g"): 2})


def test_instances_that_stay_on_a_gpu_count_while_others_on_it_are_replaced() -> None:
    world = a_world((4, 3))
    wanted = {("a", "big", "4g"): 1, ("a", "small", "3g"): 1}

    step = world.run(a_plan(world, {("n0", 0): (4, 3)}, wanted), lambda rest: None if rest["a", "big", "4g"] else "a")

    assert (step.outcome, world.there()) == (FleetPlanState.APPLIED, wanted)


def all_but(world: World, *gone: Gpu) -> World:
    """Take the instances from some GPUs."""
    world.instances = [each for each in world.instances if each.gpu not in gone]
    world.assignment |= dict.fromkeys(gone, ())
    world.least_ready = 99
    return world


def needs_one(wanted: Counter[Kind]) -> str | None:
    return None if wanted.total() else "a"


def test_a_new_instance_is_ready_before_the_one_beside_it_on_the_gpu_leaves() -> None:
    world = a_world((4, 3))
    world.instances = [each for each in world.instances if each.kind[2] == "3g"]
    world.assignment = {("n0", 0): (("a", "big", "3g"),)}
    world.least_ready = 99

    step = world.run(a_plan(world, {("n0", 0): (4, 3)}, {("a", "small", "4g"): 1}), needs_one)

    assert (step.outcome, world.there()) == (FleetPlanState.APPLIED, {("a", "small", "4g"): 1})
    assert world.least_ready == 1


@pytest.mark.parametrize("late", [frozenset[str](), frozenset({"a"})])
def test_a_free_gpu_helps_out_while_the_only_other_one_is_cut(late: frozenset[str]) -> None:
    """Also while answers are late already: without any instance they would be much later."""
    world = all_but(a_world((), ()), ("n0", 1))
    world.late = late
    world.best = {"a": ("a", "big", "7g")}
    progress = a_plan(world, {("n0", 0): (4, 3), ("n0", 1): ()}, {("a", "small", "4g"): 1})

    step = world.run(progress, needs_one)

    assert (step.outcome, world.there()) == (FleetPlanState.APPLIED, {("a", "small", "4g"): 1})
    assert world.least_ready == 1


def test_a_helper_that_does_not_come_up_ends_the_plan_and_what_ran_runs_on() -> None:
    world = all_but(a_world((), ()), ("n0", 1))
    world.best = {"a": ("a", "large", "7g")}
    world.crashes = frozenset({("a", "large", "7g")})

    step = world.run(a_plan(world, {("n0", 0): (4, 3), ("n0", 1): ()}, {("a", "small", "4g"): 1}), needs_one)

    assert (step.outcome, step.detail) == (
        FleetPlanState.FAILED,
        "Variant large of a on 7g was not ready to help out within 900 s.",
    )
    assert world.there() == {("a", "big", "7g"): 1}


def test_new_instances_go_where_nobody_has_to_leave() -> None:
    gpus = [("n0", at) for at in range(3)]
    whole = dict.fromkeys(gpus, ())
    present = {gpus[0]: (("a", "big", "7g"),)}
    assert assign(whole, {("a", "small", "7g"): 1}, whole, present)[gpus[1]] == (("a", "small", "7g"),)
    assert base(gpus, {("a", "big"): 0.1}, {gpus[2]: (("b", "big", "7g"),)})[gpus[0]] == (("a", "big", "7g"),)


def test_an_outdated_plan_finishes_the_gpu_that_is_open_and_opens_no_other() -> None:
    world = a_world((), ())
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2})
    steps: list[NextStep] = []
    while not steps or steps[-1].outcome is None:
        given = steps[-1].progress if steps else progress
        assert given is not None
        arguments = given, world.assignment, world.gpus, world.instances, lambda _: None, world.now_s, LIMITS
        steps.append(carry_out(*arguments, is_outdated=bool(steps)))
        world.obey(steps[-1])
    assert steps[-1].outcome is FleetPlanState.SUPERSEDED
    assert world.there() == {("a", "small", "4g"): 1, ("a", "big", "7g"): 1}


def test_a_gpu_that_cannot_be_cut_goes_back_to_what_it_was() -> None:
    world = a_world((), ())
    world.refuses = frozenset({("n0", 1)})
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2, ("a", "small", "3g"): 2})

    step = world.run(progress)

    assert step.outcome is FleetPlanState.FAILED
    assert step.detail == "GPU 1 of node n0 could not be cut into 4g,3g: the driver says no."
    for _ in range(3):
        world.obey(at_rest(world.assignment, world.gpus, world.instances))
    assert world.gpus["n0", 1].sizes == world.gpus["n0", 1].wanted == ()
    assert world.there() == {("a", "small", "4g"): 1, ("a", "small", "3g"): 1, ("a", "big", "7g"): 1}


def test_an_instance_that_does_not_come_up_ends_the_plan() -> None:
    world = a_world((), ())
    world.crashes = frozenset({("a", "small", "3g")})
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2, ("a", "small", "3g"): 2})

    step = world.run(progress)

    assert (step.outcome, step.detail) == (
        FleetPlanState.FAILED,
        "Variant small of a on 3g was not ready on GPU 0 of node n0 within 300 s.",
    )
    assert world.there()["a", "big", "7g"] == 1, "the other GPU was left alone"


def test_a_lost_gpu_supersedes_the_plan_and_its_instances_leave_first() -> None:
    world = a_world((), ())
    progress = a_plan(world, dict.fromkeys(world.gpus, (4, 3)), {("a", "small", "4g"): 2})
    world.gpus["n0", 1] = replace(world.gpus["n0", 1], is_up=False)

    step = world.run(progress)

    assert (step.outcome, step.wanted) == (FleetPlanState.SUPERSEDED, Counter({("a", "big", "7g"): 1}))
    assert world.there() == {("a", "big", "7g"): 1}
    assert {each.gpu for each in world.instances} == {("n0", 0)}


def test_base_gives_each_application_a_gpu_and_the_rest_to_the_busiest() -> None:
    gpus = [("n0", at) for at in range(4)]
    found = base(gpus, {("a", "big"): 0.5, ("b", "large"): 2.2})
    assert Counter(kind for kinds in found.values() for kind in kinds) == {
        ("a", "big", "7g"): 1,
        ("b", "large", "7g"): 3,
    }
    assert base(gpus, {}) == dict.fromkeys(gpus, ())


@pytest.mark.parametrize("layout", range(1, 20))
def test_a_layout_is_found_again_by_its_slices(layout: int) -> None:
    found = layout_of(sizes_of(layout))
    assert ordered(LAYOUTS[found - 1]) == ordered(LAYOUTS[layout - 1])


def test_slices_that_are_no_layout_count_as_uncut() -> None:
    assert layout_of((3,)) == 1
    assert fitting([("a", "big", "7g"), ("a", "big", "3g")], (3,)) == (("a", "big", "3g"),)


def test_an_instance_that_runs_where_another_gpu_has_a_place_for_its_kind_moves_there() -> None:
    """Slices of a size are alike to the scheduler: what belongs on one GPU may have been placed on another."""
    first, second = ("n0", 0), ("n0", 1)
    small: Kind = ("photos", "small", "1g")
    big: Kind = ("photos", "big", "7g")
    sevens = (1,) * 7
    world = World(
        gpus={gpu: GpuState(gpu, sevens, sevens, "applied", True) for gpu in (first, second)},
        assignment={first: (small,), second: ()},
        instances=[Placed("i0", small, READY, second)],
    )
    progress = Progress({first: sevens, second: ()}, {first: (small,), second: (big,)}, 0.0)
    step = world.run(progress)
    assert step.outcome is FleetPlanState.APPLIED
    assert {each.gpu: each.kind for each in world.instances} == {first: small, second: big}


@pytest.mark.parametrize(
    ("running", "is_late", "late"),
    [(3, False, set[str]()), (3, True, {"a"}), (1, False, {"a"})],
    ids=["in time", "late as observed", "late by the model"],
)
def test_an_application_keeps_what_serves_it_in_time_and_is_late_as_seen_or_modelled(
    running: int, is_late: bool, late: set[str]
) -> None:
    kind: Kind = ("a", "big", "7g")
    app = PlannedApp("a", an_app(), 1, rate_per_s=20.0, is_late=is_late)
    model = SlaModel([app], 80.0, Counter({kind: running}))
    assert model.late == late
    assert (model.broken_by(Counter({kind: 2})), model.broken_by(Counter({kind: 1}))) == (None, "a")
    anything = replace(app, spec=an_app(repartition="any_time"))
    assert SlaModel([anything], 80.0, Counter({kind: 3})).broken_by(Counter()) is None
