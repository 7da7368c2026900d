"""Use cases on fleets and applications: create, change, read and delete them.

A *revision* counts the changes of a spec. A fleet is planned anew when its own revision or one of its applications'
differs from the one that its newest plan was made for.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from services.contracts import apps
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.invalid import NAME_PATTERN
from services.contracts.partition import MAX_APPLICATIONS, ApplicationPlan, PartitionResult, VariantInstances
from services.contracts.problems import FieldError
from services.contracts.queries import PageQuery
from services.contracts.serving import InstanceQuery, InstanceState
from services.kit.problems import ProblemError, conflict, invalid, not_found
from services.kit.routes import one_page, read_cursor
from services.serving.carbon import CarbonZones
from services.serving.fleets.assignment import GpuState, ordered, sizes_of
from services.serving.fleets.observations import percentile_ms, report_of
from services.serving.fleets.planner import begin_proposed
from services.serving.fleets.problem import idle_w_of, slice_name
from services.serving.fleets.state import WINDOW_S
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.apps import AppRecord, Seen
from services.serving.repository.fleets import FleetRecord, PlanRecord, variant_and_slice

INSTANCE_ID = r"[a-z]+_[0-9a-z]{26}"


class Fleets:
    """What operators may do with fleets; users see those that their applications may use."""

    def __init__(self, repository: ServingRepository, zones: CarbonZones) -> None:
        self._repository, self._zones = repository, zones

    async def put(self, name: str, spec: apps.FleetSpec, caller: Identity) -> tuple[apps.Fleet, bool]:
        """Create a fleet or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Raises:
            ProblemError: 422 for an unknown zone or signal, or if neither the spec nor the catalogue states the power
                of an idle GPU; 409 for a fleet that is being deleted.
        """
        await self._check(spec)
        async with self._repository.writing() as queries:
            is_new = await queries.fleets.add(name, spec, caller)
            if is_new:
                await queries.audit(caller, "fleet.created", name)
            else:
                fleet = await queries.fleets.find(name, lock="update")
                if fleet.deleted_at is not None:
                    raise conflict(f"Fleet {name} is being deleted; its GPUs are freed.")
                if fleet.spec != spec:
                    await queries.fleets.set_spec(name, spec, revision=fleet.revision + 1)
                    await queries.audit(caller, "fleet.changed", name, revision=fleet.revision + 1)
            (shown,) = await show_fleets(queries, [await queries.fleets.find(name)], caller)
            return shown, is_new

    async def find(self, name: str, caller: Identity) -> apps.Fleet:
        """Return a fleet with its current state; ``ProblemError``: 404 if there is none that the caller may see."""
        async with self._repository.reading() as queries:
            fleet = await queries.fleets.find(name)
            if not may_use(fleet, caller):
                raise not_found("fleet")
            (shown,) = await show_fleets(queries, [fleet], caller)
            return shown

    async def page(self, query: PageQuery, caller: Identity) -> apps.FleetList:
        """Return one page of fleets, by name; ``ProblemError``: 422 for an invalid cursor."""
        async with self._repository.reading() as queries:
            found = await queries.fleets.page(read_cursor(query.cursor, NAME_PATTERN), query.limit + 1)
            records, cursor = one_page(found, query.limit, lambda fleet: fleet.name)
            items = await show_fleets(queries, [each for each in records if may_use(each, caller)], caller)
        return apps.FleetList(items=items, next_cursor=cursor)

    async def delete(self, name: str, caller: Identity) -> apps.Fleet:
        """Give back a fleet's GPUs, whole, and then remove it; deleting it again changes nothing.

        Raises:
            ProblemError: 404 if there is no such fleet, 409 while applications use it.
        """
        async with self._repository.writing() as queries:
            fleet = await queries.fleets.find(name, lock="update")
            users = await queries.apps.of_fleet(name)
            if users:
                names = ", ".join(app.name for app in users)
                raise conflict(f"Applications use fleet {name}; delete them first: {names}.")
            if fleet.deleted_at is None:
                await queries.fleets.mark_deleted(name)
                await queries.audit(caller, "fleet.deleted", name)
            (shown,) = await show_fleets(queries, [await queries.fleets.find(name)], caller)
            return shown

    async def plans(self, name: str, query: PageQuery, caller: Identity) -> apps.FleetPlanList:
        """Return one page of a fleet's plans, newest first.

        Raises:
            ProblemError: 404 if there is no fleet that the caller may see, 422 for an invalid cursor.
        """
        async with self._repository.reading() as queries:
            if not may_use(await queries.fleets.find(name), caller):
                raise not_found("fleet")
            found = await queries.fleets.plans(name, read_cursor(query.cursor, INSTANCE_ID), query.limit + 1)
            own = (await queries.fleets.apps_of([name], caller))[name]
        records, cursor = one_page(found, query.limit, lambda plan: plan.id)
        own = None if caller.is_operator else own
        return apps.FleetPlanList(items=[show_plan(each, own) for each in records], next_cursor=cursor)

    async def apply(self, name: str, plan_id: str, caller: Identity) -> apps.FleetPlan:
        """Carry out a proposal; repeating this changes nothing.

        Raises:
            ProblemError: 404 if there is no such plan, 409 if it is not a proposal, is outdated, or cannot be carried
                out because the GPUs cannot be cut.
        """
        async with self._repository.writing() as queries:
            fleet = await queries.fleets.find(name, lock="update")
            plan = await queries.fleets.plan(name, plan_id)
            if plan is None:
                raise not_found("plan")
            if plan.state in (apps.FleetPlanState.CARRYING_OUT, apps.FleetPlanState.APPLIED):
                return show_plan(plan)
            if plan.state is not apps.FleetPlanState.PROPOSED or plan.result is None:
                detail = f"Plan {plan_id} is {plan.state}, not proposed."
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, detail)
            refused = await begin_proposed(queries, fleet, plan)
            if refused is not None:
                raise conflict(refused)
            await queries.audit(caller, "fleet.plan_applied", name, plan=plan_id)
            found = await queries.fleets.plan(name, plan_id)
            assert found is not None
            return show_plan(found)

    async def _check(self, spec: apps.FleetSpec) -> None:
        if idle_w_of(spec) is None:
            detail = f"GPU model {spec.gpu_model} is not in the catalogue: give idle_w, the power of an idle GPU."
            raise invalid("/idle_w", detail)
        await self._zones.check({"": (spec.zone, spec.signal)})


class Apps:
    """What callers may do with applications. Users see their tenant's, operators all."""

    def __init__(self, repository: ServingRepository) -> None:
        self._repository = repository

    async def put(self, name: str, spec: apps.AppSpec, caller: Identity) -> tuple[apps.App, bool]:
        """Create an application or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Raises:
            ProblemError: 422 for an unknown fleet; 409 for an application that is being deleted or would change its
                fleet, or if the fleet has no GPU left for one more; 404 for another tenant's.
        """
        async with self._repository.writing() as queries:
            # The fleet's lock keeps two applications from taking its last GPU, and it from being deleted meanwhile.
            await self._check_fleet(queries, name, spec, caller)
            is_new = await queries.apps.add(name, spec, caller, fleet=spec.fleet)
            if is_new:
                await queries.audit(caller, "app.created", name)
            else:
                app = await queries.apps.find(name, caller, "update")
                if app.deleted_at is not None:
                    raise conflict(f"Application {name} is being deleted.")
                if app.fleet != spec.fleet:
                    detail = f"Application {name} is on fleet {app.fleet}; delete it before it moves to {spec.fleet}."
                    raise conflict(detail, errors=[FieldError(pointer="/fleet", detail=detail)])
                if app.spec != spec:
                    await queries.apps.set_spec(name, spec, revision=app.revision + 1)
                    await queries.audit(caller, "app.changed", name, revision=app.revision + 1)
            (shown,) = await _show_apps(queries, [await queries.apps.find(name, caller)])
            return shown, is_new

    async def find(self, name: str, caller: Identity) -> apps.App:
        """Return an application with its current state.

        Raises:
            ProblemError: 404 if there is none that the caller may see.
        """
        async with self._repository.reading() as queries:
            (shown,) = await _show_apps(queries, [await queries.apps.find(name, caller)])
            return shown

    async def page(self, query: PageQuery, caller: Identity) -> apps.AppList:
        """Return one page of applications, by name; ``ProblemError``: 422 for an invalid cursor."""
        async with self._repository.reading() as queries:
            found = await queries.apps.page(read_cursor(query.cursor, NAME_PATTERN), query.limit + 1, caller)
            records, cursor = one_page(found, query.limit, lambda app: app.name)
            return apps.AppList(items=await _show_apps(queries, records), next_cursor=cursor)

    async def delete(self, name: str, caller: Identity) -> apps.App:
        """Drain an application's instances, and then remove it; deleting it again changes nothing.

        Raises:
            ProblemError: 404 if there is none that the caller may see.
        """
        async with self._repository.writing() as queries:
            app = await queries.apps.find(name, caller, "update")
            if app.deleted_at is None:
                await queries.apps.mark_deleted(name)
                await queries.audit(caller, "app.deleted", name)
            (shown,) = await _show_apps(queries, [await queries.apps.find(name, caller)])
            return shown

    async def instances(self, name: str, query: InstanceQuery, caller: Identity) -> apps.AppInstanceList:
        """Return one page of an application's instances, newest first.

        Raises:
            ProblemError: 404 if there is none that the caller may see, 422 for an invalid cursor.
        """
        before = read_cursor(query.cursor, INSTANCE_ID)
        async with self._repository.reading() as queries:
            app = await queries.apps.find(name, caller)
            found = await queries.apps.instances(app, states=query.state, before=before, limit=query.limit + 1)
        items, cursor = one_page(found, query.limit, lambda instance: instance.id)
        return apps.AppInstanceList(items=items, next_cursor=cursor)

    async def report(self, name: str, query: apps.AppReportQuery, caller: Identity) -> apps.AppReport:
        """Return what an application did in the last hours, compared with BASE.

        Raises:
            ProblemError: 404 if there is none that the caller may see, 422 for too many steps.
        """
        if 3_600 * query.hours / query.step_s > MAX_STEPS:
            detail = f"{query.hours:g} hours have more than {MAX_STEPS} steps of {query.step_s:g} s."
            raise invalid("?step_s", detail)
        async with self._repository.reading() as queries:
            app = await queries.apps.find(name, caller)
            fleet = await queries.fleets.find(app.fleet)
            end_at = await queries.now()
            start_at = max(end_at - timedelta(hours=query.hours), app.created_at)
            seen = await queries.apps.steps(app, start_at, end_at, query.step_s)
            evaluations = await queries.fleets.evaluations(app.fleet, start_at, end_at)
        return report_of(app, fleet, start_at, end_at, query.step_s, seen, evaluations)

    async def _check_fleet(self, queries: Queries, name: str, spec: apps.AppSpec, caller: Identity) -> None:
        detail = f"There is no fleet {spec.fleet} that the application may use; operators create one."
        try:
            fleet = await queries.fleets.find(spec.fleet, lock="update")
        except ProblemError as error:
            raise invalid("/fleet", detail) from error
        if not may_use(fleet, caller) or fleet.deleted_at is not None:
            raise invalid("/fleet", detail)
        others = {app.name for app in await queries.apps.of_fleet(fleet.name)} - {name}
        if len(others) >= min(fleet.spec.gpus, MAX_APPLICATIONS):
            most = "8 applications" if fleet.spec.gpus >= MAX_APPLICATIONS else f"{fleet.spec.gpus} GPUs"
            detail = f"Fleet {fleet.name} has {most}, and {len(others)} applications use it: none is left for {name}."
            raise conflict(detail, errors=[FieldError(pointer="/fleet", detail=detail)])


MAX_STEPS = 20_000


def may_use(fleet: FleetRecord, caller: Identity) -> bool:
    """Return whether a caller's applications may use a fleet."""
    return caller.is_operator or bool({"*", caller.tenant_id} & set(fleet.spec.tenants))


def show_plan(plan: PlanRecord, own: Mapping[str, datetime] | None = None) -> apps.FleetPlan:
    """Return a plan as callers see it, with all applications or with those that are ``own``, by when they were made."""

    def is_shown(app: ApplicationPlan | apps.AppEvaluation) -> bool:
        return own is None or (app.name in own and own[app.name] <= plan.made_at)  # before, it was another of that name

    def shown(evaluation: apps.FleetEvaluation) -> apps.FleetEvaluation:
        return evaluation.model_copy(update={"applications": [*filter(is_shown, evaluation.applications)]})

    result = None if plan.result is None else PartitionResult.as_stored(plan.result)
    is_open = plan.state is apps.FleetPlanState.CARRYING_OUT
    current, search = plan.progress.current if plan.progress and is_open else None, plan.search
    return apps.FleetPlan.of(
        plan,
        gpu=f"{current[0]}:{current[1]}" if current else None,
        layouts=_layouts(plan, result),
        recut=len(result.recut) if result else 0,
        applications=[*filter(is_shown, result.applications)] if result else [],
        search=search
        and search.model_copy(
            update={"evaluations": [*map(shown, search.evaluations)], "present": shown(search.present)}
        ),
    )


def _layouts(plan: PlanRecord, result: PartitionResult | None) -> list[list[int]]:
    """Return how a plan cuts its GPUs: as it is being carried out, or else as it was found."""
    if plan.progress is not None:
        return [list(sizes) for _, sizes in sorted(plan.progress.layouts.items())]
    return [list(sizes_of(layout)) for layout in result.layouts] if result else []


async def show_fleets(queries: Queries, records: list[FleetRecord], caller: Identity) -> list[apps.Fleet]:
    """Return fleets as a caller sees them: users with the applications of their own tenant alone."""
    names = [record.name for record in records]
    gpus, users = await queries.fleets.gpus(names), await queries.fleets.apps_of(names, caller)
    shown: list[apps.Fleet] = []
    for record in records:
        plan = await queries.fleets.newest_plan(record.name)
        states = gpus.get(record.name, [])
        shown.append(
            apps.Fleet.of(
                record,
                is_deleted=record.deleted_at is not None,
                apps=[*users[record.name]],
                gpus=[_show_gpu(state) for state in states],
                missing_gpus=max(record.spec.gpus - sum(state.is_usable for state in states), 0),
                detail=_why_it_waits(states) if users[record.name] else None,
                plan=plan and show_plan(plan, None if caller.is_operator else users[record.name]),
            )
        )
    return shown


def _why_it_waits(states: list[GpuState]) -> str | None:
    """Return why a fleet's applications cannot run at all; None if they can."""
    if any(state.is_usable for state in states):
        return None
    if any(state.is_up for state in states):
        return "Jobs still run on all of its GPUs; applications start by themselves once one of these is free."
    return "It has no GPU; applications start by themselves once there is one."


def _show_gpu(state: GpuState) -> apps.FleetGpu:
    node_id, gpu = state.at
    detail = f"{state.used_by} runs on it until it ends" if state.used_by else state.detail or None
    sizes = list(ordered(size for size in state.sizes if size))
    return apps.FleetGpu.of(state, node_id=node_id, gpu=gpu, sizes=sizes, wanted=list(state.wanted), detail=detail)


async def _show_apps(queries: Queries, records: list[AppRecord]) -> list[apps.App]:
    names = [record.name for record in records]
    now = await queries.now()
    since = now - timedelta(seconds=WINDOW_S)
    seen, counts = await queries.apps.seen(names, since), await queries.apps.counts(names)
    shown: list[apps.App] = []
    for record in records:
        fleet = await queries.fleets.find(record.fleet)
        plan = await queries.fleets.newest_plan(record.fleet)
        states: dict[InstanceState, int] = {}
        ready: list[VariantInstances] = []
        for (state, mode), count in sorted(counts[record.name].items()):
            states[state] = states.get(state, 0) + count
            if state is InstanceState.READY:
                variant, size = variant_and_slice(mode)
                ready.append(VariantInstances(variant=variant, slice=slice_name(size), count=count))
        shown.append(
            apps.App.of(
                record,
                is_deleted=record.deleted_at is not None,
                only_proposes=fleet.only_proposes,
                plan=plan and show_plan(plan, {record.name: record.created_at}),
                running=ready,
                instances=states,
                traffic=_traffic(seen[record.name], now),
            )
        )
    return shown


def _traffic(seen: Seen, now: datetime) -> apps.AppTraffic:
    return apps.AppTraffic(
        window_s=WINDOW_S,
        requests_per_s=seen.rate_per_s(now),
        answered=seen.answered,
        failed=seen.failed,
        p50_ms=percentile_ms(seen.latency, 0.5),
        p95_ms=percentile_ms(seen.latency, 0.95),
        accuracy_pct=seen.accuracy_sum / seen.answered if seen.answered else None,
    )
