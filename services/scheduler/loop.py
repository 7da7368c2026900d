"""The decision loop: woken by hints, by the clock of active rounds, and by itself every second."""

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.streams import COMMAND_FIELD, HINTS_STREAM, TRACEPARENT_FIELD
from services.core.cycle.levels import LevelRoom, level_rooms
from services.core.cycle.plan import Plan
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import Trigger
from services.core.domain.errors import PolicyConfigError
from services.core.policies.orders.feedback import with_ratios
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy
from services.db import locks
from services.db.database import Database, dumps
from services.db.leadership import Leadership
from services.kit.disk import DiskWatch
from services.kit.logging import Log
from services.kit.tasks import end_tasks
from services.scheduler.counters import ACTIONS, PHASES, ROUNDS, WAITS
from services.scheduler.engines.ingest import EngineIngest
from services.scheduler.failures import PLAIN, contained, in_parts, note_failure, passes_over
from services.scheduler.grid.openadr import OpenAdr
from services.scheduler.grid.orders import prepare
from services.scheduler.ingest.dependencies import look
from services.scheduler.ingest.reports import Ingest
from services.scheduler.learning.learned import KnownCurves, read_curves, refit
from services.scheduler.learning.measuring import Measuring
from services.scheduler.learning.predicting import Predicting
from services.scheduler.planning.apply import Applied, Decided, StalePlanError, apply
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.culprits import culprits
from services.scheduler.planning.saving import Savings
from services.scheduler.planning.snapshot import Loaded, load
from services.scheduler.power.hooks import NoHook, PowerHook
from services.scheduler.power.limit import PowerWatch
from services.scheduler.power.nodes import NodePower
from services.scheduler.repository import engines, jobs, orders, outbox, rounds, snapshots
from services.scheduler.repository.jobs import Waiting
from services.scheduler.repository.kept_jobs import KeptJobs
from services.scheduler.settings import SchedulerSettings

BATCH = 200
STREAM_LENGTH = 10_000
"""Commands kept per node. What a dead node never read is trimmed; what still matters then is published again."""


Note = Callable[[Loaded, Plan], None]
"""Is given each active round: all that the policy saw and remembered, and what it planned."""


class Relay:
    """Publishes the outbox in order; a row is deleted once Redis has it, so a crash in between publishes it twice."""

    def __init__(self, database: Database, redis: Redis, *, look_every_s: float = 1.0) -> None:
        self._database = database
        self._redis = redis
        self._look_every_s = look_every_s
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Wake the relay, since something was committed."""
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._wake.clear()
            try:
                while await self.publish():
                    pass
            except Exception as error:  # whatever it is, such as a full disk: commands wait for the relay alone
                log.warning("relay.waiting", error=str(error) or type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._wake.wait()

    async def publish(self) -> int:
        """Publish one batch and return how many commands it held."""
        async with self._database.connection() as connection:
            rows = await outbox.oldest(connection, BATCH)
            if not rows:
                return 0
            async with self._redis.pipeline(transaction=False) as pipeline:
                for row in rows:
                    command = {COMMAND_FIELD: dumps(row.payload)}
                    if row.traceparent is not None:
                        command[TRACEPARENT_FIELD] = row.traceparent
                    pipeline.xadd(row.stream, command, maxlen=STREAM_LENGTH, approximate=True)  # pyright: ignore[reportArgumentType]
                await pipeline.execute()
            await outbox.delete(connection, [row.id for row in rows])
        return len(rows)


log = Log(__name__)

Entry = tuple[str, Any]
Answer = dict[str, list[list[Entry]]] | list[tuple[str, list[Entry]]]
"""What Redis has of streams, in version 3 and version 2 of its protocol: the entries of each, with their ids."""

LATE_AFTER_S = 60.0  #: A turn that takes longer is reported as one that may never end

SET_ASIDE_S = 3_600.0  #: For how long jobs are left out with which no round can be held
SHOWN = 20  #: Of these, in the log

ATTEMPTS = 5  #: How often a round is repeated after a concurrent change, before it waits for the next tick


@dataclass(frozen=True)
class Round:
    """A completed round."""

    trigger: Trigger
    applied: Applied
    load_ms: float
    decide_ms: float
    apply_ms: float


def note_round(trigger: Trigger, applied: Applied, phases_ms: Mapping[str, float]) -> None:
    """Count a round that was held, and how long the jobs that it started had waited."""
    ROUNDS.labels(trigger.value).inc()
    for phase, took_ms in phases_ms.items():
        PHASES.labels(phase).observe(took_ms / 1e3)
    done = {
        "start": applied.starts,
        "preempt": applied.preemptions,
        "hold": applied.holds,
        "set_control": applied.controls,
        "power_node": applied.nodes,
    }
    for action, count in done.items():
        ACTIONS.labels(action).inc(count)
    for gang, waits_s in (("first", applied.first_waits_s), ("later", applied.later_waits_s)):
        for waited_s in waits_s:
            WAITS.labels(gang).observe(waited_s)


class Scheduler:
    """The decision loop of one process; only the leader of several decides."""

    def __init__(
        self,
        settings: SchedulerSettings,
        database: Database,
        redis: Redis,
        carbon: CarbonWatch,
        hook: PowerHook | None = None,
        door: OpenAdr | None = None,
        note: Note | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._redis = redis
        self._carbon = carbon
        self._leadership = Leadership(settings.database_url, locks.LEADERSHIP, "scheduler-leader")
        self._ingest = Ingest(database, settings)
        self._engines = EngineIngest(database, settings)
        self._savings = Savings(database, carbon)
        self._measuring = Measuring(database)
        self._points_unread = True
        self._predicting = Predicting(database)
        self._relay = Relay(database, redis)
        self._kept = KeptJobs()
        self._memory: tuple[int, Any] | None = None
        """What the policy remembers, and of which version of the state that is."""
        self._nodes = NodePower(database, hook or NoHook(), settings)
        self._curves: KnownCurves = read_curves(settings.control_curves) if settings.control_curves else {}
        self._built: Policy[Any] | None = None
        self._power = PowerWatch(settings.power_interval_s, settings.power_settle_s)
        self._still_open: Hashable = None
        self._folds: Mapping[str, Callable[[], Awaitable[object]]] = {
            "node_power": self._nodes.look,
            "reports": self._fold_reports,
            "engines": self._engines.look,
            "dependencies": self._fold_dependencies,
            "measurements": self._fold_measurements,
        }
        """What others wrote, folded before each round; one that fails stops neither the others nor rounds."""
        self._disk = DiskWatch(settings.database_dir, settings.database_reserve_bytes)
        self._disk_problem = ""
        self._doors = [] if door is None else [door]
        self._note = note
        self._prepared = False
        self._seen: tuple[object, ...] | None = None
        self._last_hint: str = f"{time.time_ns() // 1_000_000}-0"
        self._passive_at_s = 0.0
        self._turned_at_s = time.monotonic()
        self._look_again_at_s = math.inf
        self.level_rooms: Sequence[LevelRoom] = ()  #: What the levels of the network had room for in the last round
        self.free_gpus = 0
        self._ratios: Mapping[str, float] = {}
        """Measured over modelled draw by order; lost with the process, and measured again at the first check."""

    @property
    def leads(self) -> bool:
        """Whether this process alone decides."""
        return self._leadership.is_held

    @property
    def since_turn_s(self) -> float:
        """How long ago the loop last began a turn."""
        return time.monotonic() - self._turned_at_s

    def check_turns(self) -> None:
        """Check that the loop turns; ``RuntimeError`` if it has not turned for a minute."""
        if (late_s := self.since_turn_s) > LATE_AFTER_S:
            raise RuntimeError(f"the scheduler has made no decision for {late_s:.0f} s")

    async def run(self) -> None:
        """Decide until cancelled, whenever this process leads."""
        helpers: list[asyncio.Task[None]] = []
        try:
            while True:
                self._turned_at_s = time.monotonic()
                if not await self._leadership.hold():
                    self._forget()
                    await end_tasks(helpers)
                    helpers = []
                    await asyncio.sleep(self._settings.tick_s)
                    continue
                helpers = helpers or [
                    asyncio.create_task(each.run()) for each in (self._relay, self._nodes, self._savings, *self._doors)
                ]
                await self._guarded(self.turn)
                await self._guarded(self._sleep_until_woken)
        finally:
            try:
                await end_tasks(helpers)
            finally:
                self._leadership.release()

    async def _guarded(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work``; if it fails, the next turn tries again and trusts nothing that was cached."""
        try:
            await work()
            return
        except Exception as error:
            if waits := passes_over(error):
                log.warning("database.waiting", error=str(error) or type(error).__name__)
            else:
                note_failure(error)
            await asyncio.sleep(0.2 if waits else self._settings.tick_s)
        self._forget()

    def _forget(self) -> None:
        """Drop what was cached: another scheduler may have decided, or something went wrong."""
        self._kept.forget()
        self._memory = None
        self._points_unread = True

    async def prepare(self) -> None:
        """Make sure that there is a policy; only a new installation has none."""
        if not self._prepared:
            await self._database.execute(rounds.FIRST_STATE, self._settings.policy)
            self._prepared = True

    async def turn(self) -> None:
        """Fold reports, then hold the round that is due: an active one by the clock, a passive one after a change.

        A passive one is also due when the last plan asked for another look.
        """
        await self.prepare()
        for name, fold in self._folds.items():
            with contained("fold.failed", of=name):
                if await fold():
                    self._relay.wake()
        if self._has_no_room():
            return
        with contained("fold.failed", of="grid_orders"):
            await prepare(self._database)
        async with self._database.connection() as connection:
            due_in_s = await rounds.due_in_s(
                connection, self._settings.round_interval_s, self._settings.engine_new_jobs_s
            )
            now = (*await rounds.fingerprint(connection, self._settings.node_min_on_s), self._still_open)
        if due_in_s <= 0:
            await self.hold(Trigger.ACTIVE)
            await self._trim()
            self._passive_at_s = time.monotonic()
        elif self._power.is_due(time.monotonic()):
            await self.hold(self._power.trigger)
            self._passive_at_s = time.monotonic()
        elif now != self._seen or time.monotonic() >= self._look_again_at_s:
            await self.hold(Trigger.PASSIVE)
            self._passive_at_s = time.monotonic()
            self._seen = now  # as it was before the round: what the round itself changed is looked at once more

    async def _fold_reports(self) -> bool:
        return any(await self._ingest.look(time.monotonic()))

    async def _fold_dependencies(self) -> None:
        self._still_open = await look(self._database)

    async def _fold_measurements(self) -> int:
        unread, self._points_unread = self._points_unread, True  # whatever fails here: they are read another time
        measured = await self._measuring.look()
        self._points_unread = bool(measured or unread) and await refit(self._database)
        return measured

    def _has_no_room(self) -> bool:
        """Return whether the database's disk is so full that nothing is started and only what runs is looked after."""
        problem = self._disk.problem()
        if bool(problem) != bool(self._disk_problem):
            log.warning("disk.full" if problem else "disk.has_room", detail=f"The database's disk {problem}".strip())
        self._disk_problem = problem
        return bool(problem)

    async def hold(self, trigger: Trigger) -> Round | None:
        """Run one round; return what it did, or None if the cluster changed during the round."""
        gc.disable()  # a round over many jobs makes no cycles, and to look for some takes as long as to decide
        try:
            return await self._hold(trigger)
        except Exception as error:
            if passes_over(error) or (found := await self._culprits(trigger)) == []:
                raise
            note_failure(error)
            if found is None:
                log.error("policy.failed", error=str(error) or type(error).__name__, instead=PLAIN)
                return await self._hold(trigger, build_policy(PLAIN, {}))
            log.error("jobs.set_aside", jobs=found[:SHOWN], count=len(found), lasts_s=SET_ASIDE_S)
            await self._database.run(jobs.set_aside, found, SET_ASIDE_S)
            return await self._hold(trigger)
        finally:
            gc.enable()

    async def _culprits(self, trigger: Trigger) -> list[str] | None:
        """Return the waiting jobs that keep a round from being planned; None if it fails without any of them, too."""
        self._forget()
        units = await self._database.run(jobs.waiting)

        async def passes(kept: Sequence[list[str]]) -> bool:
            self._turned_at_s = time.monotonic()  # it does not hang, however many jobs there are
            left_in = {job_id for unit in kept for job_id in unit}
            try:
                loaded = await self._load(trigger, {each for unit in units for each in unit} - left_in)
                await self._keep(loaded)
                decided, _ = self._decide(loaded, *self._policy_of(loaded), time.perf_counter())
                await self._apply(decided, rehearsed=True)
            except StalePlanError:
                return True
            except Exception as error:
                if passes_over(error):
                    raise
                return False
            return True

        found = await culprits(units, passes)
        return None if found is None else [job_id for unit in found for job_id in unit]

    async def _load(self, trigger: Trigger, without: Collection[str] = ()) -> Loaded:
        outlooks = await self._carbon.outlooks(await snapshots.zones(self._database), time.time())
        await self._predicting.refresh()
        return await load(
            self._database,
            trigger,
            outlooks,
            self._settings,
            self._curves,
            at_rest=self._power.at_rest(time.monotonic()),
            covers=self._nodes.hook.covers,
            predicting=self._predicting,
            kept=None if without else self._kept,
            known_version=self._memory[0] if self._memory and self._note is None else None,
            without=without,
        )

    async def _hold(self, trigger: Trigger, instead: Policy[Any] | None = None) -> Round | None:
        for _ in range(ATTEMPTS):
            began = time.perf_counter()
            loaded = await self._load(trigger)
            snapshot, ratios = with_ratios(loaded.snapshot, self._ratios)
            if ratios != self._ratios:
                for order in snapshot.orders:
                    watts = {"measured_w": order.measured_w, "limit_w": order.limit_w, "ratio": order.ratio}
                    log.info("grid.order", order=order.id, **{name: round(value, 3) for name, value in watts.items()})
                await self._database.execute(orders.KEEP_RATIOS, [*ratios], [*ratios.values()])
            self._ratios, loaded = ratios, replace(loaded, snapshot=snapshot)
            await self._keep(loaded)
            self.level_rooms = level_rooms(snapshot)
            self.free_gpus = int(snapshot.nodes.free_gpus[snapshot.nodes.schedulable].sum())
            read = time.perf_counter()
            policy, is_stored = (instead, False) if instead else self._policy_of(loaded)
            decided, memory = self._decide(loaded, policy, is_stored, read)
            written = time.perf_counter()
            try:
                applied = await self._apply(decided)
            except StalePlanError as error:
                log.info("plan.stale", reason=str(error))
                continue
            self._memory = (applied.round, memory) if is_stored else None
            self._relay.wake()
            again_s = math.inf if decided.plan.look_again_s is None else decided.plan.look_again_s
            self._look_again_at_s = time.monotonic() + max(again_s - loaded.snapshot.now_s, 0.0)
            self._nodes.act()
            self._power.note(loaded.snapshot, policy, changed=applied.changes > 0, now_s=time.monotonic())
            ended = time.perf_counter()
            done = Round(trigger, applied, (read - began) * 1e3, decided.decide_ms, (ended - written) * 1e3)
            self._report(done, loaded, policy.name)
            return done
        return None

    async def _keep(self, loaded: Loaded) -> None:
        """Store what was found out of jobs when the cluster was read."""
        if loaded.withheld:
            said = [Waiting(each.id, each.reason.value, each.detail, None) for each in loaded.withheld]
            async with self._database.connection() as connection:
                await in_parts(said, partial(jobs.hold, connection), "reason.unwritten")
        if loaded.predictions:
            await self._predicting.keep(loaded.predictions)

    async def _apply(self, decided: Decided, *, rehearsed: bool = False) -> Applied:
        ports, values = self._settings.master_ports, self._settings.measured_settings
        return await apply(self._database, decided, ports, values, rehearsed=rehearsed)

    def _memory_of(self, loaded: Loaded, policy: Policy[Any], is_stored: bool) -> Any:
        if is_stored and loaded.memory is None and self._memory:
            return self._memory[1]
        return policy.load(loaded.memory) if loaded.memory and is_stored else policy.initial()

    def _decide(self, loaded: Loaded, policy: Policy[Any], is_stored: bool, began: float) -> tuple[Decided, Any]:
        memory = self._memory_of(loaded, policy, is_stored)
        result = run_under_orders(policy, loaded.snapshot, memory)
        decide_ms = (time.perf_counter() - began) * 1e3
        if self._note is not None and loaded.snapshot.trigger is Trigger.ACTIVE:
            self._note(loaded, result.plan)
        changed = policy.dump(result.memory) if is_stored and result.memory is not memory else None
        return Decided(loaded.snapshot, policy.name, result.plan, changed, decide_ms, loaded.said), result.memory

    def _policy_of(self, loaded: Loaded) -> tuple[Policy[Any], bool]:
        """Return the stored policy, and True; if it can no longer be built, the last one that could, and False.

        A release may drop a policy or a parameter that an installation still has stored: rounds go on with another
        policy, and ``GET /policies/active`` says why.
        """
        try:
            self._built = build_policy(loaded.policy, loaded.parameters)
        except PolicyConfigError as error:
            self._built = self._built or build_policy(self._settings.policy, {})
            log.error("policy.unbuildable", policy=loaded.policy, error=str(error), instead=self._built.name)
            return self._built, False
        return self._built, True

    def _report(self, done: Round, loaded: Loaded, policy: str) -> None:
        applied = done.applied
        note_round(done.trigger, applied, {"load": done.load_ms, "decide": done.decide_ms, "apply": done.apply_ms})
        if done.trigger is Trigger.ACTIVE or applied.starts or applied.preemptions:
            log.info(
                "round.held",
                round=applied.round,
                trigger=done.trigger.value,
                policy=policy,
                jobs=len(loaded.snapshot.jobs),
                starts=applied.starts,
                preemptions=applied.preemptions,
                holds=applied.holds,
                load_ms=round(done.load_ms, 1),
                decide_ms=round(done.decide_ms, 1),
                apply_ms=round(done.apply_ms, 1),
            )

    async def _trim(self) -> None:
        async with self._database.connection() as connection:
            await connection.execute(rounds.TRIM_PLANS, self._settings.plans_kept)
            await connection.execute(engines.FORGET)

    async def _sleep_until_woken(self) -> None:
        """Return at the next hint, and at the latest when the next check is due."""
        due_in_s = await self._database.run(
            rounds.due_in_s, self._settings.round_interval_s, self._settings.engine_new_jobs_s
        )
        again_in_s = self._look_again_at_s - time.monotonic()
        wait_s = min(self._settings.tick_s, max(min(due_in_s, again_in_s), 0.01))
        try:
            hints = await self._redis.xread({HINTS_STREAM: self._last_hint}, block=max(1, int(wait_s * 1e3)))
        except RedisError as error:
            log.warning("hints.unread", error=str(error) or type(error).__name__)
            await asyncio.sleep(wait_s)
            return
        if answer := cast("Answer", hints):
            entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
            self._last_hint = entries[-1][0]
            # Hints come in swarms: let the swarm arrive, then look once.
            since_s = time.monotonic() - self._passive_at_s
            await asyncio.sleep(max(0.01, self._settings.passive_interval_s - since_s))
