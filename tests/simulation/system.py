"""The system in one loop: scheduler, telemetry, admission, serving and three agents, all real, with a real PostgreSQL.

Each is a process that is killed between any two steps, and begun anew. What is between them, HTTP and Valkey, is a
stand-in that loses, repeats and delays; shims and devices are as in ``node.py``.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import orjson
from asyncpg.exceptions import PostgresError
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gpu_agent.gangs import Gang
from gpu_agent.inbox import Inbox
from gpu_agent.launch import Inputs
from gpu_agent.ranks import RankFolder
from gpu_agent.secrets import InputError
from gpu_agent.settings import AgentSettings
from services.admission.budgets import Budgets
from services.admission.capacity import Capacity, CapacityCache
from services.admission.jobs import Arrays, Jobs
from services.admission.repository.jobs import JobRepository
from services.admission.repository.submissions import SubmissionRepository
from services.admission.service import Committer, References, Submissions
from services.admission.steering import Command
from services.contracts.budgets import BudgetAction, BudgetQuantity, BudgetSpec
from services.contracts.commands import StartGang
from services.contracts.identity import Identity, Role
from services.contracts.jobs import SubmissionEntry
from services.contracts.nodes import Listener, NodeCredentials, NodeRegistration
from services.contracts.streams import COMMAND_FIELD
from services.core.cycle.plan import Reason
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.domain.errors import TransitionError
from services.db.database import IDLE_S, Database
from services.db.engine import create_engine, is_connection_error
from services.db.sealing import Sealer
from services.kit import ids
from services.kit.control_plane import ControlPlane
from services.kit.disk import DiskWatch
from services.kit.problems import ProblemError, unavailable
from services.kit.redis import JobHints
from services.kit.repeating import repeat
from services.scheduler import loop as scheduler_loop
from services.scheduler.loop import Scheduler
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.repository import outbox
from services.scheduler.settings import SchedulerSettings
from services.telemetry.enrolment import Enrolment
from services.telemetry.intensity import IntensitySource, KnownCurve
from services.telemetry.ledger import Ledger, merge_usages
from services.telemetry.repository.corrections import return_late
from services.telemetry.repository.rules import RULES
from services.telemetry.seals import Signer
from services.telemetry.service import Telemetry
from services.telemetry.settings import TelemetrySettings
from tests.simulation import model_servers, node, postgres
from tests.simulation.loop import EPOCH_S, BreachError, Clock, Process, Simulation
from tests.simulation.postgres import Server, SimulatedPostgres
from tests.simulation.valkey import Client, Store

NODES = ("n0", "n1", "n2")
STEPS = 200_000
LEASE_S, HEARTBEAT_S, MARGIN_S = 6.0, 1.5, 2.0
CALM_S = 300.0
"""Once nothing fails any more, everything has ended within this time."""
SETTLED_S = 15.0
"""And within this time after that, nothing runs any more."""
COUNTED_S = 12
"""Within this time of calm every budget is counted."""
UNTRUE_S = 25
"""A round is held within this time, after which a reason is true again."""
SECOND = "-2"
"""Follows the name of a service's second process."""
TENANT, OTHER, PROJECT = "t", "u", "p"
OPERATOR = model_servers.OPERATOR
JOIN = "a-token-that-lets-nodes-in"
ALWAYS_TRUE = frozenset(
    {
        "allocation_within_capacity",
        "ended_gangs_hold_nothing",
        "live_gangs_hold_their_devices",
        "one_gang_per_job",
        "no_job_in_limbo",
    }
)
TRUE_OF_THE_LEDGER = frozenset({"carbon_recomputes", "footprints_match_ledger", "no_line_after_its_gang"})
"""Rules of the product that no committed transaction may break; the others may be broken for a while."""
LATER_TRUE = frozenset(each.name for each in RULES) - {"no_line_before_its_gang"}
"""Rules that all hold once nothing runs; clocks that are set have intervals begin before gangs."""
LEDGER = frozenset({"energy_intervals", "energy_usages", "energy_days", "job_footprints", "allocations", "rank_ends"})
WATCHED = LEDGER | {
    *("jobs", "tenants", "submissions", "outbox", "budgets", "device_claims", "job_arrays"),
    *("pools", "pool_plans", "pool_instances"),
}
"""Tables whose changes may breach what must hold."""
ENDED = frozenset({"succeeded", "failed", "cancelled"})
ALONE = frozenset({"admission-commits", "scheduler-leader", "serving-turn"})
"""Connections of which a process has one, for as long as it lives; pools close what nobody has used for a while."""
UNUSED_S = 2 * IDLE_S


@functools.cache
def server() -> Server:
    """Return the PostgreSQL of this process, which ends with it."""
    return postgres.own_server()


class _NodeAgent(node._Agent):
    """An agent of a node of several."""

    def __init__(self, simulation: Simulation, settings: AgentSettings, world: World, valkey: Client) -> None:
        super().__init__(simulation, settings, cast(Any, world), valkey)
        name = settings.node_id
        registration = NodeRegistration(
            node_id=name,
            address=_address(name),
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
        self._world = world
        self._ports = cast(Any, SimpleNamespace(who_listens=self._who_listens))

    async def _fetch(self, start: StartGang, rank: Path) -> Inputs:
        if not self._simulation.is_calm and self._simulation.choices.below(2, often=0.05):
            raise InputError("it lacks a secret")
        return Inputs()

    def _who_listens(self, gangs: list[Gang]) -> dict[str, Listener]:
        running = {each.allocation_id for each in self._world.shims.running()}
        serving = [each.allocation_id for each in gangs if each.start is not None and each.start.spec.service]
        return {each: Listener.OWN if each in running else Listener.NONE for each in serving}


class _Shims(node._Shims):
    """The shims of all hosts.

    Attributes:
        agents: That run, by node.
        ends: How processes ended, by gang.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.agents: dict[str, _NodeAgent] = {}
        self.ends: dict[str, list[tuple[int, str]]] = {}

    def agent_of(self, folder: RankFolder) -> _NodeAgent | None:
        """Return the agent of the host on which a rank's folder is, if one runs."""
        return self.agents.get(_node_of(folder))

    def _lasts_s(self, start: StartGang) -> float:
        if start.spec.service is None:
            return 0.5 * (1 + self.simulation.choices.below(8))
        return 0.5 * self.simulation.choices.below(60, often=0.2) or 1e9

    async def _live(self, each: node._Shim) -> tuple[int, str]:
        end = await super()._live(each)
        self.ends.setdefault(each.start.allocation_id, []).append(end)
        return end

    def wrong(self) -> str | None:
        """Return a job of which two gangs run, or a device that two use."""
        running = [each for each in self.all.values() if each.runs]
        if len(running) < 2:
            return None
        gangs = {(each.start.job_id, each.start.allocation_id) for each in running}
        held = [(_node_of(each.folder), device) for each in running for device in each.start.devices]
        found = Counter[Any]([job for job, _ in gangs] + held)
        return next((str(each) for each, times in found.items() if times > 1), None)


class _Published(Store):
    """Valkey, and what it was ever given.

    Attributes:
        commands: By stream, gang and kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commands: set[str] = set()

    def xadd(self, name: str, fields: Any, maxlen: int | None = None, approximate: bool = True) -> str:
        """As of the real one."""
        if COMMAND_FIELD in fields:
            command = orjson.loads(fields[COMMAND_FIELD])
            self.commands.add(f"{name} {command.get('allocation_id')} {command['type']}")
        return super().xadd(name, fields, maxlen, approximate)


def _address(node: str) -> str:
    return f"10.0.0.{NODES.index(node)}"


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


def _is_to_be_expected(error: Exception) -> bool:
    """Whether an error says that what a process needs was away."""
    return is_connection_error(error) or isinstance(error, TimeoutError | DBAPIError | PostgresError | RedisError)


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
class World:
    """What all processes share, and what is known of them.

    Attributes:
        running: The processes, by name.
        accepted: Jobs that a user was told are accepted.
        clocks: Of the hosts, by the processes that are on them.
        deaths: How often anything was killed.
        instances: The states of model servers' instances, by id.
        draining_since_s: When each instance that drains began to.
        requests: When those requests began that a model server holds, by its gang.
        gangs: All that there have been.
        cancelled: Jobs whose user was told that they are.
        to_be_cancelled: Jobs that somebody wants cancelled.
        on_hold: Jobs whose user was told that they are held, and who never released them.
        released: Jobs that somebody wanted to go on.
        commands: That were not published, when last seen.
        unheard_until_s: Until when what a node says reaches nobody.
        next_death: The step at which a process dies next.
        has_two: The service of which two processes run.
        exceeded: Budgets that are used up, and in how many transactions their jobs were given GPUs since.
    """

    simulation: Simulation
    database: SimulatedPostgres
    store: _Published
    valkey: Client
    shims: _Shims
    running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    accepted: set[str] = field(default_factory=set[str])
    states: dict[str, str] = field(default_factory=dict[str, str])
    clocks: dict[str, Clock] = field(default_factory=dict[str, Clock])
    deaths: int = 0
    most_deaths: int = 0
    instances: dict[str, str] = field(default_factory=dict[str, str])
    draining_since_s: dict[str, float] = field(default_factory=dict[str, float])
    requests: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    gangs: set[str] = field(default_factory=set[str])
    exceeded: dict[str, int] = field(default_factory=dict[str, int])
    cancelled: set[str] = field(default_factory=set[str])
    to_be_cancelled: set[str] = field(default_factory=set[str])
    on_hold: set[str] = field(default_factory=set[str])
    released: set[str] = field(default_factory=set[str])
    commands: dict[str, str] = field(default_factory=dict[str, str])
    unheard_until_s: dict[str, float] = field(default_factory=dict[str, float])
    has_two: str | None = None
    next_death: int = 1 << 62

    def stands_still(self, name: str) -> bool:
        """Return whether a process is there and does nothing."""
        return name in self.running and self.running[name].process in self.simulation.loop.still

    async def ask(self, name: str, work: Callable[[Any], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        """Return what a process answers to a request over HTTP; it goes on with that when nobody waits any more.

        Raises:
            ProblemError: Its refusal; 503 where it does not answer.
        """
        draw = self.simulation.choices.below
        outcome = 0 if self.simulation.is_calm else draw(4, often=0.05)
        await asyncio.sleep(0.005 * draw(8, often=0.1))
        if name == self.has_two and draw(2):
            name += SECOND
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
        if not _is_to_be_expected(error):
            self.fail("nothing fails unseen", f"{name}: {error!r}")
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

        if self.simulation.loop.time() < self.unheard_until_s.get(name, 0.0):
            await asyncio.sleep(min(timeout_s, 1.0))
            raise unavailable("telemetry")
        found = await self.ask("telemetry", handle, timeout_s)
        return found.model_copy(deep=True) if not isinstance(found, NodeCredentials) else found

    def step(self) -> str | None:
        """Kill what is to die at this step."""
        if self.simulation.loop.steps >= self.next_death:
            for running in self.running.values():
                if running.dies_at_step is not None and self.simulation.loop.steps >= running.dies_at_step:
                    self.kill(running)
            self.note_deaths()
        return None

    def note_deaths(self) -> None:
        """Note at which step the next process dies."""
        steps = [each.dies_at_step for each in self.running.values() if each.dies_at_step is not None]
        self.next_death = min(steps, default=1 << 62)

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
                self.note_deaths()
            beginning = process.start(_outcome(self._begin(running, begin)))
            while process.is_alive:
                await asyncio.sleep(0.25)
                if beginning.done() and (error := beginning.result()[1]) is not None:
                    if not _is_to_be_expected(error):
                        self.fail("whoever begins fails for a fault outside", f"{name}: {error!r}")
                    self.kill(running)
            await asyncio.sleep((0.1, 1.0, 9.0, 0.1)[draw(4)])

    def calm_down(self) -> None:
        """Let nothing fail any more."""
        self.most_deaths = 0
        for each in self.running.values():
            each.dies_at_step = None
        self.database.restart()  # the last fault: no answer is still to come, which everybody would wait for
        self.simulation.calm_down()
        self.database.clock.ahead_s = 0.0

    async def _begin(self, running: _Running, begin: Callable[[], Awaitable[Any]]) -> None:
        running.serves = await begin()

    # --- invariants

    def check_committed(self, changed: frozenset[str]) -> None:
        """Check what a transaction that wrote to some tables has to leave true."""
        if many := [name for name in ALONE if self.database.most[name] > 1]:
            self.fail("who needs one connection has no more", str(many))
        if "energy_usages" in changed:
            self._check_lines(self.database.rows(f"{_LINES} ORDER BY ctid DESC LIMIT 16"))
        if changed & LEDGER:
            for name, detail in self.database.rows("EXECUTE of_the_ledger"):
                self.fail(str(name), str(detail))
        if not changed & WATCHED:
            return
        found: dict[str, list[Any]] = {name: [] for name in ("job", "gang", "instance", "plan", "budget", "command")}
        for name, detail in self.database.rows("EXECUTE invariants"):
            if name in found:
                found[name].append(orjson.loads(detail or ""))
            else:
                self.fail(str(name), str(detail))
        for job in found["job"]:
            self._check_end("job", job)
        for plan in found["plan"]:
            self._check_end("plan", plan)
        self._check_gangs(found["gang"], found["budget"])
        commands = {str(each["id"]): each["what"] for each in found["command"]}
        for each, what in self.commands.items():
            if each not in commands and what not in self.store.commands:
                self.fail("a command is published before it is forgotten", what)
        self.commands = commands
        for each in found["instance"]:
            self._check_instance(each)
        if lost := self.accepted - {job["id"] for job in found["job"]}:
            self.fail("accepted is kept", str(lost))

    def _check_lines(self, rows: Sequence[Any]) -> None:
        """The lines of an interval say what it says, which was compared with what devices drew."""
        lines: dict[tuple[str, int], dict[str, float]] = {}
        for name, sequence, owner, energy_j, basis in rows:
            if basis is None:
                lines.setdefault((name, int(sequence)), {})[owner or ""] = float(energy_j)
        for key, told in lines.items():
            if key not in self.shims.drawn.made:
                self.fail("the ledger has what devices drew", f"{key} was never measured")
            measured = merge_usages(self.shims.drawn.made[key][0].usages)
            for owner, energy_j in told.items():
                if owner not in measured or abs(measured[owner].gpu_energy_j - energy_j) > node.SLACK_J:
                    self.fail("the ledger has what devices drew", f"{key}: {owner} {energy_j}, and not {measured}")

    def check_ledger(self) -> None:
        """No time of a node is missing from the ledger, or in it twice."""
        self._check_lines(self.database.rows(_LINES))
        keys = self.database.rows("SELECT node_id, boot_id, sequence FROM energy_intervals")
        spans: dict[str, list[tuple[float, float]]] = {}
        for name, boot, sequence in keys:
            spans.setdefault(str(name), []).append(self.shims.drawn.made[str(boot), int(sequence or 0)][1:])
        for name, times in spans.items():
            for (_, end_s), (begin_s, _) in pairwise(sorted(times)):
                if abs(begin_s - end_s) > 1e-6:
                    self.fail("a node's time is in the ledger once", f"{name}: {end_s}, then {begin_s}")

    def _check_gangs(self, gangs: list[Any], budgets: list[Any]) -> None:
        over = {each["id"] for each in gangs if each["state"] == "ended"}
        for each in self.shims.all.values():
            if each.runs and each.process.is_alive and each.start.allocation_id in over:
                self.fail("what is over does not run", each.start.allocation_id)
        new = [each for each in gangs if each["id"] not in self.gangs]
        self.gangs.update(each["id"] for each in new)
        for each in new:
            if each["job"] in self.cancelled or each["job"] in self.on_hold:
                self.fail("what is cancelled or held is not started", each["id"])
        for budget, times in self.exceeded.items():
            tenant, _, project = budget.partition(" ")
            if any(
                each["tenant"] == tenant and project in ("", each["project"]) and not each["serves"] for each in new
            ):
                self.exceeded[budget] = times + 1
                if times:
                    self.fail("a budget is exceeded by no more than one grant", f"{budget}: {new}")
        exceeded = {f"{each['tenant']} {each['project']}" for each in budgets}
        self.exceeded = {budget: self.exceeded.get(budget, 0) for budget in sorted(exceeded)}

    def _check_instance(self, each: Any) -> None:
        name, state, before = each["id"], each["state"], self.instances.get(each["id"])
        if before == "ended" and state != "ended":
            self.fail("what ended is not run again", f"instance {name}: {state}")
        if state == "draining":
            self.draining_since_s.setdefault(name, self.simulation.loop.time())
        elif (since_s := self.draining_since_s.pop(name, None)) is not None and state == "stopping":
            is_late = each["drained_s"] >= model_servers.DRAIN_S
            held = [began_s for began_s in self.requests.get(each["gang"] or "", ()) if began_s < since_s]
            if held and not is_late and self.runs(each["gang"]):
                self.fail("an instance that is stopped after draining holds no request", f"{name}: since {held}")
        self.instances[name] = state

    def runs(self, gang: str) -> bool:
        """Whether a process of a gang runs."""
        return any(each.runs and each.start.allocation_id == gang for each in self.shims.all.values())

    def server_at(self, url: str) -> str | None:
        """Return the gang whose process answers at an address, if there is one."""
        for each in self.shims.all.values():
            if each.runs and urlsplit(url).netloc == f"{_address(_node_of(each.folder))}:{each.start.master_port}":
                return each.start.allocation_id
        return None

    def _check_end(self, what: str, row: Any) -> None:
        before = self.states.get(row["id"])
        if before in ENDED and row["state"] != before:
            self.fail("what ended is not run again", f"{what} {row['id']}: {before}, then {row['state']}")
        if what == "job" and row["state"] != before:
            self._check_outcome(row["id"], row["state"], row["gang"], row["shares"] or 0)
        self.states[row["id"]] = row["state"]

    def _check_outcome(self, job: str, state: str, gang: str | None, shares: int) -> None:
        ends = self.shims.ends.get(gang or "", [])
        if state == "succeeded":
            if not ends or any(code for code, _ in ends):
                self.fail("what has succeeded ended well", f"{gang}: {ends}")
        elif state == "failed" and len(ends) == shares > 0 and all(end == (0, "itself") for end in ends):
            self.fail("what ended well has succeeded", f"{gang}: {state}")
        if state == "cancelled" and job not in self.to_be_cancelled:
            self.fail("nothing is cancelled that nobody cancels", job)

    def fail(self, name: str, detail: str) -> None:
        """Note a breach, whoever is at work."""
        loop = self.simulation.loop
        loop.failure = loop.failure or BreachError(name, detail)


_INSTANCE = "(spec -> 'environment' ->> 'WATTSHIFT_INSTANCE')"


def _rules(names: frozenset[str]) -> list[str]:
    return [f"SELECT '{rule.name}', to_jsonb(q)::text FROM ({rule.query}) q" for rule in RULES if rule.name in names]


_LINES = "SELECT boot_id, sequence, owner, gpu_energy_j, basis FROM energy_usages"
_OF_THE_LEDGER = "PREPARE of_the_ledger AS " + " UNION ALL ".join(_rules(TRUE_OF_THE_LEDGER))
_INVARIANTS = "PREPARE invariants AS " + " UNION ALL ".join(
    [
        *_rules(ALWAYS_TRUE),
        """SELECT 'job', jsonb_build_object('id', j.id, 'state', j.state, 'gang', (
                SELECT id FROM allocations WHERE job_id = j.id ORDER BY generation DESC LIMIT 1), 'shares', (
                SELECT jsonb_array_length(shares) FROM allocations WHERE job_id = j.id
                 ORDER BY generation DESC LIMIT 1))::text FROM jobs j""",
        """SELECT 'command', jsonb_build_object('id', id, 'what', concat_ws(' ', stream, payload ->> 'allocation_id',
                                                                          payload ->> 'type'))::text FROM outbox""",
        "SELECT 'plan', jsonb_build_object('id', id, 'state', state)::text FROM pool_plans",
        """SELECT 'gang', jsonb_build_object('id', a.id, 'job', j.id, 'state', a.state, 'tenant', j.tenant_id,
                                        'project', j.project, 'serves', j.spec -> 'service' IS NOT NULL)::text
             FROM allocations a JOIN jobs j ON j.id = a.job_id""",
        """SELECT 'budget', jsonb_build_object('tenant', tenant_id, 'project', project)::text FROM budgets
            WHERE exceeded AND action = 'hold'""",
        """SELECT 'instance', jsonb_build_object('id', i.id, 'state', i.state, 'gang', a.id, 'drained_s',
                                             extract(epoch FROM i.stopping_at - i.draining_at))::text
             FROM pool_instances i LEFT JOIN allocations a ON a.job_id = i.job_id AND a.state <> 'ended'""",
        f"""SELECT 'an instance has one job', {_INSTANCE} FROM jobs WHERE spec -> 'service' IS NOT NULL
             GROUP BY {_INSTANCE} HAVING count(*) > 1""",
        f"""SELECT 'no job of a server is left without its instance', id FROM jobs j
             WHERE j.spec -> 'service' IS NOT NULL AND j.state NOT IN ('succeeded', 'failed', 'cancelled')
               AND NOT EXISTS (SELECT FROM pool_instances i WHERE i.id = {_INSTANCE} AND i.state <> 'ended')""",
        """SELECT 'an instance is ready with its job', i.id FROM pool_instances i
            WHERE i.state IN ('ready', 'draining') AND (i.job_id IS NULL OR i.url IS NULL)""",
        """SELECT 'the plan in force was applied', q.name FROM pools q
            WHERE q.plan_id IS NOT NULL AND NOT EXISTS (
                SELECT FROM pool_plans p WHERE p.id = q.plan_id AND p.pool = q.name AND p.outcome = 'applied')""",
        """SELECT 'a plan is made by whoever has claimed it', id FROM pool_plans
            WHERE (state = 'running') <> (claim IS NOT NULL) OR (state = 'succeeded') <> (result IS NOT NULL)""",
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


_POOLS = "SELECT name FROM pools"
_LEFT = "SELECT 'a command', payload::text FROM outbox UNION ALL SELECT 'a claim', allocation_id FROM device_claims"
_HELD = """
SELECT j.id FROM jobs j WHERE j.state = 'held' AND j.reason = 'budget_exceeded' AND NOT EXISTS (
    SELECT FROM budgets b
     WHERE b.tenant_id = j.tenant_id AND b.project IN ('', j.project) AND b.exceeded AND b.action = 'hold')
UNION ALL
SELECT j.id FROM jobs j JOIN budgets b ON b.tenant_id = j.tenant_id AND b.project IN ('', j.project)
 WHERE j.state = 'queued' AND j.spec -> 'service' IS NULL AND b.exceeded AND b.action = 'hold'
   AND j.queued_at < now() - interval '11 s'
"""
_MISCOUNTED = """
SELECT b.id, b.used, spent.used FROM budgets b, LATERAL (
    SELECT coalesce(sum(CASE b.quantity WHEN 'gpu_h' THEN u.gpus * extract(epoch FROM u.end_at - u.start_at) / 3600
                        ELSE (u.gpu_energy_j + u.cpu_energy_j + u.static_energy_j) / 3.6e6 END), 0) AS used
      FROM energy_usages u JOIN jobs j ON j.id = u.job_id
     WHERE j.tenant_id = b.tenant_id AND b.project IN ('', j.project)) AS spent
 WHERE b.used > spent.used * 1.001 + 1e-9 OR b.exceeded <> (b.used >= b.amount)
"""
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
        Reason.SET_ASIDE.value: False,
        Reason.NO_ELIGIBLE_NODE.value: has_room < needs,
        Reason.NOT_ENOUGH_FREE_GPUS.value: has_room < needs or others != "0",
        Reason.DEPENDENCY.value: False,
        Reason.ARRAY_LIMIT.value: False,
    }.get(reason, others != "0" or has_room < needs or not has_quota or pauses == "t")
    return None if is_so else f"{job} waits, it is said, for {reason}: {free} GPUs are free, it needs {least}"


async def _begin_telemetry(world: World) -> Telemetry:
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


async def _begin_scheduler(world: World, policy: str) -> Scheduler:
    settings = _scheduler_settings(policy)
    database = await Database.open(postgres.URL, size=settings.pool_size, application_name="scheduler")
    grid = _FlatOutlook(cast(Any, None), settings.zone, refresh_s=1e9, window_s=86_400, default_gco2_per_kwh=300)
    scheduler = Scheduler(settings, database, cast(Any, world.valkey), grid)
    world.simulation.loop.create_task(scheduler.run())
    return scheduler


async def _begin_admission(world: World) -> _Admission:
    engine = create_engine(postgres.URL, application_name="admission")
    hints = JobHints(cast(Any, world.valkey))
    committer = Committer(SubmissionRepository(postgres.URL), hints.give, max_jobs=20, patience_s=4)
    arrays = Arrays(engine, hints.give)

    async def read_capacity() -> Capacity:
        async with engine.connect() as connection:
            return await JobRepository(connection).capacity()

    submissions = Submissions(
        committer, CapacityCache(read_capacity, 5.0), References(engine), arrays.find, DiskWatch(None, 0)
    )
    budgets = Budgets(engine, hints.give)
    for work in (committer.run(), hints.run(), repeat(budgets.count, 10.0, failed="budgets.not_counted")):
        world.simulation.loop.create_task(work)
    return _Admission(submissions, Jobs(engine, hints.give), budgets, engine)


async def _begin_agent(world: World, settings: AgentSettings) -> _NodeAgent:
    agent = _NodeAgent(world.simulation, settings, world, Client(world.simulation, world.store))
    world.running[settings.node_id].agent = world.shims.agents[settings.node_id] = agent
    await agent.start()
    return agent


@contextmanager
def _a_world(simulation: Simulation) -> Iterator[tuple[World, Path]]:
    """Yield a world without processes, on a database of its own."""
    store, shims = _Published(), _Shims(simulation)
    with ExitStack() as stack:
        database = SimulatedPostgres(simulation, server())
        stack.callback(database.close)
        world = World(simulation, database, store, Client(simulation, store), shims)
        collector = SimpleNamespace(enable=lambda: None, disable=lambda: None)
        stack.enter_context(patch.object(scheduler_loop, "gc", collector))
        stack.enter_context(patch.object(ids, "_last", 0))
        stays = cast(Any, SimpleNamespace(oldest=outbox.oldest, delete=outbox.delete))
        folder = node.a_host(simulation, shims, stays)
        stack.enter_context(model_servers.stand_ins(world))
        database.trouble(4)
        yield world, folder


def play(simulation: Simulation) -> Coroutine[Any, Any, None]:
    """Users submit and steer jobs while processes die, connections end and clocks jump; at the end all has ended."""
    server()  # before virtual time begins, which would pass while it starts
    return _play(simulation)


async def _play(simulation: Simulation) -> None:
    draw = simulation.choices.below
    simulation.most_steps = STEPS
    with _a_world(simulation) as (world, folder):
        limits = {"max_active_jobs": 8, "max_gpus": (None, 3, 4)[draw(3)]}
        values = ", ".join(f"('{name}', '{orjson.dumps(limits).decode()}')" for name in (TENANT, OTHER))
        values += f", ('{model_servers.TENANT}', '{{}}')"
        world.database.rows(f"INSERT INTO tenants (id, limits) VALUES {values}")
        world.database.rows("SET plan_cache_mode = force_generic_plan; " + _INVARIANTS + "; " + _OF_THE_LEDGER)
        world.database.on_commit = world.check_committed
        world.most_deaths = (3, 0, 6, 12)[draw(4)]
        simulation.holds("processes die", world.step)
        simulation.holds("a job has one live gang at most, and a device one holder", world.shims.wrong)
        policy = ("fifo", "las", "joint")[draw(3)]
        kept = [
            ("telemetry", functools.partial(_begin_telemetry, world)),
            ("scheduler", functools.partial(_begin_scheduler, world, policy)),
            ("admission", functools.partial(_begin_admission, world)),
        ]
        serves = draw(3) > 0
        if serves:
            kept.append(("serving", functools.partial(model_servers.begin, world, JOIN)))
            kept.append(("planner", functools.partial(model_servers.begin_worker, world)))
        named = dict(kept)
        world.has_two = (None, "scheduler", "telemetry", "admission", "serving")[draw(5)]
        if world.has_two is not None and world.has_two in named:
            kept.append((world.has_two + SECOND, named[world.has_two]))
        else:
            world.has_two = None
        for name in NODES:
            place = {"node_id": name, "state_dir": folder / name, "data_dir": folder / name}
            settings = AgentSettings.model_construct(**cast(Any, node._settings() | place))
            kept.append((name, functools.partial(_begin_agent, world, settings)))
        processes = [simulation.loop.create_task(world.keep(name, begin)) for name, begin in kept]
        users = [simulation.start(_use(world, number)) for number in range(2 - serves + draw(2))]
        users.append(simulation.start(_budget(world)))
        if serves:
            users.append(simulation.start(model_servers.operate(world)))
            processes.append(simulation.loop.create_task(model_servers.visit(world)))
            processes.append(simulation.loop.create_task(model_servers.read(world)))
        disturbing = simulation.loop.create_task(_disturb(world))
        await asyncio.wait(users)
        disturbing.cancel()
        world.calm_down()
        untrue_for: dict[str, int] = {}
        if serves:
            await model_servers.insist(world, "serving", lambda it: it.pools.delete(model_servers.POOL, OPERATOR))
        for second in range(int(CALM_S)):
            await asyncio.sleep(1)
            if all(state in ENDED for state in world.states.values()) and not world.database.rows(_POOLS):
                break
            if second == COUNTED_S:
                await _spend(world)
            found = [said for row in world.database.rows(_WAITING) if (said := _untrue(row)) is not None]
            untrue_for = {said: untrue_for.get(said, 0) + 1 for said in found}
            long = [said for said, seconds in untrue_for.items() if seconds > UNTRUE_S]
            simulation.check("what waits has a reason that is true", not long, str(long))
        left = world.database.rows("SELECT id, state, reason, detail FROM jobs WHERE ended_at IS NULL")
        simulation.check("the queue moves, and what was accepted ends", not left, str(left))
        left = world.database.rows("SELECT id, state, reason FROM pool_instances WHERE state <> 'ended'")
        left += world.database.rows(_POOLS)
        simulation.check("every instance ends, and its pool is removed", not left, str(left))
        running: list[str] = []
        wrong: list[Any] = []
        for _ in range(int(SETTLED_S)):
            await asyncio.sleep(1)
            running = [each.allocation_id for each in world.shims.running()]
            if not running:
                break
        simulation.check("what ended does not run", not running, str(running))
        for _ in range(int(CALM_S)):
            wrong = world.database.rows(" UNION ALL ".join([*_rules(LATER_TRUE), _LEFT]))
            if not wrong:
                break
            await asyncio.sleep(1)
        simulation.check("all rules hold once nothing runs, and nothing is left", not wrong, str(wrong))
        world.check_ledger()
        await asyncio.sleep(UNUSED_S)
        unused = set(world.database.unused(UNUSED_S)) - ALONE
        simulation.check("every connection is given back", not unused, str(unused))
        for task in processes:
            task.cancel()


async def _budget(world: World) -> None:
    """Have a tenant or a project of it use no more than so much."""
    draw = world.simulation.choices.below
    for _ in range(draw(4)):
        spec = BudgetSpec(
            tenant_id=(TENANT, OTHER)[draw(2)],
            project=(None, PROJECT)[draw(2)],
            quantity=(BudgetQuantity.GPU_H, BudgetQuantity.KWH)[draw(2)],
            amount=(0.0005, 0.002, 0.005)[draw(3)],
            action=(BudgetAction.HOLD, BudgetAction.WARN)[draw(2, often=0.3)],
        )
        await model_servers.insist(world, "admission", lambda it, s=spec: it.budgets.put(OPERATOR, s))
        await asyncio.sleep(0.5 * draw(10))


async def _spend(world: World) -> None:
    """Check what budgets say of what was used, and do without them."""
    wrong = world.database.rows(_MISCOUNTED)
    world.simulation.check("a budget is what was used", not wrong, str(wrong))
    wrong = world.database.rows(_HELD)
    world.simulation.check("what a budget holds is beyond it", not wrong, str(wrong))
    known = await model_servers.insist(world, "admission", lambda it: it.budgets.list(OPERATOR))
    for each in known.items:
        await model_servers.insist(world, "admission", lambda it, b=each.id: it.budgets.remove(OPERATOR, b))


async def _disturb(world: World) -> None:
    """Restart the database, set its clock, wipe Valkey, kill shims and have processes stand still now and then."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(0.5 * (1 + draw(8)))
        match draw(8, often=0.6):
            case 1:
                world.database.restart()
            case 2:
                clocks = [world.database.clock, *world.clocks.values()]
                clocks[draw(len(clocks))].ahead_s += (-30.0, -1.0, 1.0, 30.0)[draw(4)]
            case 3:
                world.store.wipe()
            case 4:
                # What a killed shim leaves is ended by its agent; if that stands still, these are two faults at once.
                running = [
                    pid
                    for pid, each in world.shims.all.items()
                    if each.poll() is None and not world.stands_still(_node_of(each.folder))
                ]
                if running:
                    world.shims.kill(running[draw(len(running))])
            case 5:
                node_ = NODES[draw(len(NODES))]
                world.unheard_until_s[node_] = world.simulation.loop.time() + (3.0, 7.0, 10.0)[draw(3)]
            case 6:  # as where its host is busy, or its machine is paused
                left = {
                    _node_of(each.folder) for each in world.shims.all.values() if each.runs and each.poll() is not None
                }
                processes = [each.process for name, each in world.running.items() if name not in left]
                processes[draw(len(processes))].stand_still((1.0, 6.5, 12.0, 40.0)[draw(4)])
            case _:
                pass


async def _use(world: World, number: int) -> None:
    """Submit jobs, repeat what was not answered, and steer some of them."""
    draw = world.simulation.choices.below
    tenant = (TENANT, OTHER)[number % 2]
    caller = Identity(tenant_id=tenant, role=Role.USER, key_id="key")
    mine: list[str] = []
    for count in range(2 + draw(3)):
        await asyncio.sleep(0.25 * draw(8))
        has_key = draw(2) == 1
        names = [f"job{number}-{count}-{at}" for at in range(1 + draw(2))]
        entries = [_entry(draw, tenant, name, name if has_key else None) for name in names]
        for _ in range(8 if has_key else 1):
            try:
                answers = await world.ask("admission", lambda a, e=entries: a.submissions.submit(e), 6.0)
            except ProblemError:
                await asyncio.sleep(1)
                continue
            made = [orjson.loads(each.body)["id"] for each in answers if each.status == 201]
            mine += made
            world.accepted.update(made)
            break
        if mine and draw(3):
            await asyncio.sleep(0.25 * draw(10))
            job, command = mine[-1 - draw(len(mine))], (Command.CANCEL, Command.HOLD, Command.RELEASE)[draw(3)]
            steering = [_steer(world, caller, job, command)]
            if command is not Command.RELEASE and draw(3) == 1:  # two at once
                steering.append(_steer(world, caller, job, (Command.CANCEL, Command.HOLD)[command is Command.CANCEL]))
            await asyncio.gather(*steering)
            if command is Command.HOLD or len(steering) > 1:
                await asyncio.sleep(draw(4))
                await _until_released(world, caller, job)


def _entry(draw: Callable[[int], int], tenant: str, name: str, key: str | None) -> SubmissionEntry:
    low = 1 + draw(2) * draw(3)
    spec = {
        "name": name,
        "command": ["work"],
        "gpus": {"min": low, "max": low + draw(2)},
        "grace_s": 1.0,
        "max_restarts": draw(3),
        "progress": {"source": "http"},
        "project": (None, PROJECT)[draw(2)],
    }
    body = orjson.dumps(spec).decode()
    return SubmissionEntry(tenant_id=tenant, key_id="key", idempotency_key=key, batch=False, body=body)


async def _steer(world: World, caller: Identity, job: str, command: Command) -> None:
    if command is Command.CANCEL:
        world.to_be_cancelled.add(job)
    elif command is Command.RELEASE:
        world.released.add(job)
        world.on_hold.discard(job)
    try:
        await world.ask("admission", lambda a: a.jobs.steer(caller, job, command), 6.0)
    except (ProblemError, TransitionError):
        return
    if command is Command.CANCEL:
        world.cancelled.add(job)
    elif command is Command.HOLD and job not in world.released:
        world.on_hold.add(job)


async def _until_released(world: World, caller: Identity, job: str) -> None:
    world.released.add(job)
    world.on_hold.discard(job)
    for _ in range(60):
        try:
            await world.ask("admission", lambda a: a.jobs.steer(caller, job, Command.RELEASE), 6.0)
        except TransitionError:
            return
        except ProblemError:
            await asyncio.sleep(1)
            continue
        return
