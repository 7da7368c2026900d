"""The loop that plans fleets and carries their plans out.

Each pass takes the fleets one after the other, under the fleet's row lock: it takes or gives back GPUs, decides whether
to plan, and writes the next step of a plan that is being carried out. Searches run in the optimizer; a plan that is
being solved has its row first, whose id is the solve's idempotency key, so that a process that is started anew waits
for the same solve. Everything else is decided from the database alone: a pass that is killed is repeated.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from services.contracts.apps import FleetPlanState, FleetPlanTrigger
from services.contracts.carbon import CurrentIntensity
from services.contracts.partition import PartitionRequest, PartitionResult
from services.contracts.serving import InstanceState, PlanMode
from services.core.domain.gpus import can_be_sliced
from services.core.solvers.model import SolveStatus
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.serving.controller.backoff import failures
from services.serving.fleets.assignment import (
    WHOLE,
    Assignment,
    Gpu,
    GpuState,
    Kind,
    Placed,
    assign,
    base,
    with_base_of,
)
from services.serving.fleets.intensity import Baselines
from services.serving.fleets.observations import percentile_ms
from services.serving.fleets.problem import (
    PlannedApp,
    SlaModel,
    idle_w_of,
    in_core,
    layouts_for,
    partition_request,
    wanted_of,
)
from services.serving.fleets.search import Answer, Search
from services.serving.fleets.steps import Limits, NextStep, Outcome, Progress, at_rest, carry_out
from services.serving.fleets.triggers import Basis, Present, Service, trigger_of
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.apps import AppRecord, Seen
from services.serving.repository.fleets import FleetRecord, PlanRecord, variant_and_slice
from services.serving.routing import Intensities
from services.serving.settings import ServingSettings

log = Log(__name__)

WINDOW_S = 60.0
"""Requests of this time are looked at, less what is older than the last change of instances."""
LEAST_ARRIVALS = 20
LEAST_SPAN_S = 20.0
"""With fewer, or over less time, the rate is the application's own estimate."""
LONGEST_RETRY_S = 3_600.0
DELETE_EVERY = timedelta(hours=1)


@dataclass(frozen=True)
class _Fleet:
    """All that a pass knows of a fleet, read under its lock."""

    record: FleetRecord
    apps: list[AppRecord]
    gpus: dict[Gpu, GpuState]
    instances: list[Placed]
    seen: Mapping[str, Seen]
    planned: list[PlannedApp]
    served: Mapping[str, Service]
    plan: PlanRecord | None
    now: datetime

    @property
    def up(self) -> list[Gpu]:
        """Its GPUs that are up and cut as they were asked to be."""
        return [gpu for gpu, state in sorted(self.gpus.items()) if state.is_up]

    @property
    def basis(self) -> Basis:
        """What a plan is made from now."""
        return Basis({"": self.record.revision, **{app.name: app.revision for app in self.apps}}, self.up)


class FleetPlanner:
    """Plans fleets, and has their plans carried out."""

    def __init__(
        self,
        repository: ServingRepository,
        intensities: Intensities,
        baselines: Baselines,
        search: Search,
        settings: ServingSettings,
    ) -> None:
        self._repository = repository
        self._intensities = intensities
        self._baselines = baselines
        self._search = search
        self._settings = settings
        self._solving: dict[str, asyncio.Future[Answer]] = {}
        self._delete_at = datetime.min.replace(tzinfo=UTC)

    async def run(self) -> None:
        """Repeat until cancelled; a pass that fails is repeated."""
        try:
            await repeat(self.look, self._settings.instance_look_s, failed="fleets.not_looked")
        finally:
            for search in self._solving.values():
                search.cancel()

    async def look(self) -> None:
        """Bring every fleet a step further."""
        async with self._repository.reading() as queries:
            names = await queries.fleets.names()
            now = await queries.now()
        failed: list[Exception] = []
        for name in names:
            try:
                await self._look_at(name)
            except Exception as error:  # one fleet's trouble stays its own
                log.warning("fleet.not_looked", fleet=name, error=str(error) or type(error).__name__)
                failed.append(error)
        if now >= self._delete_at:
            async with self._repository.writing() as queries:
                await queries.fleets.delete_old_plans(self._settings.keep_days)
                await queries.apps.delete_older(self._settings.traffic_keep_days)
            self._delete_at = now + DELETE_EVERY
        if failed:
            raise failed[0]

    async def _look_at(self, name: str) -> None:
        async with self._repository.reading() as queries:
            spec = (await queries.fleets.find(name)).spec
        key = spec.zone, spec.signal and str(spec.signal)
        intensity = (await self._intensities.of([key])).get(key)
        baseline = await self._baselines.of(spec)
        async with self._repository.writing() as queries:
            record = await queries.fleets.lock(name)
            if record is None:
                return
            fleet = await self._read(queries, record)
            if record.deleted_at is not None:
                await _give_back(queries, fleet)
                return
            if await self._take_gpus(queries, fleet):
                fleet = await self._read(queries, record)
            await self._plan(queries, fleet, intensity, baseline)

    async def _read(self, queries: Queries, record: FleetRecord) -> _Fleet:
        apps = await queries.apps.of_fleet(record.name)
        live = [app for app in apps if app.deleted_at is None]
        plan = await queries.fleets.newest_plan(record.name)
        now = await queries.now()
        since = now - timedelta(seconds=WINDOW_S)
        if plan is not None and plan.ended_at is not None:
            since = max(since, plan.ended_at)
        names = [app.name for app in live]
        recent = await queries.apps.seen(names, now - timedelta(seconds=WINDOW_S))
        settled = await queries.apps.seen(names, since)
        served = {app.name: _service(app, settled[app.name]) for app in live}
        planned: list[PlannedApp] = []
        for app in live:
            failing = [
                at
                for at, each in failures(await queries.instances.lives(app.key, app.updated_at)).items()
                if (now - each.last_at).total_seconds() < LONGEST_RETRY_S
            ]
            planned.append(
                PlannedApp(
                    app.name,
                    app.spec,
                    app.revision,
                    _rate(app, recent[app.name], now),
                    served[app.name].is_late,
                    frozenset(variant_and_slice(at[1]) for at in failing),
                )
            )
        gpus = (await queries.fleets.gpus([record.name])).get(record.name, [])
        return _Fleet(
            record,
            live,
            {each.at: each for each in gpus},
            await queries.fleets.placed([app.name for app in apps]),
            recent,
            planned,
            served,
            plan,
            now,
        )

    async def _take_gpus(self, queries: Queries, fleet: _Fleet) -> bool:
        """Take GPUs that are missing and give back those that are too many; return whether there were any."""
        record, up = fleet.record, fleet.up
        missing = record.spec.gpus - len(up)
        changed = False
        if missing > 0:
            for gpu, sizes in (await queries.fleets.candidates(record.spec))[:missing]:
                if await queries.fleets.want(gpu, sizes, record.name):
                    log.info("fleet.gpu_taken", fleet=record.name, node=gpu[0], gpu=gpu[1])
                    changed = True
        elif missing < 0:
            idle_first = sorted(up, key=lambda gpu: (len(record.assignment.get(gpu, ())), gpu))
            for gpu in idle_first[:-missing]:
                await queries.fleets.release(gpu, record.name)
                log.info("fleet.gpu_given_back", fleet=record.name, node=gpu[0], gpu=gpu[1])
                changed = True
        return changed

    # Plans

    async def _plan(
        self, queries: Queries, fleet: _Fleet, intensity: CurrentIntensity | None, baseline: float | None
    ) -> None:
        plan, record = fleet.plan, fleet.record
        only_proposes = _only_proposes(fleet)
        if only_proposes != record.only_proposes:
            await queries.fleets.change(record.name, only_proposes=only_proposes)
        if plan is not None and plan.state is FleetPlanState.SOLVING:
            answer = self._answer(plan)
            if answer is not None:
                plan = await self._decide(queries, fleet, plan, answer, only_proposes)
        present = _present(fleet, intensity)
        if plan is not None and plan.state is FleetPlanState.CARRYING_OUT and plan.progress is not None:
            await self._carry_out(queries, fleet, plan, plan.progress, _is_outdated(plan, plan.progress, present))
            return
        assignment = _of_apps(record.assignment, fleet)
        newcomers = _newcomers(fleet, assignment) if plan is not None or not _is_settled(fleet) else []
        if newcomers and (free := _free_gpus(fleet, assignment)):
            assignment = with_base_of(newcomers, free, assignment)
            await queries.fleets.set_assignment(record.name, assignment)
            fleet = replace(fleet, record=replace(record, assignment=assignment))
            newcomers = newcomers[len(free) :]
        await _write_targets(queries, fleet, at_rest(assignment, fleet.gpus, fleet.instances))
        if plan is None or plan.state is not FleetPlanState.SOLVING:
            is_base = newcomers and _is_base(fleet, assignment)
            trigger = FleetPlanTrigger.PARAMETER if is_base else trigger_of(plan and plan.as_last(), present)
            if trigger is not None:
                await self._begin(queries, fleet, plan, trigger, present, baseline, only_proposes)

    async def _begin(
        self,
        queries: Queries,
        fleet: _Fleet,
        last: PlanRecord | None,
        trigger: FleetPlanTrigger,
        present: Present,
        baseline: float | None,
        only_proposes: str | None,
    ) -> None:
        """Begin a plan, if the GPUs are ready for one."""
        record = fleet.record
        if not fleet.planned or not _is_settled(fleet):
            return
        gco2 = 0.0 if present.gco2_per_kwh is None else present.gco2_per_kwh
        cannot_cut = not can_be_sliced(record.spec.gpu_model)
        anew = trigger in (FleetPlanTrigger.FIRST, FleetPlanTrigger.PARAMETER, FleetPlanTrigger.GPUS)
        assignment = _of_apps(record.assignment, fleet)
        is_base_asked = trigger is FleetPlanTrigger.FIRST or not any(assignment.values())
        divides_base = bool(_newcomers(fleet, assignment)) and _is_base(fleet, assignment)
        is_base_left = cannot_cut and anew and last is not None and not _is_base_for(record.assignment, fleet)
        if is_base_asked or divides_base or is_base_left:
            await self._begin_base(queries, fleet, trigger, gco2)
            return
        if present.gco2_per_kwh is None or present.gco2_per_kwh <= 0:
            return  # without an intensity there is nothing to weigh accuracy against
        gpus = [fleet.gpus[gpu] for gpu in fleet.up]
        running = Counter(kind for gpu in fleet.up for kind in assignment.get(gpu, ()))
        plan_id = new_id("plan")
        try:
            request = partition_request(
                record.spec, fleet.planned, gpus, running, gco2, baseline, seed=zlib.crc32(plan_id.encode()) >> 1
            )
        except ValidationError as error:
            await self._fail(queries, fleet, None, trigger, gco2, str(error.errors()[0]["msg"]))
            return
        await queries.fleets.supersede_proposals(record.name)
        await queries.fleets.add_plan(
            plan_id, record.name, trigger, fleet.basis, gco2, problem=request.model_dump(mode="json")
        )
        log.info("fleet.planning", fleet=record.name, plan=plan_id, trigger=trigger.value, only=only_proposes)

    async def _begin_base(self, queries: Queries, fleet: _Fleet, trigger: FleetPlanTrigger, gco2: float) -> None:
        """Carry out BASE: the most accurate variants on whole GPUs."""
        record = fleet.record
        idle_w = idle_w_of(record.spec)
        assert idle_w is not None
        loads: dict[tuple[str, str], float] = {}
        for app in fleet.planned:
            application = in_core(app, idle_w)
            best = application.best_variant
            loads[app.name, application.variants[best]] = app.rate_per_s * float(application.service_s[best, -1])
        progress = Progress(
            layouts=dict.fromkeys(fleet.up, ()),
            after=base(fleet.up, loads, _of_apps(record.assignment, fleet)),
            done=frozenset(),
            current=None,
            former=(),
            since_s=fleet.now.timestamp(),
        )
        plan_id = new_id("plan")
        await queries.fleets.supersede_proposals(record.name)
        await queries.fleets.add_plan(plan_id, record.name, trigger, fleet.basis, gco2, progress=progress)
        log.info("fleet.planned", fleet=record.name, plan=plan_id, trigger=trigger.value, scheme="base")

    def _answer(self, plan: PlanRecord) -> Answer | None:
        """Return what the search for a plan found, once it has; begin to wait for it if nobody does."""
        task = self._solving.get(plan.id)
        if task is None:
            assert plan.problem is not None, "only BASE has none, and it is never solved"
            request = PartitionRequest.model_validate(plan.problem)
            self._solving[plan.id] = asyncio.ensure_future(self._search(plan.id, request))
            return None
        if not task.done():
            return None
        del self._solving[plan.id]
        error = task.exception()
        return task.result() if error is None else str(error) or type(error).__name__

    async def _decide(
        self, queries: Queries, fleet: _Fleet, plan: PlanRecord, answer: Answer, only_proposes: str | None
    ) -> PlanRecord:
        """Check what was found, and propose it or begin to carry it out."""
        record, gpus = fleet.record, list(plan.basis.gpus)
        if isinstance(answer, str):
            return await self._fail(queries, fleet, plan, plan.trigger, plan.gco2_per_kwh, answer)
        if answer.status is SolveStatus.INFEASIBLE:
            late = [each.name for each in answer.applications if not each.keeps_limits]
            detail = f"No configuration keeps the limits of {', '.join(late)} with {len(gpus)} GPUs. {answer.note}"
            return await self._fail(queries, fleet, plan, plan.trigger, plan.gco2_per_kwh, detail.strip(), answer)
        result = answer.model_dump(mode="json")
        if {each.name for each in answer.applications} != {app.name for app in fleet.apps} or gpus != fleet.up:
            detail = "The fleet's applications or GPUs changed before the plan was ready."
            await queries.fleets.change_plan(plan.id, FleetPlanState.SUPERSEDED, detail=detail, result=result)
            return replace(plan, state=FleetPlanState.SUPERSEDED)
        if only_proposes is not None:
            await queries.fleets.change_plan(plan.id, FleetPlanState.PROPOSED, detail=only_proposes, result=result)
            await self._forgive(queries, fleet)
            return replace(plan, state=FleetPlanState.PROPOSED)
        progress = self.progress_of(answer, gpus, fleet.gpus, fleet.instances, record.assignment, fleet.now)
        await queries.fleets.change_plan(
            plan.id, FleetPlanState.CARRYING_OUT, result=result, progress=progress.document()
        )
        log.info("fleet.planned", fleet=record.name, plan=plan.id, trigger=plan.trigger.value, recut=len(answer.recut))
        return replace(plan, state=FleetPlanState.CARRYING_OUT, result=result, progress=progress)

    @staticmethod
    def progress_of(
        answer: PartitionResult,
        gpus: Sequence[Gpu],
        states: Mapping[Gpu, GpuState],
        instances: Sequence[Placed],
        assignment: Assignment,
        now: datetime,
    ) -> Progress:
        """Return the beginning of carrying out what was found; GPUs on which little runs are cut first of all."""
        sizes = {gpu: states[gpu].sizes for gpu in gpus}
        layouts = layouts_for(wanted_of(answer), sizes, Counter(each.gpu for each in instances))
        after = assign(layouts, wanted_of(answer), sizes, assignment)
        return Progress(layouts, after, frozenset(), None, (), now.timestamp())

    async def _carry_out(
        self, queries: Queries, fleet: _Fleet, plan: PlanRecord, progress: Progress, is_outdated: bool
    ) -> None:
        record = fleet.record
        idle_w = idle_w_of(record.spec)
        assert idle_w is not None
        ready = Counter(each.kind for each in fleet.instances if each.state is InstanceState.READY)
        progress = replace(progress, after=_of_apps(progress.after, fleet))
        step = carry_out(
            progress,
            {gpu: _of_apps(record.assignment, fleet).get(gpu, ()) for gpu in progress.layouts},
            fleet.gpus,
            fleet.instances,
            SlaModel(fleet.planned, idle_w, ready).broken_by,
            fleet.now.timestamp(),
            self._limits(fleet),
            {name: kind for kind in _best(fleet) for name in kind[:1]},
            is_outdated=is_outdated,
        )
        await _write_targets(queries, fleet, step)
        if step.assignment != record.assignment:
            await queries.fleets.set_assignment(record.name, step.assignment)
        if step.cut is not None:
            gpu, sizes = step.cut
            await queries.fleets.want(gpu, sizes, record.name)
            log.info("fleet.gpu_cut", fleet=record.name, node=gpu[0], gpu=gpu[1], sizes=list(sizes))
        if step.outcome is None:
            assert step.progress is not None
            if step.progress != plan.progress or step.detail != plan.detail:
                await queries.fleets.change_plan(
                    plan.id, FleetPlanState.CARRYING_OUT, progress=step.progress.document(), detail=step.detail
                )
            return
        log.info(f"fleet.plan_{step.outcome.name.lower()}", fleet=record.name, plan=plan.id, detail=step.detail)
        if step.outcome is Outcome.FAILED:
            await self._fail(queries, fleet, plan, plan.trigger, plan.gco2_per_kwh, step.detail or "")
            return
        applied = step.outcome is Outcome.APPLIED
        state = FleetPlanState.APPLIED if applied else FleetPlanState.SUPERSEDED
        await queries.fleets.change_plan(plan.id, state, detail=step.detail)
        if applied:
            await self._forgive(queries, fleet)
        for app in fleet.apps:
            if applied and app.name in plan.basis.revisions:
                revision = plan.basis.revisions[app.name]
                await queries.apps.change(app.name, planned_revision=revision, plan_id=plan.id)

    def _limits(self, fleet: _Fleet) -> Limits:
        probes = [app.spec.probes for app in fleet.apps]
        start_s = max((each.ready_timeout_s + each.drain_timeout_s + each.grace_s for each in probes), default=0.0)
        cut_s = self._settings.fleet_cut_s
        return Limits(cut_s=cut_s, start_s=start_s + cut_s, wait_s=self._settings.fleet_wait_s)

    async def _fail(
        self,
        queries: Queries,
        fleet: _Fleet,
        plan: PlanRecord | None,
        trigger: FleetPlanTrigger,
        gco2: float,
        detail: str,
        result: PartitionResult | None = None,
    ) -> PlanRecord:
        """End a plan that failed; the next is not made before some time has passed, more after each failure."""
        record = fleet.record
        if plan is None:
            plan_id = new_id("plan")
            await queries.fleets.add_plan(plan_id, record.name, trigger, fleet.basis, gco2)
            plan = await queries.fleets.plan(record.name, plan_id)
            assert plan is not None
        more = {} if result is None else {"result": result.model_dump(mode="json")}
        await queries.fleets.change_plan(plan.id, FleetPlanState.FAILED, detail=detail, **more)
        wait_s = min(self._settings.fleet_retry_s * 2.0 ** min(record.failures, 10), LONGEST_RETRY_S)
        await queries.fleets.change(
            record.name, failures=record.failures + 1, retry_at=fleet.now + timedelta(seconds=wait_s)
        )
        log.warning("fleet.plan_failed", fleet=record.name, plan=plan.id, detail=detail, retry_s=wait_s)
        return replace(plan, state=FleetPlanState.FAILED)

    async def _forgive(self, queries: Queries, fleet: _Fleet) -> None:
        if fleet.record.failures:
            await queries.fleets.change(fleet.record.name, failures=0, retry_at=None)


async def begin_proposed(queries: Queries, record: FleetRecord, plan: PlanRecord) -> str | None:
    """Begin to carry a proposal out; return why that is not possible. The fleet's row is locked."""
    if not can_be_sliced(record.spec.gpu_model):
        return f"GPUs of model {record.spec.gpu_model} cannot be cut into MIG slices."
    newest = await queries.fleets.newest_plan(record.name)
    if newest is None or newest.id != plan.id:
        return f"Plan {plan.id} is outdated: plan {newest.id if newest else '-'} is newer."
    states = {state.at: state for state in (await queries.fleets.gpus([record.name])).get(record.name, [])}
    if set(plan.basis.gpus) != {gpu for gpu, state in states.items() if state.is_up}:
        return f"Plan {plan.id} is outdated: the fleet's GPUs have changed."
    answer = PartitionResult.model_validate(plan.result)
    placed = await queries.fleets.placed([app.name for app in await queries.apps.of_fleet(record.name)])
    progress = FleetPlanner.progress_of(
        answer, list(plan.basis.gpus), states, placed, record.assignment, await queries.now()
    )
    await queries.fleets.change_plan(
        plan.id, FleetPlanState.CARRYING_OUT, progress=progress.document(), detail=None, ended_at=None
    )
    return None


async def _give_back(queries: Queries, fleet: _Fleet) -> None:
    """Give back all GPUs of a fleet that is being deleted, and then remove it."""
    for gpu in fleet.gpus:
        await queries.fleets.release(gpu, fleet.record.name)
    if not fleet.instances:
        await queries.fleets.remove(fleet.record.name)
        log.info("fleet.removed", fleet=fleet.record.name)


async def _write_targets(queries: Queries, fleet: _Fleet, step: NextStep) -> None:
    """Write what the controller is to make true for each application."""
    leave = {each.id: each.kind[0] for each in fleet.instances if each.id in step.leave}
    for app in fleet.apps:
        wanted = sorted(
            [variant, size, count] for (name, variant, size), count in step.wanted.items() if name == app.name
        )
        target = {"wanted": wanted, "leave": sorted(each for each, name in leave.items() if name == app.name)}
        if target != app.target:
            await queries.apps.change(app.name, target=target)


def _of_apps(assignment: Assignment, fleet: _Fleet) -> dict[Gpu, tuple[Kind, ...]]:
    """Return an assignment without the instances of applications that are gone."""
    names = {app.name for app in fleet.apps}
    return {gpu: tuple(kind for kind in kinds if kind[0] in names) for gpu, kinds in assignment.items()}


def _is_base_for(assignment: Assignment, fleet: _Fleet) -> bool:
    """Whether the assignment gives every application an instance, and no GPU that is up is left out."""
    apps = {kind[0] for kinds in assignment.values() for kind in kinds}
    return apps == {app.name for app in fleet.apps} and {gpu for gpu, kinds in assignment.items() if kinds} == set(
        fleet.up
    )


def _best(fleet: _Fleet) -> list[Kind]:
    """Return the applications' most accurate variants on whole GPUs."""
    return [(app.name, app.spec.most_accurate.name, WHOLE) for app in fleet.planned]


def _newcomers(fleet: _Fleet, assignment: Assignment) -> list[Kind]:
    """Return BASE of the applications that have no instance."""
    there = {kind[0] for kinds in assignment.values() for kind in kinds}
    return [kind for kind in _best(fleet) if kind[0] not in there]


def _free_gpus(fleet: _Fleet, assignment: Assignment) -> list[Gpu]:
    """Return the whole GPUs on which nothing runs or is to run."""
    used = {each.gpu for each in fleet.instances} | {gpu for gpu, kinds in assignment.items() if kinds}
    return [gpu for gpu in fleet.up if gpu not in used and _is_whole(fleet.gpus[gpu])]


def _is_settled(fleet: _Fleet) -> bool:
    """Whether there are GPUs, and all that are up are cut as was asked, or could not be."""
    return bool(fleet.up) and all(fleet.gpus[gpu].state in ("applied", "failed") for gpu in fleet.up)


def _is_whole(state: GpuState) -> bool:
    return state.sizes == state.wanted == () and state.state == "applied"


def _is_base(fleet: _Fleet, assignment: Assignment) -> bool:
    """Whether BASE runs, and there are GPUs for all applications, so that they may be divided anew at once."""
    best = set(_best(fleet))
    return (
        len(fleet.up) >= len(fleet.planned)
        and all(_is_whole(fleet.gpus[gpu]) for gpu in fleet.up)
        and all(kind in best for kinds in assignment.values() for kind in kinds)
    )


def _present(fleet: _Fleet, intensity: CurrentIntensity | None) -> Present:
    retry_at = fleet.record.retry_at
    return Present(
        now_s=fleet.now.timestamp(),
        basis=fleet.basis,
        gco2_per_kwh=None if intensity is None else intensity.point.gco2_per_kwh,
        served=fleet.served,
        min_interval_s=max((app.spec.min_interval_s for app in fleet.planned), default=0.0),
        retry_s=0.0 if retry_at is None else retry_at.timestamp(),
    )


def _is_outdated(plan: PlanRecord, progress: Progress, present: Present) -> bool:
    """Whether a plan is to open no further GPU: an application came after it, or it waits and another is due."""
    if set(present.basis.revisions) - set(plan.basis.revisions):
        return True
    waits = progress.current is None and plan.detail is not None
    newer = trigger_of(plan.as_last(), present)
    broken = (FleetPlanTrigger.SLA, FleetPlanTrigger.ACCURACY)  # by what runs until this plan is carried out
    return waits and newer is not None and not (newer is plan.trigger and newer in broken)


def _only_proposes(fleet: _Fleet) -> str | None:
    model = fleet.record.spec.gpu_model
    if not can_be_sliced(model):
        return f"GPUs of model {model} cannot be cut into MIG slices: read sizes as percentages of CUDA MPS."
    fixed = [app.name for app in fleet.apps if app.spec.mode is PlanMode.FIXED]
    return f"The mode of application {fixed[0]} is fixed." if fixed else None


def _rate(app: AppRecord, seen: Seen, now: datetime) -> float:
    """Return the mean arrivals that were seen in the window; traffic may just have begun."""
    if seen.arrivals < LEAST_ARRIVALS or seen.span_s < LEAST_SPAN_S:
        return app.spec.requests_per_s
    return seen.rate_per_s(now)


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
