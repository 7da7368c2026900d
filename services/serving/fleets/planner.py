"""The loop that plans fleets and carries their plans out.

Each pass takes the fleets one after the other, under the fleet's row lock: it takes or gives back GPUs, decides whether
to plan, and writes the next step of a plan that is being carried out. Searches run in the optimizer. A plan has its row
before it is solved, and the row's id is the solve's idempotency key, so that a restarted process waits for the same
solve. Everything else is decided from the database alone: a pass that is killed is repeated.
"""

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from services.contracts.apps import Evaluation, FleetPlanState, FleetPlanTrigger
from services.contracts.carbon import CurrentIntensity
from services.contracts.partition import PartitionRequest, PartitionResult
from services.core.domain.gpus import can_be_sliced
from services.core.domain.solving import SolveStatus
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import each_apart, repeat
from services.serving.carbon import Baselines, Grid, Intensities
from services.serving.fleets.assignment import base, with_base_of
from services.serving.fleets.carrying import Carrier, progress_of, write_targets
from services.serving.fleets.evaluator import CANDIDATES, Evaluator
from services.serving.fleets.problem import idle_w_of, in_core, partition_request, wanted_of
from services.serving.fleets.state import (
    FleetState,
    free_gpus,
    is_base,
    is_base_for,
    is_outdated,
    is_settled,
    newcomers,
    of_apps,
    present_of,
    read_fleet,
    why_only_proposes,
)
from services.serving.fleets.steps import Progress, at_rest
from services.serving.fleets.triggers import Present, trigger_of
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.fleets import FleetRecord, PlanRecord
from services.serving.settings import ServingSettings
from services.serving.solver import Answer, Search

log = Log(__name__)


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
        self._repository, self._intensities, self._baselines = repository, intensities, baselines
        self._search, self._settings = search, settings
        self._carrier = Carrier(settings)
        self._solving: dict[str, tuple[str, asyncio.Future[Answer]]] = {}  # by fleet: the plan, and its search

    async def run(self) -> None:
        """Repeat until cancelled; a pass that fails is repeated."""
        try:
            await repeat(
                self.look,
                self._settings.instance_look_s,
                failed="fleets.not_looked",
                when=self._repository.presence.wait,
            )
        finally:
            for name in list(self._solving):
                self._end_search(name)

    async def look(self) -> None:
        """Bring every fleet a step further."""
        async with self._repository.reading() as queries:
            names, specs = await queries.fleets.names(), [each.spec for each in await queries.fleets.all()]
        for name in set(self._solving) - set(names):
            self._end_search(name)
        intensities, baselines = await asyncio.gather(
            self._intensities.of(spec.grid for spec in specs),
            self._baselines.of(spec.grid for spec in specs if spec.baseline_gco2_per_kwh is None),
        )

        async def look_at(name: str) -> None:
            await self._look_at(name, intensities, baselines)

        await each_apart(names, look_at, failed="fleet.not_looked")

    async def _look_at(
        self, name: str, intensities: Mapping[Grid, CurrentIntensity], baselines: Mapping[Grid, float]
    ) -> None:
        async with self._repository.writing() as queries:
            record = await queries.fleets.known(name, lock="free")
            if record is None:
                return
            fleet = await read_fleet(queries, record)
            if record.deleted_at is not None:
                await _give_back(fleet)
                return
            if await self._take_gpus(fleet):
                fleet = await read_fleet(queries, record)
            grid, baseline = record.spec.grid, record.spec.baseline_gco2_per_kwh
            await self._plan(fleet, intensities.get(grid), baselines.get(grid) if baseline is None else baseline)

    async def _take_gpus(self, fleet: FleetState) -> bool:
        """Take missing GPUs, or give back those that are too many or do not fit the spec; return whether any were.

        One that a job from outside the fleet still holds is given back for one that nobody holds: the job may run for
        as long as the fleet.
        """
        record = fleet.record
        up = [gpu for gpu, state in sorted(fleet.gpus.items()) if state.is_up and state.fits]
        missing = record.spec.gpus - len(up)
        surplus = [gpu for gpu, state in sorted(fleet.gpus.items()) if not state.fits]
        used = [gpu for gpu in up if gpu not in fleet.up]
        changed = False
        if missing < 0:
            idle_first = sorted(up, key=lambda gpu: (len(record.assignment.get(gpu, ())), gpu in fleet.up, gpu))
            surplus += idle_first[:-missing]
        elif missing or used:
            found = await fleet.rows.candidates(record.spec)
            exchanged = used[: max(sum(each.is_free for each in found) - missing, 0)]
            surplus += exchanged
            for each in found[: missing + len(exchanged)]:
                if await fleet.rows.want(each.gpu, each.sizes, record.name):
                    log.info("fleet.gpu_taken", fleet=record.name, node=each.gpu[0], gpu=each.gpu[1])
                    changed = True
        for gpu in surplus:
            await fleet.rows.release(gpu, record.name)
            log.info("fleet.gpu_given_back", fleet=record.name, node=gpu[0], gpu=gpu[1])
        return changed or bool(surplus)

    # Plans

    async def _plan(self, fleet: FleetState, intensity: CurrentIntensity | None, baseline: float | None) -> None:
        plan, record = fleet.plan, fleet.record
        only_proposes = why_only_proposes(fleet)
        if only_proposes != record.only_proposes:
            await fleet.rows.change(record.name, only_proposes=only_proposes)
        if plan is not None and plan.state is FleetPlanState.SOLVING:
            answer = self._answer(plan)
            if answer is not None:
                plan = await self._decide(fleet, plan, answer, only_proposes)
        present = present_of(fleet, intensity)
        if plan is not None and plan.state is FleetPlanState.CARRYING_OUT and plan.progress is not None:
            if plan.problem is None and plan.basis.lacks_only_applications(fleet.basis):
                plan = await self._extend_base(fleet, plan, plan.progress)
                assert plan.progress is not None
            is_stale = is_outdated(plan, plan.progress, present)
            await self._carry_out(fleet, plan, plan.progress, is_stale=is_stale)
            return
        if plan is not None and plan.state is FleetPlanState.MEASURING:
            if plan.basis.is_same(fleet.basis):
                await Evaluator(self._carrier, fleet, plan).measure()
                return
            why = "The fleet, its applications or its GPUs changed while it was measured."
            plan = await Evaluator(self._carrier, fleet, plan).supersede(why)
        assignment = of_apps(record.assignment, fleet)
        waiting = newcomers(fleet, assignment) if plan is not None or not is_settled(fleet) else []
        if waiting and (free := free_gpus(fleet, assignment)):
            assignment = with_base_of(waiting, free, assignment)
            await fleet.rows.set_assignment(record.name, assignment)
            fleet = replace(fleet, record=replace(record, assignment=assignment))
            waiting = waiting[len(free) :]
        await write_targets(fleet, at_rest(assignment, fleet.gpus, fleet.instances))
        if plan is None or plan.state is not FleetPlanState.SOLVING:
            is_divided = waiting and is_base(fleet, assignment)
            trigger = FleetPlanTrigger.PARAMETER if is_divided else trigger_of(plan, present)
            if trigger is not None:
                await self._begin(fleet, plan, trigger, present, baseline, only_proposes)

    async def _begin(
        self,
        fleet: FleetState,
        last: PlanRecord | None,
        trigger: FleetPlanTrigger,
        present: Present,
        baseline: float | None,
        only_proposes: str | None,
    ) -> None:
        """Begin a plan, if the GPUs are ready for one."""
        record = fleet.record
        if not fleet.planned or not is_settled(fleet):
            return
        gco2 = 0.0 if present.gco2_per_kwh is None else present.gco2_per_kwh
        cannot_cut = not can_be_sliced(record.spec.gpu_model)
        anew = trigger in (FleetPlanTrigger.FIRST, FleetPlanTrigger.PARAMETER, FleetPlanTrigger.GPUS)
        assignment = of_apps(record.assignment, fleet)
        is_base_asked = trigger is FleetPlanTrigger.FIRST or not any(assignment.values())
        divides_base = bool(newcomers(fleet, assignment)) and is_base(fleet, assignment)
        is_base_left = cannot_cut and anew and last is not None and not is_base_for(record.assignment, fleet)
        if is_base_asked or divides_base or is_base_left:
            await self._begin_base(fleet, trigger, gco2)
            return
        if present.gco2_per_kwh is None or present.gco2_per_kwh <= 0:
            return  # without an intensity there is nothing to weigh accuracy against
        gpus = [fleet.gpus[gpu] for gpu in fleet.up]
        plan_id = new_id("plan")
        try:
            request = partition_request(
                record.spec,
                fleet.planned,
                gpus,
                fleet.belonging,
                gco2,
                baseline,
                seed=zlib.crc32(plan_id.encode()) >> 1,
                candidates=CANDIDATES if record.spec.evaluation is Evaluation.MEASURED else 0,
            )
        except ValidationError as error:
            await self._carrier.refuse(fleet, trigger, gco2, str(error.errors()[0]["msg"]))
            return
        await fleet.rows.add_plan(
            plan_id, record.name, trigger, fleet.basis, gco2, problem=request.model_dump(mode="json")
        )
        log.info("fleet.planning", fleet=record.name, plan=plan_id, trigger=trigger.value, only=only_proposes)

    async def _begin_base(self, fleet: FleetState, trigger: FleetPlanTrigger, gco2: float) -> None:
        """Carry out BASE: the most accurate variants on whole GPUs."""
        record = fleet.record
        after = base(fleet.up, _loads(fleet), of_apps(record.assignment, fleet))
        progress = Progress(dict.fromkeys(fleet.up, ()), after, fleet.now.timestamp())
        plan_id = new_id("plan")
        await fleet.rows.add_plan(plan_id, record.name, trigger, fleet.basis, gco2, progress=progress)
        log.info("fleet.planned", fleet=record.name, plan=plan_id, trigger=trigger.value, scheme="base")

    async def _extend_base(self, fleet: FleetState, plan: PlanRecord, progress: Progress) -> PlanRecord:
        """Extend BASE, while it is being carried out, to applications that were added meanwhile."""
        after = base(fleet.up, _loads(fleet), of_apps(progress.after, fleet))
        progress = replace(progress, after=after, done=frozenset(), since_s=fleet.now.timestamp())
        log.info("fleet.base_extended", fleet=fleet.record.name, plan=plan.id)
        return await fleet.rows.change_plan(plan, plan.state, basis=fleet.basis, progress=progress, detail=None)

    def _answer(self, plan: PlanRecord) -> Answer | None:
        """Return what the search for a plan found, or None until then; start the search if it is not running."""
        plan_id, task = self._solving.get(plan.fleet, (None, None))
        if task is None or plan_id != plan.id:
            self._end_search(plan.fleet)  # of a plan that another process has decided
            assert plan.problem is not None, "only BASE has none, and it is never solved"
            request = PartitionRequest.as_stored(plan.problem)
            self._solving[plan.fleet] = plan.id, asyncio.ensure_future(self._search(plan.id, request))
            return None
        if not task.done():
            return None
        del self._solving[plan.fleet]
        error = task.exception()
        return task.result() if error is None else str(error) or type(error).__name__

    def _end_search(self, fleet: str) -> None:
        """Await no search for a plan of a fleet any more."""
        _, search = self._solving.pop(fleet, (None, None))
        if search is not None:
            search.cancel()

    async def _decide(
        self, fleet: FleetState, plan: PlanRecord, answer: Answer, only_proposes: str | None
    ) -> PlanRecord:
        """Check what was found, and propose it or begin carrying it out."""
        record, gpus = fleet.record, list(plan.basis.gpus)
        if isinstance(answer, str):
            return await self._carrier.fail(fleet, plan, answer)
        result = answer.model_dump(mode="json")
        if {each.name for each in answer.applications} != {app.name for app in fleet.planned} or gpus != fleet.up:
            detail = "The fleet's applications or GPUs changed before the plan was ready."
            return await fleet.rows.change_plan(plan, FleetPlanState.SUPERSEDED, detail=detail, result=result)
        if only_proposes is not None:
            await self._carrier.forgive(fleet)
            detail = " ".join(filter(None, (only_proposes, replace(plan, result=result).shortage)))
            return await fleet.rows.change_plan(plan, FleetPlanState.PROPOSED, detail=detail, result=result)
        if record.spec.evaluation is Evaluation.MEASURED and answer.status is not SolveStatus.INFEASIBLE:
            return await Evaluator(self._carrier, fleet, plan).begin(answer)
        progress = progress_of(wanted_of(answer), plan, fleet)
        log.info("fleet.planned", fleet=record.name, plan=plan.id, trigger=plan.trigger.value, recut=len(answer.recut))
        return await fleet.rows.change_plan(plan, FleetPlanState.CARRYING_OUT, result=result, progress=progress)

    async def _carry_out(self, fleet: FleetState, plan: PlanRecord, progress: Progress, *, is_stale: bool) -> None:
        step = await self._carrier.step(fleet, plan, progress, is_stale=is_stale)
        if step.outcome is None:
            return
        if plan.search is not None and plan.search.ended_at is None:
            await Evaluator(self._carrier, fleet, plan).carried_out(step)
        elif step.outcome is FleetPlanState.FAILED:
            await self._carrier.fail(fleet, plan, step.detail or "")
        elif step.outcome is FleetPlanState.APPLIED:
            await self._carrier.applied(fleet, plan)
        else:
            await fleet.rows.change_plan(plan, FleetPlanState.SUPERSEDED, detail=step.detail)


def _loads(fleet: FleetState) -> dict[tuple[str, str], float]:
    """Return how many GPUs each application's most accurate variant keeps busy, by application and variant."""
    idle_w = idle_w_of(fleet.record.spec)
    assert idle_w is not None
    loads: dict[tuple[str, str], float] = {}
    for app in fleet.planned:
        application = in_core(app, idle_w)
        best = application.best_variant
        loads[app.name, application.variants[best]] = app.rate_per_s * float(application.service_s[best, -1])
    return loads


async def begin_proposed(queries: Queries, record: FleetRecord, plan: PlanRecord) -> str | None:
    """Begin carrying out a proposal, or return why that is not possible. The fleet's row must be locked."""
    if not can_be_sliced(record.spec.gpu_model):
        return f"GPUs of model {record.spec.gpu_model} cannot be cut into MIG slices."
    fleet = await read_fleet(queries, record)
    if fleet.plan is None or fleet.plan.id != plan.id:
        return f"Plan {plan.id} is outdated: plan {fleet.plan.id if fleet.plan else '-'} is newer."
    if not plan.basis.is_same(fleet.basis):
        return f"Plan {plan.id} is outdated: the fleet, its applications or its GPUs have changed."
    progress = progress_of(wanted_of(PartitionResult.as_stored(plan.result)), plan, fleet)
    await queries.fleets.change_plan(plan, FleetPlanState.CARRYING_OUT, progress=progress, detail=None, ended_at=None)
    return None


async def _give_back(fleet: FleetState) -> None:
    """Give back all GPUs of a fleet that is being deleted, and then remove it."""
    for gpu in fleet.gpus:
        await fleet.rows.release(gpu, fleet.record.name)
    if not fleet.instances:
        await fleet.rows.remove(fleet.record.name)
        log.info("fleet.removed", fleet=fleet.record.name)
