"""Plans found by measurement: configurations are brought up and measured one after the other.

A plan with a ``search`` goes from ``measuring`` to ``carrying_out`` and back until its search ends, and is in force
once the chosen configuration runs. All its state is in its row, so that another process can go on if one is killed.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from services.contracts.apps import AppEvaluation, FleetEvaluation, FleetPlanState, FleetSearch
from services.contracts.partition import PartitionProblem, PartitionResult
from services.contracts.schema import Message
from services.contracts.serving import InstanceState
from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.layouts import SLICES
from services.core.policies.clover.measured import MeasuredSearch
from services.kit.logging import Log
from services.serving.fleets import measuring
from services.serving.fleets.carrying import Carrier, progress_of, write_targets
from services.serving.fleets.problem import idle_w_of
from services.serving.fleets.state import REPORT_S, FleetState, of_apps
from services.serving.fleets.steps import LEAVING, NextStep, at_rest
from services.serving.fleets.triggers import LEAST_ANSWERS
from services.serving.repository.fleets import PlanRecord

log = Log(__name__)

M = TypeVar("M", bound=Message)

ALL_REPORTED_S = 6.0  #: After so long all routers have reported a window
PATIENCE = 5.0
LEAST_PATIENCE_S = 60.0
"""An evaluation may take this many times as long as asked, and at least this long, until there are enough answers."""
CANDIDATES = 5  #: Configurations that the optimizer is asked for


@dataclass
class Evaluator:
    """Measures configurations for one plan, whose fleet is locked, and brings up the next ones."""

    carrier: Carrier
    fleet: FleetState
    plan: PlanRecord  #: The plan as it is by now

    async def begin(self, answer: PartitionResult) -> PlanRecord:
        """Begin by measuring what runs; if that cannot be measured, carry out at once what the optimizer found."""
        fleet = self.fleet
        self.plan = replace(self.plan, result=answer.model_dump(mode="json"))
        searches, running = self.searches, fleet.belonging
        known = {
            (name, variant, f"{size}g")
            for name, each in searches.items()
            for row, variant in enumerate(each.application.variants)
            for column, size in enumerate(SLICES)
            if each.application.fits[row, column]
        }
        why = None
        if missing := sorted(set(searches) - {name for name, _, _ in running}):
            why = f"{missing[0]} has no instance."
        elif strange := sorted(kind for kind in running if kind not in known):
            name, variant, size = strange[0]
            why = f"variant {variant} of {name} on {size} runs, but fails too often to be planned."
        elif not _is_settled(fleet):
            why = "not all instances were ready."
        planned = measuring.configuration_of(answer.applications, searches)
        configuration = planned if why is not None else measuring.running_of(running, searches)
        present = FleetEvaluation(begun_at=fleet.now, applications=measuring.evaluations_of(configuration, searches))
        search = FleetSearch(begun_at=fleet.now, evaluations=[], present=present)
        await self._change(FleetPlanState.MEASURING, result=self.plan.result, search=search)
        log.info("fleet.search_begun", fleet=fleet.record.name, plan=self.plan.id, unmeasured=why)
        if why is not None:
            await self._end(search, measuring.End(f"Nothing was measured: {why}", planned), is_in_force=False)
        return self.plan

    async def measure(self) -> None:
        """Check whether what runs has been measured long enough; if so, go on to the next step."""
        fleet, present = self.fleet, self.search.present
        await write_targets(fleet, _rest(fleet))
        if not _is_settled(fleet):
            start_s = self.carrier.limits(fleet).start_s
            if (fleet.now - present.begun_at).total_seconds() > start_s:
                await self._unmeasured(f"Its instances were not ready within {start_s:.0f} s.")
            elif present.measured_from is not None:
                await self._measure_from(None)
            return
        if present.measured_from is None:
            await self._measure_from(_next_window(fleet.now))
            return
        searches = self.searches
        found = await self._window(searches, present.measured_from)
        if isinstance(found, str):
            await self._unmeasured(found)
        elif found is not None:
            windows, until = found
            evaluation = measuring.measured_of(present, searches, windows, until)
            blocked = measuring.without_room(evaluation, searches, windows, fleet.record.spec.evaluation_sla_share)
            await self._go_on(evaluation, blocked, is_in_force=True)

    async def carried_out(self, step: NextStep) -> None:
        """Handle the outcome of bringing up a configuration during a search."""
        if step.outcome is FleetPlanState.APPLIED:
            await self._change(FleetPlanState.MEASURING, detail=None)
        elif step.outcome is FleetPlanState.FAILED:
            await self._unmeasured(step.detail, is_in_force=False)
        else:
            await self.supersede(step.detail or "")

    async def supersede(self, detail: str) -> PlanRecord:
        """Give up the search because another plan is due; what runs stays."""
        search = _with(self.search, ended_at=self.fleet.now, detail=detail)
        await self._change(FleetPlanState.SUPERSEDED, detail=detail, search=search)
        log.info("fleet.search_given_up", fleet=self.fleet.record.name, plan=self.plan.id, detail=detail)
        return self.plan

    @property
    def search(self) -> FleetSearch:
        """How far the search has come."""
        assert self.plan.search is not None
        return self.plan.search

    @property
    def searches(self) -> dict[str, MeasuredSearch]:
        """The search of each application."""
        problem = PartitionProblem.as_stored(self.plan.problem)
        return measuring.searches_of(problem, PartitionResult.as_stored(self.plan.result), AnnealingConfig())

    async def _change(self, state: FleetPlanState, **values: Any) -> None:
        self.plan = await self.fleet.rows.change_plan(self.plan, state, **values)

    async def _measure_from(self, start_at: datetime | None) -> None:
        search = _with(self.search, present=_with(self.search.present, measured_from=start_at))
        await self._change(FleetPlanState.MEASURING, search=search)

    async def _window(
        self, searches: Mapping[str, MeasuredSearch], start_at: datetime
    ) -> tuple[dict[str, measuring.Window], datetime] | str | None:
        """Return what was seen since ``start_at`` and until when; None to wait for more, or why waiting is of no use.

        Both the routers and the ledger must have reported all of that time.
        """
        fleet, apps = self.fleet, self.fleet.queries.apps
        spec, now = fleet.record.spec, fleet.now
        least_s = REPORT_S * math.ceil(spec.evaluation_s / REPORT_S)
        _, covered_at = await apps.energy(searches, start_at, now)
        known_s = (min(now - timedelta(seconds=ALL_REPORTED_S), covered_at or start_at) - start_at).total_seconds()
        length_s = REPORT_S * math.floor(known_s / REPORT_S)
        until = start_at + timedelta(seconds=length_s)
        seen = await apps.seen(searches, start_at, until)
        few = sorted(name for name, each in seen.items() if each.answered < LEAST_ANSWERS)
        if length_s < least_s or few:
            patience_s = max(PATIENCE * least_s, LEAST_PATIENCE_S)
            if (now - start_at).total_seconds() < patience_s:
                return None
            if length_s < least_s:
                return f"The ledger had no energy of all instances within {patience_s:.0f} s."
            answered = seen[few[0]].answered
            return f"{few[0]} had {answered} answers within {patience_s:.0f} s; {LEAST_ANSWERS} are needed."
        energy_j, _ = await apps.energy(searches, start_at, until)
        waiting = await apps.waiting(searches, until)
        idle_w, gpus = idle_w_of(spec) or 0.0, [*fleet.gpus.values()]
        windows: dict[str, measuring.Window] = {}
        for name, search in searches.items():
            rest = max(search.gpus - measuring.held_gpus(name, gpus, fleet.instances), 0.0)
            windows[name] = measuring.Window(seen[name], energy_j[name] + idle_w * rest * length_s, waiting[name])
        return windows, until

    async def _unmeasured(self, detail: str | None, *, is_in_force: bool = True) -> None:
        await self._go_on(_with(self.search.present, detail=detail), None, is_in_force=is_in_force)

    async def _go_on(self, evaluation: FleetEvaluation, blocked: str | None, *, is_in_force: bool) -> None:
        """Record an evaluation, and bring up the next configuration or end the search."""
        fleet, evaluations = self.fleet, [*self.search.evaluations, evaluation]
        search = _with(self.search, evaluations=evaluations, present=evaluation)
        log.info(
            "fleet.evaluated", fleet=fleet.record.name, plan=self.plan.id, number=len(evaluations), blocked=blocked
        )
        searches = self.searches
        planned = measuring.configuration_of(PartitionResult.as_stored(self.plan.result).applications, searches)
        try:
            following = measuring.next_step(search, searches, planned, blocked, fleet.now, fleet.record.spec.search_s)
            if not isinstance(following, measuring.End):
                await self._bring_up(search, following)
                return
        except DomainError as error:
            search = _with(search, ended_at=fleet.now, detail=str(error))
            await self._change(FleetPlanState.MEASURING, search=search)
            await self.carrier.fail(fleet, self.plan, f"The search cannot go on: {error}.")
            return
        await self._end(search, following, is_in_force=is_in_force)

    async def _end(self, search: FleetSearch, end: measuring.End, *, is_in_force: bool) -> None:
        """End the search; bring up the chosen configuration unless it already runs."""
        fleet, searches = self.fleet, self.searches
        search = _with(search, ended_at=fleet.now, detail=end.detail)
        result = measuring.found_by(PartitionResult.as_stored(self.plan.result), search, searches, end.chosen)
        self.plan = replace(self.plan, result=result.model_dump(mode="json"))
        log.info("fleet.search_ended", fleet=fleet.record.name, plan=self.plan.id, detail=end.detail)
        if is_in_force and measuring.configuration_of(search.present.applications, searches) == end.chosen:
            await self._change(FleetPlanState.MEASURING, result=self.plan.result, search=search)
            self.plan = await self.carrier.applied(fleet, self.plan)
            return
        try:
            await self._bring_up(search, measuring.evaluations_of(end.chosen, searches))
        except DomainError as error:
            self.plan = await self.carrier.fail(fleet, self.plan, f"What was chosen has no room: {error}.", result)

    async def _bring_up(self, search: FleetSearch, following: list[AppEvaluation]) -> None:
        present = FleetEvaluation(begun_at=self.fleet.now, applications=following)
        progress = progress_of(measuring.kinds_in(present), self.plan, self.fleet)
        recut = sum(self.fleet.gpus[gpu].sizes != sizes for gpu, sizes in progress.layouts.items())
        search = _with(search, present=_with(present, recut=recut))
        changes = {"result": self.plan.result, "search": search, "progress": progress, "detail": None}
        await self._change(FleetPlanState.CARRYING_OUT, **changes)


def _rest(fleet: FleetState) -> NextStep:
    return at_rest(of_apps(fleet.record.assignment, fleet), fleet.gpus, fleet.instances)


def _is_settled(fleet: FleetState) -> bool:
    """Whether all wanted instances are ready, and nothing else runs."""
    wanted = _rest(fleet).wanted
    ready = Counter(each.kind for each in fleet.instances if each.state is InstanceState.READY)
    return ready == wanted and not [each for each in fleet.instances if each.state in LEAVING]


def _next_window(now: datetime) -> datetime:
    return datetime.fromtimestamp(REPORT_S * math.ceil(now.timestamp() / REPORT_S), UTC)


def _with(message: M, **changes: object) -> M:
    return message.model_copy(update=changes)
