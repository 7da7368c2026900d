"""The system in one loop: scheduler, telemetry, admission and three agents, all real, with a real PostgreSQL.

Each is a process that is killed between any two steps, and begun anew. What is between them, HTTP and Valkey, is a
stand-in that loses, repeats and delays; shims and devices are as in ``node.py``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import orjson
from sqlalchemy.ext.asyncio import AsyncEngine

from gpu_agent.inbox import Inbox
from gpu_agent.ranks import RankFolder
from gpu_agent.settings import AgentSettings
from services.admission.arrays import Arrays
from services.admission.budgets import Budgets
from services.admission.capacity import Capacity, CapacityCache
from services.admission.commits import Committer
from services.admission.hints import JobHints
from services.admission.jobs import Jobs
from services.admission.references import References
from services.admission.repository.jobs import JobRepository
from services.admission.repository.submissions import SubmissionRepository
from services.admission.service import Submissions
from services.admission.steering import Command
from services.contracts.identity import Identity, Role
from services.contracts.jobs import SubmissionEntry
from services.contracts.nodes import NodeCredentials, NodeRegistration
from services.core.cycle.plan import Reason
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.domain.errors import TransitionError
from services.db.database import Database
from services.db.engine import create_engine
from services.db.sealing import Sealer
from services.kit import ids
from services.kit.control_plane import ControlPlane
from services.kit.problems import ProblemError, unavailable
from services.kit.repeating import repeat
from services.scheduler import loop as scheduler_loop
from services.scheduler.loop import Scheduler
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.repository import outbox
from services.scheduler.settings import SchedulerSettings
from services.telemetry.enrolment import Enrolment
from services.telemetry.intensity import IntensitySource, KnownCurve
from services.telemetry.ledger import Ledger
from services.telemetry.repository.corrections import return_late
from services.telemetry.repository.rules import RULES
from services.telemetry.seals import Signer
from services.telemetry.service import Telemetry
from services.telemetry.settings import TelemetrySettings
from tests.simulation import node, postgres
from tests.simulation.loop import EPOCH_S, BreachError, Clock, Process, Simulation
from tests.simulation.postgres import Losses, Server, SimulatedPostgres
from tests.simulation.valkey import Client, Store

NODES = ("n0", "n1", "n2")
STEPS = 60_000
LEASE_S, HEARTBEAT_S, MARGIN_S = 6.0, 1.5, 2.0
CALM_S = 300.0
"""Once nothing fails any more, everything has ended within this time."""
SETTLED_S = 15.0
"""And within this time after that, nothing runs any more."""
UNTRUE_S = 25
"""A round is held within this time, after which a reason is true again."""
TENANT, OTHER = "t", "u"
JOIN = "a-token-that-lets-nodes-in"
ALWAYS_TRUE = frozenset(
    {
        "allocation_within_capacity",
        "ended_gangs_hold_nothing",
        "live_gangs_hold_their_devices",
        "one_gang_per_job",
        "no_job_in_limbo",
        "carbon_recomputes",
        "footprints_match_ledger",
        "no_line_after_its_gang",
    }
)
"""Rules of the product that no committed transaction may break; the others may be broken for a while."""
ENDED = frozenset({"succeeded", "failed", "cancelled"})


@functools.cache
def server() -> Server:
    """Return the PostgreSQL of this process, which ends with it."""
    return postgres.own_server()


class _NodeAgent(node._Agent):
    """An agent of a node of several."""

    def __init__(self, simulation: Simulation, settings: AgentSettings, world: _World, valkey: Client) -> None:
        super().__init__(simulation, settings, cast(Any, world), valkey)
        name = settings.node_id
        registration = NodeRegistration(
            node_id=name,
            address=f"10.0.0.{NODES.index(name)}",
            agent_url="",
            devices=self.devices,
            driver="simulated",
            host_power=self._host().source,
        )
        enrolment = SimpleNamespace(
            until_enrolled=node._nothing, renew=node._nothing, refresh=node._nothing, refused=lambda: None, secret=_join
        )
        self.plane = ControlPlane(cast(Any, world), cast(Any, enrolment), registration)
        self.inbox = Inbox(cast(Any, valkey), name, self.gangs, settings.retry_s)


class _Shims(node._Shims):
    """The shims of all hosts."""

    agents: dict[str, _NodeAgent]

    def agent_of(self, folder: RankFolder) -> _NodeAgent | None:
        """Return the agent of the host on which a rank's folder is, if one runs."""
        return self.agents.get(_node_of(folder))


def _node_of(folder: RankFolder) -> str:
    return folder.path.parents[1].name


async def _join() -> str:
    return JOIN


class _FlatIntensity(IntensitySource):
    """What a carbon service would say that always says the same."""

    async def _current(self, zone: str, end_s: float) -> KnownCurve | None:
        return KnownCurve(_flat(), Signal.AVERAGE_DIRECT, end_s)


class _FlatOutlook(CarbonWatch):
    async def _refresh(self, zone: str) -> None: ...


@functools.cache
def _flat() -> CarbonCurve:
    return CarbonCurve(np.array([EPOCH_S - 86_400]), np.array([300.0]), EPOCH_S + 10 * 86_400, np.array([False]))


@functools.cache
def _telemetry_settings() -> TelemetrySettings:
    return cast(Any, TelemetrySettings)(
        WATTSHIFT_SERVICE_TOKEN=JOIN,
        DATABASE_URL=postgres.URL,
        WATTSHIFT_NODE_JOIN_TOKEN=JOIN,
        node_redis="shared",
        lease_ttl_s=LEASE_S,
        heartbeat_interval_s=HEARTBEAT_S,
        pool_size=4,
    )


@functools.cache
def _scheduler_settings(policy: str) -> SchedulerSettings:
    return cast(Any, SchedulerSettings)(
        WATTSHIFT_SERVICE_TOKEN=JOIN,
        DATABASE_URL=postgres.URL,
        policy=policy,
        round_interval_s=20,
        lease_margin_s=MARGIN_S,
        node_return_s=1,
        start_timeout_s=30,
        restart_pause_s=1,
        republish_after_s=3,
        pool_size=4,
    )


async def _outcome(work: Coroutine[Any, Any, Any]) -> tuple[Any, Exception | None]:
    """Return what a handler answers, or why it does not."""
    try:
        return await work, None
    except Exception as error:
        return None, error


@dataclass(eq=False)
class _Running:
    """A process that runs, and what others ask of it."""

    name: str
    process: Process
    serves: Any = None
    dies_at_step: int | None = None
    agent: _NodeAgent | None = None


@dataclass
class _Admission:
    submissions: Submissions
    jobs: Jobs
    budgets: Budgets
    engine: AsyncEngine


@dataclass
class _World:
    """What all processes share, and what is known of them.

    Attributes:
        running: The processes, by name.
        accepted: Jobs that a user was told are accepted.
        clocks: Of the hosts, by the processes that are on them.
        deaths: How often anything was killed.
    """

    simulation: Simulation
    database: SimulatedPostgres
    store: Store
    valkey: Client
    shims: _Shims
    running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    accepted: dict[str, str] = field(default_factory=dict[str, str])
    states: dict[str, str] = field(default_factory=dict[str, str])
    clocks: dict[str, Clock] = field(default_factory=dict[str, Clock])
    deaths: int = 0
    most_deaths: int = 0

    async def ask(self, name: str, work: Callable[[Any], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        """Return what a process answers to a request over HTTP; it goes on with that when nobody waits any more.

        Raises:
            ProblemError: Its refusal; 503 where it does not answer.
        """
        draw = self.simulation.choices.below
        outcome = 0 if self.simulation.is_calm else draw(4, often=0.05)
        await asyncio.sleep(0.005 * draw(8, often=0.1))
        found = self.running.get(name)
        if outcome == 1 or found is None or found.serves is None:
            raise unavailable(name)
        asked = found.process.start(_outcome(work(found.serves)))
        if outcome == 3:  # it was sent again on its way
            found.process.start(_outcome(work(found.serves)))
        await asyncio.wait([asked], timeout=timeout_s)
        if outcome == 2 or not asked.done() or asked.cancelled() or not found.process.is_alive:
            raise unavailable(name)
        answer, error = asked.result()
        if error is None:
            return answer
        if isinstance(error, ProblemError | TransitionError):
            raise error
        raise unavailable(name)  # as the handlers of the real process have it

    async def call(
        self, method: str, path: str, answer: Any, *, body: Any, headers: Any, timeout_s: float = 10.0
    ) -> Any:
        """Answer a call of a node to telemetry, as ``ServiceClient.call``."""
        *_, name, what = path.split("/")
        token = headers["authorization"].partition(" ")[2]
        sent = body.model_copy(deep=True)

        async def handle(telemetry: Telemetry) -> Any:
            match what:
                case "register":
                    return await telemetry.register(sent, token)
                case "heartbeat":
                    return await telemetry.heartbeat(name, token, sent)
                case "energy":
                    return await telemetry.store_energy(name, token, sent)
                case _:
                    raise unavailable("telemetry")

        found = await self.ask("telemetry", handle, timeout_s)
        return found.model_copy(deep=True) if not isinstance(found, NodeCredentials) else found

    def step(self) -> str | None:
        """Kill what is to die at this step."""
        for running in self.running.values():
            if running.dies_at_step is not None and self.simulation.loop.steps >= running.dies_at_step:
                self.kill(running)
        return None

    def kill(self, running: _Running) -> None:
        """End a process, as ``kill -9`` does."""
        if running.process.is_alive:
            running.dies_at_step = None
            self.deaths += 1
            running.process.kill()
            self.database.died(running.process)
            if running.agent is not None:
                running.agent.lose_lock()
                del self.shims.agents[running.name]
            running.serves = running.agent = None

    async def keep(self, name: str, begin: Callable[[], Awaitable[Any]]) -> None:
        """Have a process run, whatever kills it, until the world ends."""
        draw = self.simulation.choices.below
        clock = self.clocks.setdefault(name, Clock())
        while True:
            process = self.simulation.process(clock)
            running = self.running[name] = _Running(name, process)
            if self.deaths < self.most_deaths and draw(2):
                running.dies_at_step = self.simulation.loop.steps + 1 + int(4 ** (0.25 * draw(28)))
            beginning = process.start(_outcome(self._begin(running, begin)))
            while process.is_alive:
                await asyncio.sleep(0.25)
                if beginning.done() and beginning.result()[1] is not None:
                    self.kill(running)
            await asyncio.sleep((0.1, 1.0, 12.0)[draw(3)])

    async def _begin(self, running: _Running, begin: Callable[[], Awaitable[Any]]) -> None:
        running.serves = await begin()

    # --- invariants

    def check_committed(self) -> None:
        """Check what every committed transaction has to leave true."""
        rows = self.database.rows("EXECUTE invariants")
        for name, detail in rows:
            if name == "job":
                self._check_job(orjson.loads(detail or ""))
            elif name != "over":
                self.fail(str(name), str(detail))
        known = {orjson.loads(detail or "")["id"] for name, detail in rows if name == "job"}
        over = {detail for name, detail in rows if name == "over"}
        for each in self.shims.all.values():
            if each.runs and each.process.is_alive and each.start.allocation_id in over:
                self.fail("what is over does not run", each.start.allocation_id)
        if lost := self.accepted.keys() - known:
            self.fail("accepted is kept", str(lost))

    def _check_job(self, job: Any) -> None:
        before = self.states.get(job["id"])
        if before in ENDED and job["state"] != before:
            self.fail("what ended is not run again", f"{job['id']}: {before}, then {job['state']}")
        self.states[job["id"]] = job["state"]

    def fail(self, name: str, detail: str) -> None:
        """Note a breach, whoever is at work."""
        loop = self.simulation.loop
        loop.failure = loop.failure or BreachError(name, detail)

    def running_twice(self) -> str | None:
        """Return a job of which two gangs run."""
        gangs = {(each.job_id, each.allocation_id) for each in self.shims.running()}
        return node._twice(job for job, _ in sorted(gangs))

    def held_twice(self) -> str | None:
        """Return a device that two gangs use."""
        held = [
            (_node_of(each.folder), device, each.start.allocation_id)
            for each in self.shims.all.values()
            if each.runs
            for device in each.start.devices
        ]
        return node._twice((where, device) for where, device, _ in held)


_INVARIANTS = "PREPARE invariants AS " + " UNION ALL ".join(
    [f"SELECT '{rule.name}', to_jsonb(q)::text FROM ({rule.query}) q" for rule in RULES if rule.name in ALWAYS_TRUE]
    + [
        "SELECT 'job', jsonb_build_object('id', id, 'state', state, 'reason', reason)::text FROM jobs",
        "SELECT 'over', id FROM allocations WHERE state = 'ended'",
        """SELECT 'one holder a device', node_id || ' ' || device FROM (
            SELECT s.node_id, d.device FROM allocations a
              CROSS JOIN LATERAL jsonb_to_recordset(a.shares) AS s (node_id text, devices jsonb)
              CROSS JOIN LATERAL jsonb_array_elements(s.devices) AS d (device)
             WHERE a.state <> 'ended'
               AND NOT EXISTS (SELECT FROM rank_ends e WHERE e.allocation_id = a.id AND e.node_id = s.node_id)
             GROUP BY 1, 2 HAVING count(*) > 1) AS held""",
        """SELECT 'what ended is not run again', a.id FROM allocations a JOIN jobs j ON j.id = a.job_id
            WHERE j.state IN ('succeeded', 'failed', 'cancelled') AND a.state <> 'ended'""",
        """SELECT 'quotas are kept', t.id || ' holds ' || held.gpus FROM tenants t, LATERAL (
            SELECT coalesce(sum(a.gpus), 0) AS gpus FROM allocations a JOIN jobs j ON j.id = a.job_id
             WHERE j.tenant_id = t.id AND a.state <> 'ended') AS held
            WHERE held.gpus > (t.limits ->> 'max_gpus')::int""",
        """SELECT 'quotas are kept', t.id || ' has ' || live.jobs FROM tenants t, LATERAL (
            SELECT count(*) AS jobs FROM jobs j WHERE j.tenant_id = t.id
               AND j.state NOT IN ('succeeded', 'failed', 'cancelled')) AS live
            WHERE live.jobs > (t.limits ->> 'max_active_jobs')::int""",
    ]
)


_ADDS_UP = next(rule.query for rule in RULES if rule.name == "ledger_adds_up")
_WAITING = """
SELECT j.id, j.reason, j.not_before > now() AS pauses,
       coalesce((j.spec -> 'gpus' ->> 'min')::int, 1) AS least,
       (SELECT count(*) FROM nodes n, jsonb_array_elements(n.devices) WHERE n.state = 'up' AND n.lease_until > now()
           AND NOT n.draining AND n.closed IS NULL)
           - (SELECT count(*) FROM device_claims c JOIN nodes n ON n.id = c.node_id
               WHERE n.state = 'up' AND n.lease_until > now()) AS free,
       (t.limits ->> 'max_gpus')::int - (
           SELECT coalesce(sum(a.gpus), 0) FROM allocations a JOIN jobs k ON k.id = a.job_id
            WHERE k.tenant_id = t.id AND a.state <> 'ended') AS left,
       (SELECT count(*) FROM jobs o WHERE o.state = 'queued' AND o.id <> j.id) AS others
  FROM jobs j JOIN tenants t ON t.id = j.tenant_id
 WHERE j.state = 'queued'
"""


def _untrue(row: tuple[str | None, ...]) -> str | None:
    """Return what is not true of why a job waits; None if it may be so."""
    job, reason, pauses, least, free, left, others = row
    needs, has_room, has_quota = int(least or 1), int(free or 0), left is None or int(left) >= int(least or 1)
    is_so = {
        None: False,
        Reason.TENANT_QUOTA.value: not has_quota,
        Reason.BACKING_OFF.value: pauses == "t",
        Reason.NO_ELIGIBLE_NODE.value: has_room < needs,
        Reason.NOT_ENOUGH_FREE_GPUS.value: has_room < needs or others != "0",
        Reason.DEPENDENCY.value: False,
        Reason.ARRAY_LIMIT.value: False,
    }.get(reason, others != "0" or has_room < needs or not has_quota or pauses == "t")
    return None if is_so else f"{job} waits, it is said, for {reason}: {free} GPUs are free, it needs {least}"


async def _begin_telemetry(world: _World) -> Telemetry:
    settings = _telemetry_settings()
    database = await Database.open(postgres.URL, size=settings.pool_size, application_name="telemetry")
    redis = cast(Any, world.valkey)
    intensities = _FlatIntensity(cast(Any, None), cast(Any, None))
    enrolment = Enrolment(settings, database, None)
    ledger = Ledger(database, intensities, settings.pue)
    sealer = Sealer(JOIN)
    signer = Signer(database, sealer)
    world.simulation.loop.create_task(repeat(lambda: signer.use(return_late), 30.0, failed="ledger.not_given_back"))
    return Telemetry(settings, database, redis, ledger, sealer, enrolment, intensities)


async def _begin_scheduler(world: _World, policy: str) -> Scheduler:
    settings = _scheduler_settings(policy)
    database = await Database.open(postgres.URL, size=settings.pool_size, application_name="scheduler")
    grid = _FlatOutlook(cast(Any, None), settings.zone, refresh_s=1e9, window_s=86_400, default_gco2_per_kwh=300)
    scheduler = Scheduler(settings, database, cast(Any, world.valkey), grid)
    world.simulation.loop.create_task(scheduler.run())
    return scheduler


async def _begin_admission(world: _World) -> _Admission:
    engine = create_engine(postgres.URL, application_name="admission")
    hints = JobHints(cast(Any, world.valkey))
    committer = Committer(SubmissionRepository(postgres.URL), hints.give, max_jobs=20, patience_s=4)
    arrays = Arrays(engine, hints.give)

    async def read_capacity() -> Capacity:
        async with engine.connect() as connection:
            return await JobRepository(connection).capacity()

    submissions = Submissions(committer, CapacityCache(read_capacity, 5.0), References(engine), arrays.find)
    budgets = Budgets(engine, hints.give)
    for work in (committer.run(), hints.run(), repeat(budgets.count, 10.0, failed="budgets.not_counted")):
        world.simulation.loop.create_task(work)
    return _Admission(submissions, Jobs(engine, hints.give), budgets, engine)


async def _begin_agent(world: _World, settings: AgentSettings) -> _NodeAgent:
    agent = _NodeAgent(world.simulation, settings, world, Client(world.simulation, world.store))
    world.running[settings.node_id].agent = world.shims.agents[settings.node_id] = agent
    await agent.start()
    return agent


@contextmanager
def _a_world(simulation: Simulation) -> Iterator[tuple[_World, Path]]:
    """Yield a world without processes, on a database of its own."""
    draw = simulation.choices.below
    store, shims = Store(), _Shims(simulation)
    shims.agents = {}
    with ExitStack() as stack:
        database = SimulatedPostgres(simulation, server())
        stack.callback(database.close)
        world = _World(simulation, database, store, Client(simulation, store), shims)
        collector = SimpleNamespace(enable=lambda: None, disable=lambda: None)
        stack.enter_context(patch.object(scheduler_loop, "gc", collector))
        stack.enter_context(patch.object(ids, "_last", 0))
        stays = cast(Any, SimpleNamespace(oldest=outbox.oldest, delete=outbox.delete))
        folder = stack.enter_context(node._a_host(simulation, shims, stays))
        level = draw(4)
        database.losses = Losses(*(rate * level for rate in (0.01, 0.002, 0.01, 0.001)))
        yield world, folder


def play(simulation: Simulation) -> Coroutine[Any, Any, None]:
    """Users submit and steer jobs while processes die, connections end and clocks jump; at the end all has ended."""
    server()  # before virtual time begins, which would pass while it starts
    return _play(simulation)


async def _play(simulation: Simulation) -> None:
    draw = simulation.choices.below
    simulation.most_steps = STEPS
    with _a_world(simulation) as (world, folder):
        limits = {"max_active_jobs": 12, "max_gpus": (None, 3, 4)[draw(3)]}
        values = ", ".join(f"('{name}', '{orjson.dumps(limits).decode()}')" for name in (TENANT, OTHER))
        world.database.rows(f"INSERT INTO tenants (id, limits) VALUES {values}")
        world.database.rows("SET plan_cache_mode = force_generic_plan; " + _INVARIANTS)
        world.database.on_commit = world.check_committed
        world.most_deaths = (3, 0, 6, 12)[draw(4)]
        simulation.holds("processes die", world.step)
        simulation.holds("a job has one live gang at most", world.running_twice)
        simulation.holds("a device has one holder at most", world.held_twice)
        policy = ("fifo", "las", "joint")[draw(3)]
        kept = [
            ("telemetry", functools.partial(_begin_telemetry, world)),
            ("scheduler", functools.partial(_begin_scheduler, world, policy)),
            ("admission", functools.partial(_begin_admission, world)),
        ]
        for name in NODES:
            place = {"node_id": name, "state_dir": folder / name, "data_dir": folder / name}
            settings = AgentSettings.model_construct(**cast(Any, node._settings() | place))
            kept.append((name, functools.partial(_begin_agent, world, settings)))
        processes = [simulation.loop.create_task(world.keep(name, begin)) for name, begin in kept]
        users = [simulation.start(_use(world, number)) for number in range(1 + draw(3))]
        disturbing = simulation.loop.create_task(_disturb(world))
        await asyncio.wait(users)
        disturbing.cancel()
        world.most_deaths = 0
        for each in world.running.values():
            each.dies_at_step = None
        world.database.restart()  # the last fault: no answer is still to come, which everybody would wait for
        simulation.calm_down()
        world.database.clock.ahead_s = 0.0
        untrue_for: dict[str, int] = {}
        for _ in range(int(CALM_S)):
            await asyncio.sleep(1)
            if all(state in ENDED for state in world.states.values()):
                break
            found = [said for row in world.database.rows(_WAITING) if (said := _untrue(row)) is not None]
            untrue_for = {said: untrue_for.get(said, 0) + 1 for said in found}
            long = [said for said, seconds in untrue_for.items() if seconds > UNTRUE_S]
            simulation.check("what waits has a reason that is true", not long, str(long))
        left = world.database.rows("SELECT id, state, reason, detail FROM jobs WHERE ended_at IS NULL")
        simulation.check("the queue moves, and what was accepted ends", not left, str(left))
        running: list[str] = []
        for _ in range(int(SETTLED_S)):
            await asyncio.sleep(1)
            running = [each.allocation_id for each in world.shims.running()]
            if not running:
                break
        simulation.check("what ended does not run", not running, str(running))
        lines = world.database.rows(_ADDS_UP)
        simulation.check("the ledger adds up", not lines, str(lines))
        for task in processes:
            task.cancel()


async def _disturb(world: _World) -> None:
    """Restart the database, set its clock, wipe Valkey and kill shims now and then."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(1 + draw(8))
        match draw(8, often=0.3):
            case 1:
                world.database.restart()
            case 2:
                clocks = [world.database.clock, *world.clocks.values()]
                clocks[draw(len(clocks))].ahead_s += (-30.0, -1.0, 1.0, 30.0)[draw(4)]
            case 3:
                world.store.wipe()
            case 4:
                running = [pid for pid, each in world.shims.all.items() if each.poll() is None]
                if running:
                    world.shims.kill(running[draw(len(running))])
            case _:
                pass


async def _use(world: _World, number: int) -> None:
    """Submit jobs, repeat what was not answered, and steer some of them."""
    draw = world.simulation.choices.below
    tenant = (TENANT, OTHER)[number % 2]
    caller = Identity(tenant_id=tenant, role=Role.USER, key_id="key")
    mine: list[str] = []
    for count in range(1 + draw(3)):
        await asyncio.sleep(0.5 * draw(8))
        low = 1 + draw(2) * draw(3)
        spec = {
            "name": f"job{number}-{count}",
            "command": ["work"],
            "gpus": {"min": low, "max": low + draw(2)},
            "grace_s": 1.0,
            "max_restarts": draw(3),
            "progress": {"source": "http"},
        }
        key = f"k{number}-{count}" if draw(2) else None
        entry = SubmissionEntry(
            tenant_id=tenant, key_id="key", idempotency_key=key, batch=False, body=orjson.dumps(spec).decode()
        )
        for _ in range(8 if key else 1):
            try:
                (answer,) = await world.ask("admission", lambda a, e=entry: a.submissions.submit([e]), 6.0)
            except ProblemError:
                await asyncio.sleep(1)
                continue
            if answer.status == 201:
                mine.append(orjson.loads(answer.body)["id"])
                world.accepted[mine[-1]] = spec["name"]
                break
        if mine and draw(3) == 1:
            await asyncio.sleep(0.5 * draw(10))
            job, command = mine[draw(len(mine))], (Command.CANCEL, Command.HOLD, Command.RELEASE)[draw(3)]
            with suppress(ProblemError, TransitionError):
                await world.ask("admission", lambda a, j=job, c=command: a.jobs.steer(caller, j, c), 6.0)
            if command is Command.HOLD:
                await asyncio.sleep(draw(6))
                await _until_released(world, caller, job)


async def _until_released(world: _World, caller: Identity, job: str) -> None:
    for _ in range(60):
        try:
            await world.ask("admission", lambda a: a.jobs.steer(caller, job, Command.RELEASE), 6.0)
        except TransitionError:
            return
        except ProblemError:
            await asyncio.sleep(1)
            continue
        return
