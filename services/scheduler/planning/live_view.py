"""The live state for those who only read: the same snapshot that a round sees, with nothing changed."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from services.core.cycle.plan import Plan
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.errors import PolicyConfigError
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy
from services.db.database import Database
from services.kit.problems import unavailable
from services.scheduler.learning.curves import KnownCurves, read_curves
from services.scheduler.learning.predicting import Predicting
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.cluster import Cluster
from services.scheduler.planning.snapshot import read_rows, snapshot_of
from services.scheduler.power.hooks import PowerHook
from services.scheduler.repository import rounds, snapshots
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import ClusterRows, JobRow, SpecRow
from services.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Live:
    """The rows of one moment, and what is known about the grids and the lengths of jobs."""

    rows: ClusterRows
    outlooks: tuple[CarbonOutlook, ...]
    predictions: Predictions


@dataclass(frozen=True)
class DryRound:
    """A round that was not applied."""

    policy: Policy[Any]
    snapshot: Snapshot
    plan: Plan
    memory: Any
    before: Any  #: What the policy remembered before it


class LiveView:
    """Reads the live state in one transaction that writes nothing."""

    def __init__(self, database: Database, settings: SchedulerSettings, carbon: CarbonWatch, hook: PowerHook) -> None:
        self.settings = settings
        self._database = database
        self._carbon = carbon
        self._hook = hook
        self._predicting = Predicting(database)
        self._reading: asyncio.Task[Live] | None = None
        self._curves: KnownCurves = read_curves(settings.control_curves) if settings.control_curves else {}

    async def read(self, draft: tuple[JobRow, SpecRow] | None = None) -> Live:
        """Return the live state; with a draft, as if that job waited too.

        Those who ask at the same time share one reading, which with many jobs is the costliest part.

        Raises:
            ProblemError: 503 before the scheduler's first turn, when there is no policy yet.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        live = await asyncio.shield(self._reading)
        if draft is None:
            return live
        rows = replace(live.rows, jobs=[*live.rows.jobs, draft[0]])
        return replace(live, rows=rows, predictions=self._predicting.predict([*live.rows.unpredicted, draft[1]]))

    async def _read(self) -> Live:
        outlooks = await self._carbon.outlooks(await snapshots.zones(self._database), time.time())
        await self._predicting.refresh()
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            if await rounds.active_policy(connection) is None:
                raise unavailable("The scheduler")
            rows, _ = await read_rows(connection, self.settings, with_unpredicted=True, with_endings=True)
        return Live(rows, outlooks, self._predicting.predict(rows.unpredicted))

    def prediction(self, spec: SpecRow) -> Predictions:
        """Return what the model in force predicts for one job."""
        return self._predicting.predict([spec])

    def cluster(self, live: Live) -> Cluster:
        """Return the nodes that plans may use."""
        return Cluster.of(live.rows, self._hook.covers)

    def snapshot(self, live: Live, trigger: Trigger) -> Snapshot:
        """Return the snapshot of a round with this trigger; this is slow with many jobs, so call it in a thread."""
        return snapshot_of(
            live.rows, self.cluster(live), trigger, live.outlooks, self.settings, self._curves, live.predictions
        )

    def round(self, live: Live, trigger: Trigger) -> DryRound:
        """Return what the policy in force would do now; call it in a thread, as above.

        A stored policy that can no longer be built is replaced by the one in the settings, as in rounds.

        Raises:
            PlanError: The policy's plan for this state is not valid.
        """
        state = live.rows.state
        snapshot = self.snapshot(live, trigger)
        try:
            policy = build_policy(state.policy, state.parameters)
            memory = policy.load(state.memory) if state.memory else policy.initial()
        except PolicyConfigError:
            policy = build_policy(self.settings.policy, {})
            memory = policy.initial()
        decided = run_under_orders(policy, snapshot, memory)
        return DryRound(policy, snapshot, decided.plan, decided.memory, memory)
