"""Carries out the plans of fleets: writes what ``steps`` decides, and how plans end."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta

from services.contracts.apps import FleetPlanState, FleetPlanTrigger
from services.contracts.partition import PartitionResult
from services.contracts.serving import InstanceState
from services.kit.ids import new_id
from services.kit.logging import Log
from services.serving.fleets.assignment import Kind, assign
from services.serving.fleets.problem import SlaModel, idle_w_of, layouts_for
from services.serving.fleets.state import LONGEST_RETRY_S, FleetState, best_kinds, of_apps
from services.serving.fleets.steps import Limits, NextStep, Progress, carry_out
from services.serving.repository.fleets import PlanRecord
from services.serving.settings import ServingSettings

log = Log(__name__)


def progress_of(wanted: Counter[Kind], plan: PlanRecord, fleet: FleetState) -> Progress:
    """Return how to bring up instances, first on GPUs where little runs; ``DomainError`` if they have no room."""
    sizes = {gpu: fleet.gpus[gpu].sizes for gpu in plan.basis.gpus}
    layouts = layouts_for(wanted, sizes, Counter(each.gpu for each in fleet.instances))
    after = assign(layouts, wanted, sizes, fleet.record.assignment)
    return Progress(layouts, after, fleet.now.timestamp())


async def write_targets(fleet: FleetState, step: NextStep) -> None:
    """Write each application's target for the controller."""
    leave = {each.id: each.kind[0] for each in fleet.instances if each.id in step.leave}
    for app in fleet.apps:
        wanted = sorted(
            [variant, size, count] for (name, variant, size), count in step.wanted.items() if name == app.name
        )
        target = {"wanted": wanted, "leave": sorted(each for each, name in leave.items() if name == app.name)}
        if target != app.target:
            await fleet.queries.apps.change(app.name, target=target)


class Carrier:
    """Carries out plans, one step at each call, and ends them."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings

    async def step(self, fleet: FleetState, plan: PlanRecord, progress: Progress, *, is_stale: bool) -> NextStep:
        """Write and return the next step of a plan; one with an outcome is the last, and the caller ends the plan."""
        record = fleet.record
        idle_w = idle_w_of(record.spec)
        assert idle_w is not None
        ready = Counter(each.kind for each in fleet.instances if each.state is InstanceState.READY)
        progress = replace(progress, after=of_apps(progress.after, fleet))
        sla = SlaModel(fleet.planned, idle_w, ready)
        step = carry_out(
            progress,
            {gpu: of_apps(record.assignment, fleet).get(gpu, ()) for gpu in progress.layouts},
            fleet.gpus,
            fleet.instances,
            sla.broken_by,
            fleet.now.timestamp(),
            self.limits(fleet),
            {name: kind for kind in best_kinds(fleet) for name in kind[:1]},
            late=sla.late,
            failing=fleet.failing,
            is_outdated=is_stale,
        )
        await write_targets(fleet, step)
        if step.assignment != record.assignment:
            await fleet.rows.set_assignment(record.name, step.assignment)
        if step.cut is not None:
            gpu, sizes = step.cut
            await fleet.rows.want(gpu, sizes, record.name)
            log.info("fleet.gpu_cut", fleet=record.name, node=gpu[0], gpu=gpu[1], sizes=list(sizes))
        if step.outcome is None:
            assert step.progress is not None
            if step.progress != plan.progress or step.detail != plan.detail:
                await fleet.rows.change_plan(
                    plan, FleetPlanState.CARRYING_OUT, progress=step.progress, detail=step.detail
                )
        else:
            log.info(f"fleet.plan_{step.outcome}", fleet=record.name, plan=plan.id, detail=step.detail)
        return step

    def limits(self, fleet: FleetState) -> Limits:
        """Return how long the stages of a fleet's plans may take."""
        probes = [app.spec.probes for app in fleet.apps]
        start_s = max((each.ready_timeout_s + each.drain_timeout_s + each.grace_s for each in probes), default=0.0)
        cut_s = self._settings.fleet_cut_s
        return Limits(cut_s=cut_s, start_s=start_s + cut_s, wait_s=self._settings.fleet_wait_s)

    async def applied(self, fleet: FleetState, plan: PlanRecord) -> PlanRecord:
        """Mark a plan as applied, now that it is in force."""
        plan = await fleet.rows.change_plan(plan, FleetPlanState.APPLIED, detail=plan.shortage)
        await self.forgive(fleet)
        for app in fleet.apps:
            if app.name in plan.basis.revisions:
                revision = plan.basis.revisions[app.name]
                await fleet.queries.apps.change(app.name, planned_revision=revision, plan_id=plan.id)
        return plan

    async def fail(
        self, fleet: FleetState, plan: PlanRecord, detail: str, result: PartitionResult | None = None
    ) -> PlanRecord:
        """End a plan that failed; the next one has to wait, longer after each failure."""
        record = fleet.record
        more = {} if result is None else {"result": result.model_dump(mode="json")}
        failed = await fleet.rows.change_plan(plan, FleetPlanState.FAILED, detail=detail, **more)
        wait_s = min(self._settings.fleet_retry_s * 2.0 ** min(record.failures, 10), LONGEST_RETRY_S)
        await fleet.rows.change(
            record.name, failures=record.failures + 1, retry_at=fleet.now + timedelta(seconds=wait_s)
        )
        log.warning("fleet.plan_failed", fleet=record.name, plan=plan.id, detail=detail, retry_s=wait_s)
        return failed

    async def refuse(self, fleet: FleetState, trigger: FleetPlanTrigger, gco2_per_kwh: float, detail: str) -> None:
        """Record a plan that failed before the optimizer could be asked."""
        plan = await fleet.rows.add_plan(new_id("plan"), fleet.record.name, trigger, fleet.basis, gco2_per_kwh)
        await self.fail(fleet, plan, detail)

    async def forgive(self, fleet: FleetState) -> None:
        """Forget failures, after a success."""
        if fleet.record.failures:
            await fleet.rows.change(fleet.record.name, failures=0, retry_at=None)
