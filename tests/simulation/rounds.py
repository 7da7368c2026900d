"""The scheduler's loop on virtual time: who leads, when a round is held, and what is kept from one round to the next.

Real is ``Scheduler``. What a round is made of is a stand-in: one state with a version, which a plan moves on if it was
made from the newest, and others change meanwhile. Processes lose the lead, fail, are killed or end, and begin again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from redis.exceptions import RedisError

from services.contracts.streams import HINTS_STREAM
from services.core.cycle.gates import Withheld
from services.core.cycle.snapshot import Trigger
from services.core.domain.errors import PolicyConfigError
from services.core.domain.reasons import Reason
from services.kit.tasks import end_tasks
from services.scheduler import loop as scheduler_loop
from services.scheduler.loop import LATE_AFTER_S, Scheduler
from services.scheduler.planning.apply import Applied, Decided, StalePlanError
from services.scheduler.planning.snapshot import Loaded
from tests.simulation.loop import Simulation
from tests.simulation.valkey import Client, Store

TICK_S, ROUND_S, PASSIVE_S, POWER_S = 4.0, 11.0, 0.5, 9.0
SOON_S = 2.5
"""What a turn may take if nothing fails: a round is held so soon after it is due, or after a hint."""
LEFT_S = 1.0
"""Within this time of losing the lead, a process has no helper any more."""
HUNG_S = 90.0
KEPT = 2
HELPERS = ("relay", "nodes", "savings", "door")
AWAY = ConnectionError("lost")
FAILURES = (ConnectionError, RedisError)


class _State:
    """What the database has.

    Attributes:
        memories: What the policy remembers, by version.
        changes: How often something was changed; ``seen`` of them by a round.
        calm_s: Since when nothing fails any more.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.version = self.changes = self.seen = self.plans = self.points = 0
        self.memories: dict[int, int | None] = {0: None}
        self.active_s = -math.inf
        self.holder: _Process | None = None
        self.policy: str | None = None
        self.is_full = False
        self.calm_s = math.inf
        self.hints = Store()

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self.simulation.loop.time()

    def change(self, *, is_told: bool) -> None:
        """Have a user, a node or another process change something."""
        self.changes += 1
        self.version += 1
        self.memories[self.version] = self.memories[self.version - 1]
        if is_told:
            self.hints.xadd(HINTS_STREAM, {"hint": "job"})

    async def ask(self, work: Callable[[], Any]) -> Any:
        """Ask the database."""
        return await self.simulation.boundary(work, AWAY)


class _Leadership:
    """Who alone decides, in the place of the real one."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    @property
    def is_held(self) -> bool:
        """Whether this process led when it last looked."""
        return self._process.leads

    async def hold(self) -> bool:
        """As of the real one."""
        process, state = self._process, self._process.state
        process.turned_s = state.now_s
        await asyncio.sleep(0)
        holder = state.holder
        if holder is None or not holder.process.is_alive:
            state.holder = process
        had, process.leads = process.leads, state.holder is process
        if not process.leads:
            process.left_s = state.now_s if had else process.left_s
            process.trusts_nothing = True
        elif not had:
            process.gained_s, process.has_begun = state.now_s, False
        return process.leads

    def release(self) -> None:
        """As of the real one."""
        process = self._process
        process.state.simulation.check("who no longer leads has no helpers", not +process.helping, str(process.helping))
        process.leads = False
        if process.state.holder is process:
            process.state.holder = None


class _Helper:
    """What runs beside the loop, in the place of a relay and the others."""

    def __init__(self, process: _Process, name: str) -> None:
        self._process, self._name = process, name

    async def run(self) -> None:
        """Run until cancelled."""
        self._process.helping[self._name] += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._process.helping[self._name] -= 1

    def wake(self) -> None:
        """Publish what there is."""
        process = self._process
        process.state.simulation.check("nobody is woken for nothing", process.has_commands)
        process.has_commands = False

    def act(self) -> None:
        """Power nodes as a plan says."""
        self._process.is_to_act = False

    async def look(self) -> int:
        """Begin a turn."""
        process, check = self._process, self._process.state.simulation.check
        await asyncio.sleep(0)
        check("only who leads decides", process.leads, process.name)
        check("garbage is collected between rounds", process.collects)
        hasty_s = process.round_s + PASSIVE_S - process.state.now_s
        check("passive rounds are some time apart", not process.is_hinted or hasty_s < 1e-6, f"{hasty_s:.2f} s")
        process.is_hinted, process.has_begun = False, True
        process.was_full = process.state.is_full
        return 0


class _Process:
    """A process of the scheduler, and what is known of its turn.

    Attributes:
        helping: Its helpers that run.
        has_commands: Whether it has written commands since it last woke the relay.
        trusts_nothing: Whether something failed since it last forgot what it had kept.
        round_s: When it last did something in a round.
    """

    def __init__(self, state: _State, name: str) -> None:
        self.state, self.name = state, name
        self.process: Any = state.simulation.process()
        self.process.of = self
        self.helping = Counter[str]()
        self.leads = self.has_commands = self.is_to_act = self.trusts_nothing = self.is_hinted = False
        self.was_full = self.was_active = self.has_begun = False
        self.collects = self.may_fit = True
        self.left_s = self.gained_s = self.round_s = -math.inf
        self.turned_s = state.now_s
        self.look_again_s, self.power_s = math.inf, math.inf
        self.rounds = self.reported = self.prepared = 0
        self.fingerprint = self.held_at = -1
        self.ratios: Any = {}
        self.recorded: set[int] = set()
        draw = state.simulation.choices.below
        self.note: Any = self._note if draw(4) == 1 else None
        settings = SimpleNamespace(
            database_url="",
            control_curves=None,
            power_interval_s=POWER_S,
            power_settle_s=1.0,
            database_dir=None,
            database_reserve_bytes=0,
            policy="fifo",
            round_interval_s=ROUND_S,
            engine_new_jobs_s=0.0,
            node_min_on_s=0.0,
            plans_kept=KEPT,
            master_ports=(1, 2),
            measured_settings=8,
            tick_s=TICK_S,
            passive_interval_s=PASSIVE_S,
        )
        carbon = SimpleNamespace(outlooks=_nothing)
        with patch.multiple(scheduler_loop, **self._parts()):
            self.scheduler = Scheduler(
                cast(Any, settings),
                cast(Any, self),
                cast(Any, self),
                cast(Any, carbon),
                None,
                cast(Any, _Helper(self, "door")),
                self.note,
            )
        made: Any = self.scheduler
        made.turn = self._watched(state.simulation.judged(made.turn, *FAILURES))
        made._sleep_until_woken = self._watched(state.simulation.judged(made._sleep_until_woken, *FAILURES))
        self.running = self.process.start(self.scheduler.run())

    def _parts(self) -> dict[str, Any]:
        """Return what the scheduler is put together from."""
        power = SimpleNamespace(
            is_due=lambda now_s: now_s >= self.power_s,
            trigger=Trigger.PASSIVE,
            at_rest=lambda _: True,
            note=lambda *_, **__: setattr(self, "power_s", self.state.now_s + POWER_S),
        )
        nodes: Any = _Helper(self, "nodes")
        nodes.hook = SimpleNamespace(covers=lambda _: False)
        parts = {
            "Leadership": _Leadership(self),
            "Ingest": SimpleNamespace(look=self._ingests),
            "EngineIngest": SimpleNamespace(look=self._looks),
            "Savings": _Helper(self, "savings"),
            "Measuring": SimpleNamespace(look=self._measured),
            "Predicting": SimpleNamespace(refresh=self._refresh, keep=self._keep),
            "Relay": _Helper(self, "relay"),
            "KeptJobs": SimpleNamespace(forget=self._forget, of=self),
            "NodePower": nodes,
            "PowerWatch": power,
            "DiskWatch": SimpleNamespace(problem=self._problem),
        }
        return {name: lambda *_, made=made: made for name, made in parts.items()}

    def _watched(self, work: Any) -> Any:
        """Return a part of a turn after which nothing that was kept is trusted if it fails."""

        async def judged() -> None:
            try:
                await work()
            except Exception:
                self.trusts_nothing = self.has_begun = True
                self.has_commands = self.is_to_act = self.was_active = False  # as the next turn may find out by itself
                self.rounds, self.reported, self.round_s = 0, 0, -math.inf
                raise

        return judged

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[_Process]:
        """Yield a connection."""
        await self.state.ask(lambda: None)
        yield self

    async def run(self, query: Any, *values: Any) -> Any:
        """Do what stands in for one query of a repository."""
        async with self.connection() as connection:
            return await query(connection, *values)

    async def execute(self, statement: Any, *arguments: Any) -> None:
        """Do what stands in for a statement."""
        await statement(self, *arguments)

    async def xread(self, streams: Mapping[str, str], block: int) -> Any:
        """Wait for hints, as the turn is over."""
        check, state = self.state.simulation.check, self.state
        check("garbage is collected between rounds", self.collects)
        check("who gains the lead decides at once", self.has_begun, self.name)
        check("what was committed is published", not self.has_commands or self.trusts_nothing)
        check("nodes are powered as planned", not self.is_to_act or self.trusts_nothing)
        is_trimmed = state.plans <= KEPT or self.trusts_nothing or not self.was_active
        check("no more plans are kept than may be", is_trimmed, str(state.plans))
        check("each round is told", self.reported == self.rounds or self.trusts_nothing, f"{self.reported}")
        found = await Client(state.simulation, state.hints).xread(streams, None, block)
        self.is_hinted = bool(found)
        return found

    async def _ingests(self, *_: Any) -> tuple[bool]:
        return (await self._looks(),)

    async def _looks(self, *_: Any) -> bool:
        found = not self.state.simulation.is_calm and self.state.simulation.choices.below(4, often=0.3) == 1
        await self.state.ask(lambda: None)
        self.has_commands |= found
        return found

    async def _measured(self) -> bool:
        found = await self._looks()
        self.state.points += found
        self.may_fit |= found
        return found

    async def fit(self) -> bool:
        """As ``refit``."""
        self.state.simulation.check("nothing is fitted that is not new", self.may_fit)

        def take() -> bool:
            had, self.state.points = self.state.points, max(self.state.points - 1, 0)
            return had > 0

        self.may_fit = await self.state.ask(take)
        return self.may_fit

    async def _refresh(self) -> None:
        simulation = self.state.simulation
        hangs = not simulation.is_calm and simulation.choices.below(2, often=0.01) == 1
        await asyncio.sleep(HUNG_S if hangs else 0)

    async def _keep(self, predictions: Any) -> None:
        self.state.simulation.check("nothing is written in vain", bool(predictions))
        await self.state.ask(lambda: None)

    def _note(self, loaded: Any, _: Any) -> None:
        self.recorded.add(loaded.snapshot.version)

    def _forget(self) -> None:
        self.trusts_nothing, self.may_fit = False, True

    def _problem(self) -> str:
        return "is full" if self.state.is_full else ""


class _Policy:
    """Remembers how often it has changed its mind."""

    name = "fifo"

    def initial(self) -> int:
        """Return that it has not."""
        return 0

    def dump(self, memory: int) -> dict[str, int]:
        """Return JSON."""
        return {"n": memory}

    def load(self, stored: Mapping[str, int]) -> int:
        """Return what JSON says."""
        return stored["n"]


async def _load(of: _Process, trigger: Trigger, *_: Any, kept: Any, known_version: int | None, **__: Any) -> Loaded:
    """Read the state, in the place of ``load``."""
    state, check, draw = of.state, of.state.simulation.check, of.state.simulation.choices.below
    now_s = state.now_s
    check("there is a policy before a round", state.policy is not None)
    check("nothing is started where the disk is full", not (of.was_full and state.is_full))
    check("what was kept is not trusted after a failure", not of.trusts_nothing, of.name)
    check("who leads has its helpers", [of.helping[name] for name in HELPERS] == [1] * len(HELPERS), str(of.helping))
    is_due = now_s >= state.active_s + ROUND_S or of.rounds > 0  # a stale one is repeated
    check("an active round is held when it is due", trigger is not Trigger.ACTIVE or is_due)
    has_reason = of.fingerprint != of.held_at or now_s >= of.look_again_s or now_s >= of.power_s
    check("no round is held for nothing", trigger is not Trigger.PASSIVE or has_reason, of.name)

    def read() -> tuple[int, int, int | None]:
        return state.version, state.changes, state.memories[state.version]

    version, changes, memory = await state.ask(read)
    nodes = SimpleNamespace(free_gpus=np.ones(1), schedulable=np.ones(1, dtype=bool))
    orders = [SimpleNamespace(id="o", measured_w=1.0, limit_w=2.0, ratio=1.0)]
    snapshot: Any = SimpleNamespace(
        now_s=now_s, version=version, changes=changes, trigger=trigger, nodes=nodes, orders=orders, jobs=[], of=of
    )
    stored = None if memory is None or known_version == version else {"n": memory}
    withheld = [] if draw(4) == 1 else [Withheld("held", Reason.TENANT_QUOTA, "")]
    predictions = cast(Any, [] if withheld else [1])
    return Loaded(snapshot, state.policy or "", {}, stored, predictions, withheld=withheld)


def _ratios(snapshot: Any, known: Mapping[str, float]) -> tuple[Any, Mapping[str, float]]:
    draw = snapshot.of.state.simulation.choices.below
    return snapshot, {"o": 1.0 + draw(2)} if draw(4) == 1 else known


def _decide(policy: _Policy, snapshot: Any, memory: int) -> Any:
    """Decide, in the place of ``run_under_orders``."""
    of, state = snapshot.of, snapshot.of.state
    check, draw = state.simulation.check, state.simulation.choices.below
    known = state.memories[snapshot.version] or 0
    check("who decides remembers what was decided", memory == known or state.policy == "gone", f"{memory}, not {known}")
    check("no garbage is collected in a round", not of.collects)
    look_again_s = snapshot.now_s + 3.0 if draw(3) == 1 else None
    return SimpleNamespace(plan=SimpleNamespace(look_again_s=look_again_s), memory=memory + draw(2))


async def _apply(of: _Process, decided: Decided, *_: Any, rehearsed: bool = False) -> Applied:
    """Write a plan, in the place of ``apply``; one that is rehearsed is never committed."""
    if rehearsed:
        await of.state.ask(lambda: None)
        return Applied(0, 0, 0, 0)
    state, snapshot, draw = of.state, cast(Any, decided.snapshot), of.state.simulation.choices.below
    if of.note is not None and snapshot.trigger is Trigger.ACTIVE:
        state.simulation.check("each active round is recorded", snapshot.version in of.recorded, str(of.recorded))
    starts = draw(2)

    def commit() -> int:
        if snapshot.version != state.version:
            raise StalePlanError("it has changed")
        state.version += 1
        state.plans += 1
        before = state.memories[snapshot.version]
        state.memories[state.version] = before if decided.memory is None else decided.memory["n"]
        is_kept = state.policy != "gone" or decided.memory is None
        state.simulation.check("nothing is remembered of another policy", is_kept)
        state.seen = snapshot.changes
        state.changes += starts
        state.active_s = state.now_s if snapshot.trigger is Trigger.ACTIVE else state.active_s
        return state.version

    number = await state.ask(commit)
    of.rounds += 1
    of.has_commands = of.is_to_act = True
    again_s = cast(Any, decided.plan).look_again_s
    of.look_again_s = math.inf if again_s is None else again_s
    if snapshot.trigger is Trigger.PASSIVE and of.state.now_s < of.power_s:
        of.held_at = of.fingerprint
    of.round_s, of.was_active = state.now_s, snapshot.trigger is Trigger.ACTIVE
    return Applied(number, starts, 0, 0)


async def _prepare(of: _Process, policy: str) -> None:
    of.state.simulation.check("a policy is looked for once", not of.prepared, of.name)

    def give() -> None:
        of.state.policy = of.state.policy or policy

    await of.state.ask(give)
    of.prepared += 1


async def _due_in_s(of: _Process, *_: Any) -> float:
    return await of.state.ask(lambda: of.state.active_s + ROUND_S - of.state.now_s)


async def _fingerprint(of: _Process, *_: Any) -> tuple[object, ...]:
    of.rounds = of.reported = 0
    of.was_active = False
    of.fingerprint = await of.state.ask(lambda: of.state.changes)
    return (of.fingerprint,)


async def _trim(of: _Process, kept: int) -> None:
    def remove() -> None:
        of.state.plans = min(of.state.plans, kept)

    await of.state.ask(remove)


async def _forget(of: _Process) -> None:
    await of.state.ask(lambda: None)
    of.round_s = of.state.now_s  # the round is over


async def _keep_ratios(of: _Process, sources: list[Any], values: list[float]) -> None:
    ratios = dict(zip(sources, values, strict=True))
    of.state.simulation.check("nothing is written in vain", ratios != of.ratios, str(ratios))
    await of.state.ask(lambda: None)
    of.ratios = ratios


async def _explain(of: _Process, withheld: Sequence[Any]) -> None:
    of.state.simulation.check("nothing is written in vain", bool(withheld))
    await of.state.ask(lambda: None)


async def _nothing(*_: Any) -> Any:
    return ()


async def _dependencies(_: Any) -> frozenset[Any]:
    return frozenset[Any]()


def _build(policy: str, _: Any) -> _Policy:
    if policy == "gone":
        raise PolicyConfigError("there is none")
    return _Policy()


def _stand_ins(simulation: Simulation) -> dict[str, Any]:
    """Return what takes the place of the names that the scheduler's loop imports."""

    def here() -> _Process:
        return cast(Any, simulation.loop.process_now()).of

    def collect(does: bool) -> None:
        here().collects = does

    def told(*_: Any) -> None:
        here().reported += 1

    async def fit(of: _Process) -> bool:
        return await of.fit()

    return {
        "gc": SimpleNamespace(disable=lambda: collect(False), enable=lambda: collect(True)),
        "rounds": SimpleNamespace(FIRST_STATE=_prepare, due_in_s=_due_in_s, fingerprint=_fingerprint, TRIM_PLANS=_trim),
        "engines": SimpleNamespace(FORGET=_forget),
        "orders": SimpleNamespace(KEEP_RATIOS=_keep_ratios),
        "jobs": SimpleNamespace(hold=_explain, waiting=_none_waits),
        "snapshots": SimpleNamespace(zones=_nothing),
        "look": _dependencies,
        "prepare": _nothing,
        "refit": fit,
        "load": _load,
        "apply": _apply,
        "with_ratios": _ratios,
        "run_under_orders": _decide,
        "build_policy": _build,
        "level_rooms": lambda _: (),
        "note_round": told,
    }


async def _none_waits(of: _Process) -> list[list[str]]:
    """Return no job that a round could be held without; whoever looks for some is at work."""
    of.turned_s = of.state.now_s
    return []


def _nothing_done(said: dict[str, Any]) -> str | None:
    does = said["starts"] or said["preemptions"] or said["trigger"] == Trigger.ACTIVE.value
    return None if does else f"a {said['trigger']} round that did nothing"


async def play(simulation: Simulation) -> None:
    """Things change, with hints and without, while processes lead, fail, and go; each change is seen by a round."""
    draw = simulation.choices.below
    simulation.most_steps = 30_000
    state = _State(simulation)
    simulation.instead(scheduler_loop, **_stand_ins(simulation))
    simulation.says("round.held", _nothing_done)
    has_room = Counter[Any]()
    simulation.says_once("disk.full", lambda _: has_room[simulation.loop.process_now()])
    simulation.says("disk.has_room", lambda _: has_room.update([simulation.loop.process_now()]))
    processes: list[_Process] = []

    def begin() -> None:
        process = _Process(state, f"p{len(processes)}")
        processes.append(process)

    begin()
    watching = simulation.loop.create_task(_watch(simulation, processes))
    for _ in range(2 + draw(12)):
        match draw(10, often=0.8):
            case 1:
                begin()
            case 2 | 3 if len(processes) > 1:
                await _end(simulation, processes.pop(0))
            case 4:
                state.holder = None  # its connection has ended, and another process may have it
            case 5:
                state.is_full = not state.is_full
            case 6:
                state.policy = state.policy and ("fifo", "gone")[draw(2)]
                state.change(is_told=False)
            case _:
                state.change(is_told=draw(2) == 1)
        await asyncio.sleep(0.25 * draw(24))
    for each in processes[1:]:
        await _end(simulation, each)
    state.is_full = False
    simulation.calm_down()
    state.calm_s = state.now_s
    await asyncio.sleep(HUNG_S + TICK_S + SOON_S)
    for is_told in (True, False, True):
        state.change(is_told=is_told)
        changes = state.changes
        await asyncio.sleep(SOON_S + (0.0 if is_told else TICK_S))
        simulation.check("each change is seen by a round", state.seen >= changes, f"{state.seen} of {changes}")
    simulation.check("what is measured is fitted", not state.points, str(state.points))
    late_s = state.now_s - state.active_s
    simulation.check("an active round is held when it is due", late_s <= ROUND_S + SOON_S, f"{late_s:.1f} s")
    simulation.check("nothing fails where nothing is wrong", not processes[0].trusts_nothing)
    watching.cancel()
    await _end(simulation, processes[0], may_kill=False)


async def _end(simulation: Simulation, each: _Process, *, may_kill: bool = True) -> None:
    if may_kill and simulation.choices.below(2):
        each.process.kill()
        each.helping.clear()
        return
    await end_tasks([each.running])
    simulation.check("who has ended has no helpers", not +each.helping, str(each.helping))
    simulation.check("who has ended leads no more", each.state.holder is not each)


async def _watch(simulation: Simulation, processes: list[_Process]) -> None:
    """Look at processes from outside, as an orchestrator does."""
    while True:
        await asyncio.sleep(0.5)
        now_s = simulation.loop.time()
        for each in processes:
            has_left = not each.leads and now_s > each.left_s + LEFT_S
            simulation.check("who no longer leads has no helpers", not has_left or not +each.helping, str(each.helping))
            late_s = now_s - each.turned_s
            is_late = False
            try:
                each.scheduler.check_turns()
            except RuntimeError:
                is_late = True
            simulation.check("a turn that does not end is told", is_late is (late_s > LATE_AFTER_S), f"{late_s:.0f} s")
            due_s = max(each.look_again_s, each.gained_s, each.state.calm_s) + SOON_S
            is_passed_over = each.leads and late_s < 1.0 and due_s < now_s
            simulation.check("a plan that asks for another look gets one", not is_passed_over)
