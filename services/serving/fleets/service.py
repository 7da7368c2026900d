"""Use cases on fleets and applications: create, change, read and delete them.

A *revision* counts the changes of a spec. A fleet is planned anew when its own revision or one of its applications'
differs from the one that its newest plan was made for.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter

from services.contracts import apps
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.partition import MAX_APPLICATIONS, ApplicationPlan, PartitionResult, VariantInstances
from services.contracts.problems import FieldError
from services.contracts.queries import PageQuery
from services.contracts.routing import EVERY_TENANT
from services.contracts.serving import InstanceQuery, InstanceState
from services.kit.problems import ProblemError, conflict, invalid, not_found
from services.kit.readable import readable
from services.kit.routes import one_page, read_cursor
from services.kit.starts import check_start
from services.serving.carbon import CarbonZones
from services.serving.fleets.assignment import GpuState, ordered, sizes_of
from services.serving.fleets.observations import percentile_ms, report_of
from services.serving.fleets.planner import begin_proposed
from services.serving.fleets.problem import idle_w_of, slice_name
from services.serving.fleets.state import WINDOW_S
from services.serving.named import ANY_ID, Named
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.apps import AppRecord, Seen
from services.serving.repository.fleets import FleetRecord, PlanRecord, variant_and_slice
from services.serving.repository.instances import by_state
from services.serving.repository.specs import SpecRows
from services.serving.settings import ServingSettings

MAX_STEPS = 20_000


class Fleets(Named[FleetRecord, apps.Fleet]):
    """What operators may do with fleets; users see those that their applications may use."""

    kind, when_deleted = "Fleet", "its GPUs are freed"

    def __init__(self, repository: ServingRepository, zones: CarbonZones) -> None:
        super().__init__(repository)
        self._zones = zones

    def _rows(self, queries: Queries) -> SpecRows[FleetRecord]:
        return queries.fleets

    async def put(self, name: str, spec: apps.FleetSpec, caller: Identity) -> tuple[apps.Fleet, bool]:
        """Create a fleet or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Raises:
            ProblemError: 422 for an unknown zone or signal, or if neither the spec nor the catalogue states the power
                of an idle GPU; 409 for a fleet that is being deleted.
        """
        if idle_w_of(spec) is None:
            detail = f"GPU model {spec.gpu_model} is not in the catalogue: give idle_w, the power of an idle GPU."
            raise invalid("/idle_w", detail)
        await self._zones.check({"": (spec.zone, spec.signal)})
        async with self._repository.writing() as queries:
            return await self._set(queries, name, spec, caller)

    async def _before_deletion(self, queries: Queries, record: FleetRecord) -> None:
        if users := await queries.apps.of_fleet(record.name):
            names = ", ".join(app.name for app in users)
            raise conflict(f"Applications use fleet {record.name}; delete them first: {names}.")

    async def plans(self, name: str, query: PageQuery, caller: Identity) -> apps.FleetPlanList:
        """Return a page of a fleet's plans, newest first; ``ProblemError``: 404, or 422 for the cursor."""
        async with self._repository.reading() as queries:
            await queries.fleets.find(name, caller)
            found = await queries.fleets.plans(name, read_cursor(query.cursor, ANY_ID), query.limit + 1)
            own = (await queries.fleets.apps_of([name], caller))[name]
        records, cursor = one_page(found, query.limit, lambda plan: plan.id)
        own = None if caller.is_operator else own
        items = readable(records, lambda plan: show_plan(plan, own), "plan", attrgetter("id"))
        return apps.FleetPlanList(items=items, next_cursor=cursor)

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

    async def _show(self, queries: Queries, records: Sequence[FleetRecord], caller: Identity) -> list[apps.Fleet]:
        """Return fleets as a caller sees them: users without what is other tenants', applications, jobs and names."""
        names = [record.name for record in records]
        gpus, users = await queries.fleets.gpus(names), await queries.fleets.apps_of(names, caller)
        shown: list[apps.Fleet] = []
        for record in records:
            plan = await queries.fleets.newest_plan(record.name)
            states = gpus.get(record.name, [])
            tenants = [each for each in record.spec.tenants if each in (EVERY_TENANT, caller.tenant_id)]
            shown.append(
                apps.Fleet.of(
                    record,
                    spec=record.spec if caller.is_operator else record.spec.model_copy(update={"tenants": tenants}),
                    is_deleted=record.deleted_at is not None,
                    apps=[*users[record.name]],
                    gpus=[_show_gpu(state, names_jobs=caller.is_operator) for state in states],
                    missing_gpus=max(record.spec.gpus - sum(state.is_usable for state in states), 0),
                    detail=_why_it_waits(states) if users[record.name] else None,
                    plan=plan and show_plan(plan, None if caller.is_operator else users[record.name]),
                )
            )
        return shown


class Apps(Named[AppRecord, apps.App]):
    """What callers may do with applications. Users see their tenant's, operators all."""

    kind = "Application"

    def __init__(self, repository: ServingRepository, settings: ServingSettings) -> None:
        super().__init__(repository)
        self._kept = timedelta(days=min(settings.traffic_keep_days, settings.keep_days))

    def _rows(self, queries: Queries) -> SpecRows[AppRecord]:
        return queries.apps

    async def put(self, name: str, spec: apps.AppSpec, caller: Identity) -> tuple[apps.App, bool]:
        """Create an application or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Raises:
            ProblemError: 422 for an unknown fleet or a command that is too large; 409 for an application that is being
                deleted or would change its fleet, or if the fleet has no GPU left for one more; 404 for another
                tenant's.
        """
        check_start({f"/variants/{at}": variant for at, variant in enumerate(spec.variants)})
        async with self._repository.writing() as queries:
            # The fleet's lock keeps two applications from taking its last GPU, and it from being deleted meanwhile.
            await self._check_fleet(queries, name, spec, caller)
            return await self._set(queries, name, spec, caller, fleet=spec.fleet)

    async def _replace(self, queries: Queries, record: AppRecord, spec: apps.AppSpec, caller: Identity) -> None:
        if record.fleet != spec.fleet:
            stays = f"Application {record.name} is on fleet {record.fleet}"
            detail = f"{stays}; delete it before it moves to {spec.fleet}."
            raise conflict(detail, errors=[FieldError(pointer="/fleet", detail=detail)])
        await super()._replace(queries, record, spec, caller)

    async def instances(self, name: str, query: InstanceQuery, caller: Identity) -> apps.AppInstanceList:
        """Return a page of an application's instances, newest first; ``ProblemError`` as of a fleet's ``plans``."""
        before = read_cursor(query.cursor, ANY_ID)
        async with self._repository.reading() as queries:
            app = await queries.apps.find(name, caller)
            found = await queries.apps.instances(app, states=query.state, before=before, limit=query.limit + 1)
        items, cursor = one_page(found, query.limit, lambda instance: instance.id)
        return apps.AppInstanceList(items=items, next_cursor=cursor)

    async def report(self, name: str, query: apps.AppReportQuery, caller: Identity) -> apps.AppReport:
        """Return what an application did in the last hours, compared with BASE, as far as that is kept.

        Where its requests are forgotten already, those that are known would be charged with what all of them used.

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
            start_at = max(end_at - min(timedelta(hours=query.hours), self._kept), app.created_at)
            seen = await queries.apps.steps(app, start_at, end_at, query.step_s)
            evaluations = await queries.fleets.evaluations(app.fleet, start_at, end_at)
        return report_of(app, fleet, start_at, end_at, query.step_s, seen, evaluations)

    async def _show(self, queries: Queries, records: Sequence[AppRecord], caller: Identity) -> list[apps.App]:
        names = [record.name for record in records]
        now = await queries.now()
        since = now - timedelta(seconds=WINDOW_S)
        seen = await queries.apps.seen(names, since)
        counts = await queries.instances.counts([record.key for record in records])
        users = await queries.fleets.apps_of({record.fleet for record in records}, caller)
        shown: list[apps.App] = []
        for record in records:
            fleet = await queries.fleets.find(record.fleet)
            plan = await queries.fleets.newest_plan(record.fleet)
            ready: list[VariantInstances] = []
            for (state, mode), count in sorted(counts[record.key].items()):
                if state is InstanceState.READY:
                    variant, size = variant_and_slice(mode)
                    ready.append(VariantInstances(variant=variant, slice=slice_name(size), count=count))
            shown.append(
                apps.App.of(
                    record,
                    is_deleted=record.deleted_at is not None,
                    only_proposes=fleet.only_proposes,
                    plan=plan and show_plan(plan, {record.name: record.created_at}, users[record.fleet]),
                    running=ready,
                    instances=by_state(counts[record.key]),
                    traffic=_traffic(seen[record.name], now),
                )
            )
        return shown

    async def _check_fleet(self, queries: Queries, name: str, spec: apps.AppSpec, caller: Identity) -> None:
        detail = f"There is no fleet {spec.fleet} that the application may use; operators create one."
        fleet = await queries.fleets.known(spec.fleet, caller, "update")
        if fleet is None or fleet.deleted_at is not None:
            raise invalid("/fleet", detail)
        others = {app.name for app in await queries.apps.of_fleet(fleet.name)} - {name}
        if len(others) >= min(fleet.spec.gpus, MAX_APPLICATIONS):
            most = "8 applications" if fleet.spec.gpus >= MAX_APPLICATIONS else f"{fleet.spec.gpus} GPUs"
            detail = f"Fleet {fleet.name} has {most}, and {len(others)} applications use it: none is left for {name}."
            raise conflict(detail, errors=[FieldError(pointer="/fleet", detail=detail)])


def show_plan(
    plan: PlanRecord, own: Mapping[str, datetime] | None = None, may_read: Collection[str] | None = None
) -> apps.FleetPlan:
    """Return a plan as callers see it, with all applications or with those that are ``own``, by when they were made.

    Its sentences name no others, except for those that callers ``may_read`` of.
    """
    may_read = own if may_read is None else may_read
    hidden = set[str]() if may_read is None else {*plan.basis.revisions} - {"", *may_read}

    def is_shown(app: ApplicationPlan | apps.AppEvaluation) -> bool:
        return own is None or (app.name in own and own[app.name] <= plan.made_at)  # before, it was another of that name

    def shown(evaluation: apps.FleetEvaluation) -> apps.FleetEvaluation:
        seen = [*filter(is_shown, evaluation.applications)]
        return evaluation.model_copy(update={"applications": seen, "detail": said(evaluation.detail)})

    def said(detail: str | None) -> str | None:
        for name in sorted(hidden, key=len, reverse=True) if detail else ():
            detail = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "(another tenant's)", detail or "")
        return detail

    result = None if plan.result is None else PartitionResult.as_stored(plan.result)
    is_open = plan.state is apps.FleetPlanState.CARRYING_OUT
    current, search = plan.progress.current if plan.progress and is_open else None, plan.search
    return apps.FleetPlan.of(
        plan,
        detail=said(plan.detail),
        gpu=f"{current[0]}:{current[1]}" if current else None,
        layouts=_layouts(plan, result),
        recut=len(result.recut) if result else 0,
        applications=[*filter(is_shown, result.applications)] if result else [],
        search=search
        and search.model_copy(
            update={
                "evaluations": [*map(shown, search.evaluations)],
                "present": shown(search.present),
                "detail": said(search.detail),
            }
        ),
    )


def _layouts(plan: PlanRecord, result: PartitionResult | None) -> list[list[int]]:
    """Return how a plan cuts its GPUs: as it is being carried out, or else as it was found."""
    if plan.progress is not None:
        return [list(sizes) for _, sizes in sorted(plan.progress.layouts.items())]
    return [list(sizes_of(layout)) for layout in result.layouts] if result else []


def _why_it_waits(states: list[GpuState]) -> str | None:
    """Return why a fleet's applications cannot run at all; None if they can."""
    if any(state.is_usable for state in states):
        return None
    if any(state.is_up for state in states):
        return "Jobs still run on all of its GPUs; applications start by themselves once one of these is free."
    return "It has no GPU; applications start by themselves once there is one."


def _show_gpu(state: GpuState, *, names_jobs: bool) -> apps.FleetGpu:
    node_id, gpu = state.at
    job = state.used_by if names_jobs else "A job"
    detail = f"{job} runs on it until it ends" if state.used_by else state.detail or None
    sizes = list(ordered(size for size in state.sizes if size))
    return apps.FleetGpu.of(state, node_id=node_id, gpu=gpu, sizes=sizes, wanted=list(state.wanted), detail=detail)


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
