"""Has every pool planned each half hour and at events, and decides the outcomes of plans.

It is a loop in the service, like the sweeper. Any number of services may run it: a slot of the clock, like an event,
gets only one row for its plan, and an outcome is decided once.
"""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from services.contracts.serving import RESCUES, PlanOutcome, PlanTrigger, PoolPlanResult, PoolSpec
from services.core.domain.serving import WINDOW_S
from services.kit.background.queue import WorkStore
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.readable import readable
from services.kit.repeating import When, each_apart, repeat
from services.serving.carbon import Intensities
from services.serving.planning.events import Present, Standing, event_of, mean_qps
from services.serving.planning.plans import Plans
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.cluster import read_cluster
from services.serving.repository.plans import MadePlan
from services.serving.settings import ServingSettings

log = Log(__name__)

OVER = timedelta(seconds=60)  #: The traffic that is compared with what was planned for
RESCUE_SHARE = 1 / 6
INTENSITY_GAP_S = 300.0
"""A forecast that is off at once would be off again after each plan: one for each of its steps is enough."""

Signals = Mapping[str, tuple[str, str | None]]  #: Zone and signal by place


class EventWatch:
    """Finds the events of pools. An event that lasts is reported until the pool is planned because of it."""

    def __init__(self, repository: ServingRepository, intensities: Intensities, settings: ServingSettings) -> None:
        self._repository, self._intensities = repository, intensities
        self._settle_s = settings.plan_settle_s
        self._gap_s = settings.plan_event_gap_s
        self._known: dict[str, Standing | None] = {}
        self._since_s: dict[tuple[str, PlanTrigger], float] = {}

    async def look(self) -> list[tuple[Standing, PlanTrigger]]:
        """Return the pools to plan now because of an event; those whose instances have nowhere to run come first."""
        async with self._repository.reading() as queries:
            rows = await queries.plans.standing()
            if not rows:
                return []
            await self._read(queries, [plan_id for _, plan_id, _ in rows])
            standing = [
                replace(known, event_at=event_at)
                for _, plan_id, event_at in rows
                if (known := self._known.get(plan_id)) is not None
            ]
            now, cluster = await queries.now(), await read_cluster(queries.connection)
            windows = await queries.traffic.recent(OVER)
        signals = {each.pool: _signals(each.spec) for each in standing}
        grids = await self._intensities.of({key for places in signals.values() for key in places.values()})

        def event(of: Standing) -> PlanTrigger | None:
            intensity = {
                place: grids[key].point.gco2_per_kwh
                for place, key in signals[of.pool].items()
                if key in grids and not grids[key].is_stale
            }
            qps = mean_qps(windows.get(of.pool, {}), WINDOW_S)
            return event_of(of, Present(now, cluster, qps, intensity))

        events = readable(standing, lambda each: (each, event(each)), "plan", lambda each: each.plan_id)
        found = [(each, event) for each, event in events if event is not None]
        self._forget({(each.pool, event) for each, event in found}, {plan_id for _, plan_id, _ in rows})
        due = [(each, event) for each, event in found if self._is_due(each, event, now)]
        return sorted(due, key=lambda pair: pair[1] not in RESCUES)

    async def _read(self, queries: Queries, plans: Sequence[str]) -> None:
        """Read the plans that are not known yet; None stands for one that has no result or cannot be read."""
        new = [plan_id for plan_id in plans if plan_id not in self._known]
        made = {plan_id: each for plan_id in new if (each := await queries.plans.made(plan_id)) is not None}
        found = readable(made.items(), lambda each: _standing(*each), "plan", lambda each: each[0])
        self._known |= dict.fromkeys(new) | {each.plan_id: each for each in found}

    def _is_due(self, standing: Standing, event: PlanTrigger, now: datetime) -> bool:
        """Return whether an event has lasted long enough, and the pool was not recently planned because of one."""
        since_s = self._since_s.setdefault((standing.pool, event), time.monotonic())
        ago_s = (now - standing.event_at).total_seconds() if standing.event_at else float("inf")
        if event in RESCUES:
            return ago_s >= RESCUE_SHARE * self._gap_s
        gap_s = max(self._gap_s, INTENSITY_GAP_S) if event is PlanTrigger.INTENSITY else self._gap_s
        return ago_s >= gap_s and time.monotonic() - since_s >= self._settle_s

    def _forget(self, events: set[tuple[str, PlanTrigger]], plans: set[str]) -> None:
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in events}
        self._known = {plan_id: known for plan_id, known in self._known.items() if plan_id in plans}


def _standing(plan_id: str, made: MadePlan) -> Standing:
    return Standing(
        made.pool,
        PoolSpec.as_stored(made.spec),
        plan_id,
        PoolPlanResult.as_stored(made.result),
        made.from_at,
        made.slot_at,
        made.outcome is PlanOutcome.FAILED,
        None,
    )


def _signals(spec: PoolSpec) -> Signals:
    """Return the zone and signal of each place; empty with only one place, or if the objective is not carbon."""
    if spec.objective != "carbon" or len(spec.places) < 2:
        return {}
    return {place.name: place.grid for place in spec.places}


class Planner:
    """Finds the plans that have an answer, and the pools that are due or to which something has happened."""

    def __init__(self, plans: Plans, watch: EventWatch, look_s: float, when: When | None = None) -> None:
        self._plans, self._watch, self._look_s, self._when = plans, watch, look_s, when

    async def run(self) -> None:
        """Repeat until cancelled; if a pass fails (the database does not answer), the next one tries again."""
        await repeat(self.look, self._look_s, failed="planner.not_looked", when=self._when)

    async def look(self) -> None:
        """Decide the outcomes of plans that have an answer or never will, then submit those that are due."""
        steps = (self._decide, self._answer_events, self._submit_due)
        await each_apart(steps, lambda step: step(), failed="planner.step_failed", name=lambda step: step.__name__)

    async def _decide(self) -> None:
        await each_apart(await self._plans.undecided(), self._plans.decide, failed="plan.not_decided")

    async def _answer_events(self) -> None:
        async def submit(found: tuple[Standing, PlanTrigger]) -> None:
            standing, event = found
            with contextlib.suppress(ProblemError):
                await self._plans.submit(standing.pool, event, after=standing)

        found = await self._watch.look()
        await each_apart(found, submit, failed="pool.not_planned", name=lambda each: each[0].pool)

    async def _submit_due(self) -> None:
        async def submit(due: tuple[str, datetime | None]) -> None:
            pool, deadline_at = due
            with contextlib.suppress(ProblemError):  # deleted since
                await self._plans.submit(pool, PlanTrigger.CLOCK, deadline_at=deadline_at)

        await each_apart(await self._plans.due(), submit, failed="pool.not_planned", name=lambda each: each[0])


COMMAND = (sys.executable, *(("-P",) if sys.flags.safe_path else ()), "-m", "services.serving.worker")


class PlanWorkers:
    """Keeps as many processes that make plans as are allowed while plans wait for one; they end soon after the last.

    Planning reads two weeks of traffic and fits forecasts, which takes seconds of CPU time: too long for the event
    loop. A worker claims plans by itself (``services.serving.worker``), so killing one only delays a plan. It ends when
    its standard input, a pipe from this process, closes.
    """

    def __init__(self, store: WorkStore, *, at_once: int, look_s: float, when: When | None = None) -> None:
        self._store, self._at_once, self._look_s, self._when = store, at_once, look_s, when
        self._processes: list[Process] = []

    async def run(self) -> None:
        """Check until cancelled, and then end the workers."""
        try:
            await repeat(self.look, self._look_s, failed="plan_workers.not_looked", when=self._when)
        finally:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

    async def look(self) -> None:
        """Start a worker for each waiting plan, up to the allowed number."""
        for process in self._processes:
            if process.returncode:
                log.warning("plan_worker.ended", pid=process.pid, code=process.returncode)
        self._processes = [process for process in self._processes if process.returncode is None]
        waiting = len(await self._store.queued(0))
        for _ in range(min(waiting, self._at_once) - len(self._processes)):
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE)
            log.info("plan_worker.started", pid=process.pid)
            self._processes.append(process)
