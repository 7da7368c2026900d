"""What a pass of the planner knows of a fleet, read under the fleet's lock, and what follows from it alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.contracts.apps import AppSpec, FleetPlanTrigger
from services.contracts.carbon import CurrentIntensity
from services.contracts.serving import PlanMode
from services.core.domain.gpus import can_be_sliced
from services.serving.controller.diff import failures
from services.serving.fleets.assignment import WHOLE, Assignment, Gpu, GpuState, Kind, Placed
from services.serving.fleets.observations import percentile_ms
from services.serving.fleets.problem import PlannedApp
from services.serving.fleets.steps import Progress
from services.serving.fleets.triggers import Basis, Present, Service, trigger_of
from services.serving.repository import Queries
from services.serving.repository.apps import REPORTED_WITHIN_S, AppRecord, Seen
from services.serving.repository.fleets import FleetRecord, FleetRows, PlanRecord, variant_and_slice

WINDOW_S = 60.0  #: Requests of this time are looked at, less what is older than the last change of instances
REPORT_S = 5  #: Length of the windows in which routers report requests, seconds
WINDOWS = round(WINDOW_S) // REPORT_S
LEAST_ARRIVALS = 20
LEAST_WINDOWS = 4  #: With fewer, or in fewer windows of 5 s, the application's own estimate counts
STARTS_TRIED = 3  #: After so many starts that failed, no plan waits for another
LONGEST_RETRY_S = 3_600.0  #: Longest wait after a failure; what failed longer ago is tried again


@dataclass(frozen=True)
class FleetState:
    """All that a pass knows of a fleet, read under its lock."""

    queries: Queries  #: Those of the transaction that has the lock
    record: FleetRecord
    apps: list[AppRecord]
    gpus: dict[Gpu, GpuState]
    instances: list[Placed]
    planned: list[PlannedApp]  #: Without those that have nothing, where there are fewer GPUs than applications
    served: Mapping[str, Service]
    plan: PlanRecord | None
    now: datetime
    ordered: bool  #: Whether an order of the grid is in force in its zone
    failing: frozenset[Kind]  #: What has failed to start again and again

    @property
    def rows(self) -> FleetRows:
        return self.queries.fleets

    @property
    def up(self) -> list[Gpu]:
        """Its GPUs on which instances can run: those that are up and no longer used by jobs from outside the fleet."""
        return [gpu for gpu, state in sorted(self.gpus.items()) if state.is_usable]

    @property
    def belonging(self) -> Counter[Kind]:
        """What is to run on its GPUs that are up."""
        assignment = of_apps(self.record.assignment, self)
        return Counter(kind for gpu in self.up for kind in assignment.get(gpu, ()))

    @property
    def basis(self) -> Basis:
        """What a plan made now would be based on."""
        return Basis({"": self.record.revision, **{app.name: app.revision for app in self.apps}}, self.up, self.ordered)


async def read_fleet(queries: Queries, record: FleetRecord) -> FleetState:
    """Return what is known of a fleet, whose row must be locked."""
    apps = await queries.apps.of_fleet(record.name)
    live = [app for app in apps if app.deleted_at is None]
    plan = await queries.fleets.newest_plan(record.name)
    now = await queries.now()
    since = now - timedelta(seconds=WINDOW_S)
    if plan is not None and plan.ended_at is not None:
        since = max(since, plan.ended_at)
    names = [app.name for app in live]
    arrivals = await queries.apps.arrivals(names, now - timedelta(seconds=WINDOW_S))
    settled = await queries.apps.seen(names, since)
    served = {app.name: _service(app, settled[app.name]) for app in live}
    ordered = await queries.fleets.is_ordered(record.spec.zone)
    planned, failing = list[PlannedApp](), set[Kind]()
    for app in live:
        failed = {
            variant_and_slice(at[1]): each.count
            for at, each in failures(await queries.instances.lives(app.key, app.updated_at)).items()
            if (now - each.last_at).total_seconds() < LONGEST_RETRY_S
        }
        failing |= {(app.name, *at) for at, count in failed.items() if count >= STARTS_TRIED}
        planned.append(
            PlannedApp(
                app.name,
                least_energy(app.spec) if ordered else app.spec,
                app.revision,
                rate_per_s(app.spec.requests_per_s, arrivals[app.name], now.timestamp()),
                served[app.name].is_late,
                frozenset(failed),
            )
        )
    gpus = {each.at: each for each in (await queries.fleets.gpus([record.name])).get(record.name, [])}
    up = [at for at, each in gpus.items() if each.is_usable]
    there = {kind[0] for gpu in up for kind in record.assignment.get(gpu, ())}
    planned.sort(key=lambda app: (app.name not in there, app.name))
    del planned[max(len(up), sum(app.name in there for app in planned)) :]
    return FleetState(
        queries,
        record,
        live,
        gpus,
        await queries.fleets.placed([app.name for app in apps]),
        planned,
        served,
        plan,
        now,
        ordered,
        frozenset(failing),
    )


def least_energy(spec: AppSpec) -> AppSpec:
    """Return the spec while an order of the grid is in force: the least energy within the SLA and the accuracy floor.

    Without a floor, the weights alone keep the accuracy, and they stay.
    """
    return spec if spec.max_accuracy_loss_pct is None else spec.model_copy(update={"carbon_weight": 1.0})


def of_apps(assignment: Assignment, fleet: FleetState) -> dict[Gpu, tuple[Kind, ...]]:
    """Return an assignment without the instances of applications that are gone."""
    names = {app.name for app in fleet.apps}
    return {gpu: tuple(kind for kind in kinds if kind[0] in names) for gpu, kinds in assignment.items()}


def is_base_for(assignment: Assignment, fleet: FleetState) -> bool:
    """Whether the assignment gives every application an instance and uses every GPU that is up."""
    apps = {kind[0] for kinds in assignment.values() for kind in kinds}
    return apps == {app.name for app in fleet.planned} and {gpu for gpu, kinds in assignment.items() if kinds} == set(
        fleet.up
    )


def best_kinds(fleet: FleetState) -> list[Kind]:
    """Return the applications' most accurate variants on whole GPUs."""
    return [(app.name, app.spec.most_accurate.name, WHOLE) for app in fleet.planned]


def newcomers(fleet: FleetState, assignment: Assignment) -> list[Kind]:
    """Return BASE for the applications that have no instance yet."""
    there = {kind[0] for kinds in assignment.values() for kind in kinds}
    return [kind for kind in best_kinds(fleet) if kind[0] not in there]


def free_gpus(fleet: FleetState, assignment: Assignment) -> list[Gpu]:
    """Return the whole GPUs on which nothing runs or is to run."""
    used = {each.gpu for each in fleet.instances} | {gpu for gpu, kinds in assignment.items() if kinds}
    return [gpu for gpu in fleet.up if gpu not in used and _is_whole(fleet.gpus[gpu])]


def is_settled(fleet: FleetState) -> bool:
    """Whether there are GPUs, and the cutting of all that are up has ended, successfully or not."""
    return bool(fleet.up) and all(fleet.gpus[gpu].state in ("applied", "failed") for gpu in fleet.up)


def _is_whole(state: GpuState) -> bool:
    return state.sizes == state.wanted == () and state.state == "applied"


def is_base(fleet: FleetState, assignment: Assignment) -> bool:
    """Whether BASE runs and there is a GPU for every application, so that GPUs may be redistributed at once."""
    best = set(best_kinds(fleet))
    return (
        len(fleet.up) >= len(fleet.planned)
        and all(_is_whole(fleet.gpus[gpu]) for gpu in fleet.up)
        and all(kind in best for kinds in assignment.values() for kind in kinds)
    )


def present_of(fleet: FleetState, intensity: CurrentIntensity | None) -> Present:
    """Return what a plan made now would be based on."""
    retry_at = fleet.record.retry_at
    return Present(
        now_s=fleet.now.timestamp(),
        basis=fleet.basis,
        gco2_per_kwh=None if intensity is None else intensity.point.gco2_per_kwh,
        served=fleet.served,
        min_interval_s=max((app.spec.min_interval_s for app in fleet.planned), default=0.0),
        retry_s=0.0 if retry_at is None else retry_at.timestamp(),
    )


def is_outdated(plan: PlanRecord, progress: Progress, present: Present) -> bool:
    """Whether a plan should open no further GPU: an application came after it, or it waits and another plan is due."""
    if set(present.basis.revisions) - set(plan.basis.revisions):
        return True
    waits = progress.current is None and plan.detail is not None
    newer = trigger_of(plan, present)
    broken = (FleetPlanTrigger.SLA, FleetPlanTrigger.ACCURACY)  # by what runs until this plan is carried out
    return waits and newer is not None and not (newer is plan.trigger and newer in broken)


def why_only_proposes(fleet: FleetState) -> str | None:
    """Return why plans of a fleet are only proposed; None if they are carried out."""
    model = fleet.record.spec.gpu_model
    if not can_be_sliced(model):
        return f"GPUs of model {model} cannot be cut into MIG slices: read sizes as percentages of CUDA MPS."
    is_fixed = any(app.spec.mode is PlanMode.FIXED for app in fleet.apps)
    return "The mode of one of its applications is fixed." if is_fixed else None  # whichever: all its users read this


def rate_per_s(estimate: float, arrivals: Mapping[int, int], now_s: float) -> float:
    """Return the rate of requests to plan for, by how many came in each window of 5 s of the last minute.

    It is the mean since traffic began, or that of the last 20 s where it is higher: too many servers cost energy until
    the next plan, too few break the SLA. The window in which traffic began is left out, as it was not all of it. While
    fewer than 20 requests came, or for less than 20 s, the application's own estimate counts, if it is not exceeded.
    """
    first = min((window for window, count in arrivals.items() if count), default=0)
    last = max(max(arrivals, default=0), int((now_s - REPORTED_WITHIN_S) // REPORT_S) - 1)
    counts = [arrivals.get(window, 0) for window in range(last, max(first, last - WINDOWS), -1)]
    if sum(counts) < LEAST_ARRIVALS:
        return estimate
    mean = max(sum(counts) / len(counts), sum(counts[:LEAST_WINDOWS]) / len(counts[:LEAST_WINDOWS])) / REPORT_S
    return mean if len(counts) >= LEAST_WINDOWS else max(mean, estimate)


def _service(app: AppRecord, seen: Seen) -> Service:
    best = app.spec.most_accurate.accuracy_pct
    loss_pct = app.spec.max_accuracy_loss_pct
    return Service(
        answered=seen.answered,
        p95_ms=percentile_ms(seen.latency, 0.95),
        accuracy_pct=seen.accuracy_sum / seen.answered if seen.answered else None,
        sla_p95_ms=app.spec.sla_p95_ms,
        floor_pct=None if loss_pct is None else best * (1 - loss_pct / 100),
    )
