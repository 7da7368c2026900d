"""How a plan is carried out: one GPU at a time. Pure.

A GPU that changes is *opened*: its instances that have no place in the plan are drained; if it is to be cut anew, its
row says so first, so that nothing more is placed on it, and its node cuts it once nothing runs there. Then the
instances that the plan wants there are started, before others leave if slices are free for them. When all are ready,
the next GPU is opened. If no GPU can be spared, a whole one that is free *helps out*: until all others are as planned,
it runs the best variant of the application that is in the way. An application whose answers are late already is in the
way only as long as one is free. Everything is decided from the present state, so it may be decided again at any time.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.contracts.apps import FleetPlanState
from services.contracts.serving import InstanceState
from services.serving.fleets.assignment import (
    Assignment,
    ByGpu,
    Gpu,
    GpuState,
    Kind,
    Placed,
    Sizes,
    fitting,
    ordered,
    slots_of,
)

KeepsSla = Callable[[Counter[Kind]], str | None]
"""Returns an application that these instances alone would not serve within its SLA; None if there is none."""

LEAVING = (InstanceState.DRAINING, InstanceState.STOPPING)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a plan has come."""

    layouts: ByGpu[Sizes]  #: How the GPUs are to be cut
    after: Assignment  #: Which instances belong on them afterwards
    since_s: float  #: When the open GPU was opened, or the one before it was done; UTC seconds
    done: frozenset[Gpu] = frozenset()  #: The GPUs that are as planned
    current: Gpu | None = None  #: The GPU that is open
    former: Sizes = ()  #: How it was cut before
    cut_since_s: float | None = None  #: When the last instance left the open GPU; None before that
    helpers: frozenset[Gpu] = frozenset()  #: Free GPUs that help out


@dataclass(frozen=True)
class Limits:
    """How long a stage may take."""

    cut_s: float  #: Seconds for a node to cut a GPU on which nothing runs any more
    start_s: float  #: Seconds until the old instances of a GPU have left and the new ones are ready
    wait_s: float  #: Seconds to wait until a GPU can be spared within the SLA


@dataclass(frozen=True)
class NextStep:
    """What to do now."""

    assignment: Assignment  #: Which instances belong on which GPU from now on
    wanted: Counter[Kind]  #: How many instances of each kind there should be now
    leave: frozenset[str]  #: Instances that leave before others of their kind
    cut: tuple[Gpu, Sizes] | None = None  #: A GPU and how it is to be cut, if that must be written now
    progress: Progress | None = None  #: How far the plan has come; None once it has ended
    outcome: FleetPlanState | None = None  #: How it ended
    detail: str | None = None  #: Why it waits or failed


def at_rest(assignment: Assignment, gpus: Mapping[Gpu, GpuState], instances: Iterable[Placed]) -> NextStep:
    """Return what is wanted while no plan is being carried out: what fits on the GPUs that are up."""
    lost = frozenset(each.id for each in instances if each.gpu is not None and not _is_up(gpus, each.gpu))
    return NextStep(assignment, _counted(_here(assignment, gpus)), lost)


@dataclass(frozen=True)
class _Now:
    """What is there now, and how long stages may take."""

    gpus: Mapping[Gpu, GpuState]
    instances: Sequence[Placed]
    s: float  #: The moment, UTC seconds
    limits: Limits
    failing: Container[Kind]

    def rest(self, assignment: Assignment) -> NextStep:
        return at_rest(assignment, self.gpus, self.instances)

    def short(self, wanted: Counter[Kind]) -> list[Kind]:
        """Return what is not ready."""
        return sorted(wanted - Counter(each.kind for each in self.instances if each.state is InstanceState.READY))

    def awaited(self, wanted: Counter[Kind]) -> list[Kind]:
        """Return what is waited for: not what fails to start of an application that has nothing to lose."""
        served = {each.kind[0] for each in self.instances if each.state is InstanceState.READY}
        return [kind for kind in self.short(wanted) if kind[0] in served or kind not in self.failing]

    def gives_up(self, wanted: Counter[Kind], since_s: float, limit_s: float, where: str = "") -> str | None:
        """Return why some instances are not waited for any longer; None if they are."""
        missing = self.awaited(wanted)
        failing = [kind for kind in missing if kind in self.failing]
        if not failing and self.s - since_s <= limit_s:
            return None
        app, variant, size = (failing or missing or [("an instance", "", "")])[0]
        named = f"Variant {variant} of {app} on {size}" if variant else app
        return f"{named} does not start{where}." if failing else f"{named} was not ready{where} within {limit_s:.0f} s."

    def failed(self, assignment: Assignment, detail: str, **more: Any) -> NextStep:
        return replace(self.rest(assignment), outcome=FleetPlanState.FAILED, detail=detail, **more)


def carry_out(
    progress: Progress,
    assignment: Assignment,
    gpus: Mapping[Gpu, GpuState],
    instances: Sequence[Placed],
    keeps_sla: KeepsSla,
    now_s: float,
    limits: Limits,
    best: Mapping[str, Kind] | None = None,
    *,
    late: Container[str] = (),
    failing: Container[Kind] = (),
    is_outdated: bool = False,
) -> NextStep:
    """Return the next step in carrying out a plan.

    Args:
        assignment: Which instances belong on which GPU now.
        instances: Those that have not ended.
        keeps_sla: Names the application whose SLA some instances would break, if any.
        best: What a free GPU runs to help out, by application.
        late: The applications whose SLA is broken already.
        failing: What has failed to start again and again, so that the others do not wait for it.
        is_outdated: Whether a newer plan is due, so that no further GPU is opened for this one.
    """
    now = _Now(gpus, instances, now_s, limits, failing)
    lost = next((gpu for gpu in sorted(progress.layouts) if not _is_up(gpus, gpu)), None)
    if lost is not None:
        detail = f"{named(lost)} was lost before the plan was in force."
        return replace(now.rest(assignment), outcome=FleetPlanState.SUPERSEDED, detail=detail)
    present = dict(assignment)
    if progress.current is not None:
        step = _go_on(progress, present, now)
        if step is not None:
            return step
        present[progress.current] = progress.after[progress.current]
        progress = replace(
            progress, done=progress.done | {progress.current}, current=None, since_s=now_s, cut_since_s=None
        )
    if is_outdated:
        return replace(now.rest(present), outcome=FleetPlanState.SUPERSEDED, detail="A newer plan was due.")
    changing: list[Gpu] = []
    for gpu in sorted(set(progress.layouts) - progress.done):
        is_as_planned = not _surplus(on(gpu, instances), progress.after[gpu]) and gpu not in progress.helpers
        if is_as_planned and _is_cut(gpus[gpu], progress.layouts[gpu]):
            present[gpu] = progress.after[gpu]  # nothing leaves for it
            progress = replace(progress, done=progress.done | {gpu})
        else:
            changing.append(gpu)
    if not changing:
        return _finish(progress, present, now, {*(best or {}).values()})
    rest = now.rest(present)
    if progress.helpers - progress.done and now.awaited(rest.wanted):
        if why := now.gives_up(rest.wanted, progress.since_s, limits.wait_s, " to help out"):
            return replace(rest, outcome=FleetPlanState.FAILED, detail=why)
        return replace(rest, progress=progress, detail="It waits for an instance on a free GPU to help out.")
    held: str | None = None
    spared: Gpu | None = None  # the first that only an application whose answers are late already holds
    # The empty ones serve first, and those on which nothing runs in the end give up theirs last; helpers after all.
    others = [gpu for gpu in changing if gpu not in progress.helpers]
    for gpu in sorted(others or changing, key=lambda gpu: (not progress.after[gpu], len(on(gpu, instances)), gpu)):
        without = _counted({each: kinds for each, kinds in present.items() if each != gpu})
        if _is_cut(gpus[gpu], progress.layouts[gpu]):  # only what has no place there leaves
            leaving = {each.id for each in _surplus(on(gpu, instances), progress.after[gpu])}
            without += Counter(each.kind for each in on(gpu, instances) if each.id not in leaving)
            without += Counter(_with_room(on(gpu, instances), progress.after[gpu], gpus[gpu].sizes))
        held = keeps_sla(without) if on(gpu, instances) else None
        if held is None:
            return _opened(gpu, progress, present, now)
        spared = gpu if spared is None and held in late else spared
    helper = next((gpu for gpu in sorted(progress.layouts) if _is_free(gpu, progress, present, now)), None)
    if helper is not None and held is not None and best is not None and others:
        present[helper] = (best[held],)
        progress = replace(progress, helpers=progress.helpers | {helper}, done=progress.done - {helper}, since_s=now_s)
        detail = "It waits for an instance on a free GPU to help out."
        return replace(now.rest(present), progress=progress, detail=detail)
    if spared is not None:
        return _opened(spared, progress, present, now)
    if now_s - progress.since_s > limits.wait_s:
        return replace(rest, outcome=FleetPlanState.FAILED, detail=f"No GPU could be spared within the SLA of {held}.")
    return replace(rest, progress=progress, detail=f"It waits until a GPU can be spared within the SLA of {held}.")


def on(gpu: Gpu, instances: Iterable[Placed]) -> list[Placed]:
    return [each for each in instances if each.gpu == gpu]


def named(gpu: Gpu) -> str:
    return f"GPU {gpu[1]} of node {gpu[0]}"


def _opened(gpu: Gpu, progress: Progress, present: Assignment, now: _Now) -> NextStep:
    opened = replace(progress, current=gpu, former=now.gpus[gpu].sizes, since_s=now.s, cut_since_s=None)
    step = _go_on(opened, present, now)
    assert step is not None, "a GPU that changes is not done"
    return step


def _go_on(progress: Progress, present: Assignment, now: _Now) -> NextStep | None:
    """Return the next step on the open GPU; None once it is as planned."""
    gpu = progress.current
    assert gpu is not None
    there, target, state = on(gpu, now.instances), progress.layouts[gpu], now.gpus[gpu]
    others = {each: kinds for each, kinds in present.items() if each != gpu}
    is_asked = state.wanted == target
    if _is_cut(state, target):
        after = _here({**others, gpu: progress.after[gpu]}, now.gpus)
        leaving = _surplus(there, progress.after[gpu])
        wanted = _counted(after)
        first = Counter(_with_room(there, progress.after[gpu], state.sizes))
        before = _counted(_here(others, now.gpus)) + Counter(each.kind for each in there if each.state not in LEAVING)
        if leaving and now.awaited(before + first):
            if why := now.gives_up(before + first, progress.since_s, now.limits.start_s, f" on {named(gpu)}"):
                return now.failed(present, why)
            return NextStep(present, before + first, frozenset(), progress=progress)
        leaves = leaving or any(each.state in LEAVING for each in there)
        if not leaves and not now.awaited(wanted):
            return None
        step = NextStep(present, wanted, frozenset(each.id for each in leaving), progress=progress)
        why = now.gives_up(wanted, progress.since_s, now.limits.start_s, f" on {named(gpu)}")
        if why is None:
            return step
        assigned = {**present, gpu: progress.after[gpu]}
        return replace(step, assignment=assigned, progress=None, outcome=FleetPlanState.FAILED, detail=why)
    if not there and progress.cut_since_s is None:
        progress = replace(progress, cut_since_s=now.s)
    cut_s = 0.0 if progress.cut_since_s is None else now.s - progress.cut_since_s
    if (is_asked and state.state == "failed") or cut_s > now.limits.cut_s:
        said = state.detail or f"it is {state.state}"
        detail = f"{named(gpu)} could not be cut into {shown(target)}: {said.rstrip('.')}."
        return now.failed(present, detail, cut=(gpu, progress.former))
    leave = frozenset(each.id for each in there)
    wanted = _counted(_here(others, now.gpus))
    elsewhere = Counter(each.kind for each in now.instances if each.gpu != gpu and each.state not in LEAVING)
    for kind in {each.kind for each in there}:
        # One that runs here may belong on another GPU with slices of the size: it leaves first, and is made anew there.
        wanted[kind] = min(wanted[kind], elsewhere[kind])
    return NextStep(present, +wanted, leave, progress=progress, cut=None if is_asked else (gpu, target))


def _finish(progress: Progress, present: Assignment, now: _Now, best: Container[Kind]) -> NextStep:
    rest = now.rest(present)
    if not now.awaited(rest.wanted):
        # The best variant on a whole GPU is planned whether it starts or not; without others there is a better plan.
        tried = [kind for kind in now.short(rest.wanted) if kind not in best]
        why = f"Variant {tried[0][1]} of {tried[0][0]} on {tried[0][2]} does not start." if tried else None
        return replace(rest, outcome=FleetPlanState.FAILED if tried else FleetPlanState.APPLIED, detail=why)
    if why := now.gives_up(rest.wanted, progress.since_s, now.limits.start_s):
        return replace(rest, outcome=FleetPlanState.FAILED, detail=why)
    return replace(rest, progress=progress)


def shown(sizes: Sizes) -> str:
    return ",".join(f"{size}g" for size in ordered(sizes)) or "one whole GPU"


def _is_up(gpus: Mapping[Gpu, GpuState], gpu: Gpu) -> bool:
    return gpu in gpus and gpus[gpu].is_up


def _is_cut(state: GpuState, target: Sizes) -> bool:
    return state.sizes == state.wanted == target and state.state == "applied"


def _here(assignment: Assignment, gpus: Mapping[Gpu, GpuState]) -> Assignment:
    return {gpu: fitting(kinds, gpus[gpu].sizes) for gpu, kinds in assignment.items() if _is_up(gpus, gpu)}


def _counted(assignment: Assignment) -> Counter[Kind]:
    return Counter(kind for kinds in assignment.values() for kind in kinds)


def _surplus(there: Iterable[Placed], kinds: Iterable[Kind]) -> list[Placed]:
    """Return the instances on a GPU that do not belong there; among equal ones, those that are ready stay."""
    left = Counter(kinds)
    surplus: list[Placed] = []
    for each in sorted(there, key=lambda each: (each.state is not InstanceState.READY, each.id)):
        if each.state in LEAVING:
            continue
        if left[each.kind] > 0:
            left[each.kind] -= 1
        else:
            surplus.append(each)
    return surplus


def _with_room(there: Iterable[Placed], kinds: Iterable[Kind], sizes: Sizes) -> tuple[Kind, ...]:
    """Return which of a GPU's future instances can start while all present ones stay."""
    there = list(there)
    staying = Counter(each.kind for each in there if each.state not in LEAVING)
    new = sorted((Counter(kinds) - staying).elements())
    room = slots_of(sizes) - Counter(each.kind[2] for each in there)
    return fitting(new, ordered(int(size[0]) for size in room.elements())) if room else ()


def _is_free(gpu: Gpu, progress: Progress, present: Assignment, now: _Now) -> bool:
    """Whether a GPU is whole and stays so, and nothing runs or is to run on it."""
    is_whole = not progress.layouts[gpu] and _is_cut(now.gpus[gpu], ())
    return is_whole and not progress.after[gpu] and not present.get(gpu) and not on(gpu, now.instances)
