"""A node's agent on virtual time: the real one, with stand-ins for the control plane, Valkey, the shims and the disk.

The agent may be killed between any two steps, and begins again on the same state folder. Shims outlive it. What a shim
does here is what ``gpu_agent/shim.py`` says of leases, stop requests and ends; its processes are numbers.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from gpu_agent import agent as agent_module
from gpu_agent import files, meter, ranks, reporting, shim, spool
from gpu_agent.agent import Agent
from gpu_agent.controls import Controls
from gpu_agent.devices import simulated
from gpu_agent.devices.driver import DeviceError, DriverMissingError, NotSupportedError
from gpu_agent.devices.simulated import SimulatedDriver
from gpu_agent.gangs import Gangs
from gpu_agent.inbox import Inbox
from gpu_agent.intervals import Intervals
from gpu_agent.launch import Inputs
from gpu_agent.meter import Meter
from gpu_agent.progress import Report
from gpu_agent.ranks import RankFolder
from gpu_agent.reporting import MeasuringAgent, ReportingAgent, StateFolderTakenError
from gpu_agent.secrets import InputError
from gpu_agent.settings import AgentSettings
from gpu_agent.spool import Spool
from services.contracts.commands import AnyCommand, SetDevices, StartGang, StopGang, command_document
from services.contracts.jobs import JobSpec
from services.contracts.nodes import (
    PORT_TAKEN,
    DeviceControls,
    EndedBy,
    EnergyInterval,
    EnergyReceipt,
    EnergyReport,
    EnergySource,
    Heartbeat,
    HeartbeatReply,
    NodeCredentials,
    NodeRegistration,
    RankState,
    RankStatus,
)
from services.contracts.streams import COMMAND_FIELD, command_stream
from services.kit.control_plane import ControlPlane
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, unavailable
from services.scheduler.loop import Relay
from services.scheduler.repository import outbox
from tests.simulation.loop import EPOCH_S, Clock, KilledError, Process, Simulation
from tests.simulation.valkey import Client, Store

OPEN = "/proc/self/fd"
NODE = "n0"
GPUS = 2
LEASE_S, HEARTBEAT_S, INTERVAL_S = 6.0, 0.5, 2.0
GIVEN_UP_S = LEASE_S + 1.0
"""A node that was silent for so long has lost its gangs, as the scheduler sees it."""
LEAST_LEASE_S = 0.5
COPY_S = 1.0
FETCH_S = 5.0
ANSWERS_S = 1.0
"""An answer to a node may take so long on its way."""
LACKS_AT_END = 0.3
"""How often no thread can be started while an agent ends, where that happens at all."""
HELD_UP_S = 4.0
"""What fails holds an agent up for so long."""
STARTS_S = 3.0
"""A gang whose devices are free has them within this time."""
LIMIT_W = 200.0
CLOCK_MHZ = 1_200
HEALTH_S = 2.0
LATE_END_S = 2 * INTERVAL_S
"""A gang's energy may be counted for so long after its end: an interval, and what is late."""
QUIET_S = 24.0
SETTLED_S = 20.0
"""Within this time after the last gang's end, its energy is delivered and it is forgotten."""
CLOCK_SET_S = meter._CLOCK_STEP_S
SLEWS_S, STEPS_S = (0.3, -0.3, 0.7, -0.7), (5.0, -5.0, 40.0)
"""By how much the host's clock is set: by less than what intervals take for a set clock, and by more."""
STALLS_S = (5.7, 9.0, 5.2, 3.0)
"""For how long an agent stands still: less than a lease, or longer."""
STEPS = 20_000
FAILS_S = 3.0
"""At times, whoever asks devices in vain does so for so long."""
MOST_PENDING, SLOW_S = 2, 5.0
"""In some runs, intervals that may wait to be told, and how long it takes to take some in: the oldest are given up."""
WAITS_S = 2.0
"""For so long at most a gang may go on until it saves its work."""
DELAY_S = 3.0
"""How late an engine's node tells of its energy."""
MOST_DEATHS = 4
"""Of an agent, by accident or at its end."""

SAFE = re.compile(r"[a-z0-9.]+")
"""What allocations are called here."""

T = TypeVar("T")
write_facts = shim.write_facts
"""As shims do it, which have reserved room for it on a full disk."""
WRITES = ("replace", "rename", "unlink", "mkdir", "rmdir", "write", "pwrite", "link", "symlink")
"""What changes a folder or a file: a process may be killed before any of them."""
USING_DEVICES = frozenset({"look", "refresh", "_read_all", "_limits_w", "set_power_limit", "reset_power_limit"})
"""What threads do with the driver, whose lock they hold."""


class _Pipe:
    """What a shim reads its secrets from."""

    def __init__(self) -> None:
        self.content = b""

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        """Pass on."""
        self.content += data


@dataclass(eq=False)
class _Shim:
    """A shim and its rank, in the place of a ``Popen``."""

    pid: int
    folder: RankFolder
    start: StartGang
    process: Process
    stdin: _Pipe | None = None
    boot: str = ""
    work: asyncio.Task[None] | None = None
    runs: bool = False
    is_signalled: bool = False
    ended_s: float | None = None
    lasted_s: tuple[float, float] = (math.inf, math.inf)  # from when to when, as seconds that nobody can set
    lock: int | None = None

    def poll(self) -> int | None:
        """Return a status once it has ended."""
        return None if self.work is not None and not self.work.done() and self.process.is_alive else 0

    def begin(self) -> None:
        """Have its command run."""
        self.runs, self.lasted_s = True, (shim.clock(), math.inf)

    def end(self, at_s: float | None = None) -> None:
        """Have its command end, at a time of the host's clock."""
        self.runs, self.lasted_s = False, (self.lasted_s[0], shim.clock())
        self.ended_s = time.time() if at_s is None else at_s

    def unlock(self) -> None:
        """Give back its folder, as the kernel does when a process ends."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


@dataclass
class _Shims:
    """The shims of a host, and what is true of its ranks.

    Attributes:
        all: By pid.
        started: How often each allocation's command was run.
        killed_first: Whose shim was killed, so that its end may be known before its host starts again.
        clock: Of the host.
        drawn: What its devices drew.
        most_ahead_s: By how much it was ever ahead or behind.
        stalls: How often an agent stands still where it does most harm.
        stood_s, stood_in_all_s: For how long its agent stood still: at most at once, and in all.
    """

    simulation: Simulation
    all: dict[int, _Shim] = field(default_factory=dict[int, _Shim])
    started: dict[str, int] = field(default_factory=dict[str, int])
    killed: set[str] = field(default_factory=set[str])
    killed_first: set[str] = field(default_factory=set[str])
    agent: Any = None
    mortal: Process | None = None
    exits: dict[str, tuple[int, EndedBy]] = field(default_factory=dict[str, tuple[int, EndedBy]])
    posted: dict[str, float] = field(default_factory=dict[str, float])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    accounts: dict[str, Any] = field(default_factory=dict[str, Any])
    released: set[str] = field(default_factory=set[str])
    asked: set[Path] = field(default_factory=set[Path])
    poison: set[int | None] = field(default_factory=set[int | None])
    boot: str = "boot0"
    boots: list[float] = field(default_factory=list[float])
    clock: Clock = field(default_factory=Clock)
    most_ahead_s: float = 0.0
    stalls: float = 0.0
    stood_s: float = 0.0
    stood_in_all_s: float = 0.0
    drawn: Drawn = field(init=False)
    beginning: _Judged | None = None
    copies: list[_Copies | None] = field(default_factory=list["_Copies | None"])
    _pids: Iterator[int] = field(default_factory=lambda: itertools.count(1_000))

    def launch(self, command: list[str], *, stdin: Any, **_: Any) -> _Shim:
        """Start a shim, in the place of ``Popen``, in the folder of a rank, which has its lease."""
        folder, check = RankFolder(Path(command[-1])), self.simulation.check
        check("a shim is told what to run", (folder.path / shim.SPEC).exists(), folder.path.name)
        deadline = float((folder.path / shim.LEASE).read_text().split()[0])
        check("what has ended is not started", folder.exit() is None, folder.path.name)
        left_s = deadline - shim.clock()
        check("a gang begins with a lease that lasts", left_s >= LEAST_LEASE_S, f"{folder.path.name}: {left_s:.2f} s")
        written = json.loads((folder.path / ranks.COMMAND).read_bytes())
        start = StartGang.model_validate(written["command"])
        self._check_devices(start, folder)
        spec = (folder.path / shim.SPEC).read_bytes()
        has_secrets = b"secrets_dir" in spec
        check("a shim is told what to run", (stdin == PIPE) is has_secrets, f"{folder.path.name}: {spec!r}")
        has_account = shim.spec_bytes([("user", "1000 1000 4")]) in spec
        check("a command runs as its own user", has_account is (self.accounts.get(start.allocation_id) is not None))
        started = _Shim(next(self._pids), folder, start, self.simulation.process(), boot=self.boot)
        started.stdin = _Pipe() if stdin == PIPE else None
        self.all[started.pid] = started
        started.work = started.process.start(self._run(started))
        return started

    def checkpoints(self) -> _Copies | None:
        """Return what copies checkpoints on this host, for every agent that it ever has."""
        if not self.copies:
            self.copies.append(_Copies() if self.simulation.choices.below(2) else None)
        return self.copies[0]

    def agent_of(self, folder: RankFolder) -> _Agent | None:
        """Return the agent of the host on which a rank's folder is, if one runs."""
        return self.agent

    def _lasts_s(self, start: StartGang) -> float:
        """Return how long a command runs that nobody ends."""
        return 0.5 * (1 + self.simulation.choices.below(16))

    def _check_devices(self, start: StartGang, folder: RankFolder) -> None:
        """Nothing of an earlier gang is left on the devices of one that begins, and none of its job's is at work."""
        agent, check = self.agent_of(folder), self.simulation.check
        check("who has ended does no more", agent is not None, folder.path.name)
        for index in start.devices:
            board, device = agent.devices[index], agent.driver._devices[index]  # type: ignore[union-attr]
            here = [each for each in agent.gangs if index in each.devices]  # type: ignore[union-attr]
            # What a guest was set to may come into force as it ends; the next tick takes it back.
            holders = [each for each in here if each.holding or (each.start and each.start.shares)]
            is_own = device.limit_w == LIMIT_W and any(each.settings is not None for each in holders)
            is_free = device.limit_w == board.power_limit_w or is_own
            check("a gang gets its devices as they were made", is_free or start.shares)  # else as its neighbour has it
        copied = [each.allocation_id for each in agent.gangs if each.copying and each.start.job_id == start.job_id]  # type: ignore[union-attr]
        check("a job waits for its checkpoint", not copied, str(copied))

    def _post(self, each: _Shim, done: float) -> None:
        """Report progress by HTTP, as a job does; with a wrong token it is nobody's."""
        agent = self.agent_of(each.folder)
        if agent is None or each.start.spec.progress.source != "http":
            return
        token = json.loads((each.folder.path / ranks.COMMAND).read_bytes())["token"]
        is_wrong = self.simulation.choices.below(4) == 1
        gang = agent.gangs.get(each.start.allocation_id)
        is_taken = agent.gangs.post_progress("wrong" if is_wrong else token, Report(done))
        if is_wrong or (gang is not None and gang.holding and gang.progress is not None):
            self.simulation.check("progress is its own job's", is_taken is not is_wrong, each.start.allocation_id)
        if is_taken:
            self.posted[each.start.allocation_id] = done

    async def _run(self, each: _Shim) -> None:
        draw = self.simulation.choices.below
        await asyncio.sleep(0.02 * (1 + draw(20, often=0.3)))
        each.lock = os.open(each.folder.path / shim.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(each.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            await asyncio.sleep(0.02 * draw(8, often=0.2))
            got = each.stdin is None or each.stdin.content == shim.spec_bytes(SECRETS)
            self.simulation.check("a shim is told what to run", got, each.folder.path.name)
            if each.folder.started() is not None or each.folder.exit() is not None:
                return
            facts = {"pid": each.pid, "shim": each.pid, "started_at": time.time(), "kernel_boot": each.boot}
            write_facts(str(each.folder.path / shim.STARTED), facts)
            name = each.start.allocation_id
            self.started[name] = self.started.get(name, 0) + 1
            each.begin()
            code, ended_by = await self._live(each)
            each.end()
            await asyncio.sleep(0)
            self.exits[each.start.allocation_id] = code, EndedBy(ended_by)
            exit_facts = {"code": code, "ended_by": ended_by, "ended_at": each.ended_s}
            if draw(8) == 1:
                limit = self.memory[name] = draw(2) << 30
                exit_facts |= {"memory_peak": 1 << 30, "memory_limit": limit}
            write_facts(str(each.folder.path / shim.EXITED), exit_facts)
        finally:
            each.unlock()

    async def _live(self, each: _Shim) -> tuple[int, str]:
        """Run until the command ends, or is ended by its lease or a request."""
        draw = self.simulation.choices.below
        ends_s = shim.clock() + self._lasts_s(each.start)
        code = draw(2, often=0.2)
        grace_s = each.start.spec.grace_s
        done = 0.0
        kill_at, ended_by, deadline = float("inf"), "", 0.0
        while True:
            now_s = shim.clock()
            if draw(4, often=0.1):
                done += 1.0
                self._post(each, done)
            words = (each.folder.path / shim.LEASE).read_text().split()
            deadline = float(words[0])
            facts = shim.read_facts(str(each.folder.path / shim.STOP))
            if facts is not None and not ended_by:
                ended_by, kill_at = facts.get("cause", "stop"), now_s + float(facts.get("grace_s", 0.0))
            if each.is_signalled and not ended_by:
                ended_by, kill_at = "host", now_s + grace_s
            if not ended_by and now_s >= deadline - min(grace_s, LEASE_S / 3):
                ended_by, kill_at = "lease", now_s + grace_s
            if ended_by and draw(2):  # it obeys
                return -15, ended_by
            if now_s >= min(kill_at, deadline):
                return -9, ended_by or "lease"
            if now_s >= ends_s and not ended_by:
                return code, "itself"
            due_s = min(ends_s, kill_at, deadline - min(grace_s, LEASE_S / 3) if not ended_by else kill_at, deadline)
            await asyncio.sleep(min(max(due_s - now_s, 0.02), 0.25))

    def kill(self, pid: int) -> None:
        """Kill a shim; its rank runs on until somebody ends what it has left."""
        each, name = self.all[pid], self.all[pid].start.allocation_id
        each.process.kill()
        self.killed.add(name)
        if each.boot == self.boot and name in self.started:
            self.killed_first.add(name)
        each.unlock()

    def reboot(self) -> None:
        """Have the host start again: nothing that ran is left."""
        self.boot = f"boot{len(self.boots) + 1}"
        self.boots.append(time.time() + self.clock.ahead_s)
        for pid, each in self.all.items():
            if each.poll() is None or each.runs:
                self.kill(pid)
                if each.runs:
                    each.end(self.boots[-1])

    def set_clock(self, by_s: float) -> None:
        """Set the host's calendar clock."""
        self.clock.ahead_s += by_s
        self.most_ahead_s = max(self.most_ahead_s, abs(self.clock.ahead_s))

    def kill_marked(self, mark: str) -> int:
        """End what a dead shim has left, in the place of ``kill_marked``."""
        found = [each for each in self.all.values() if str(each.folder.progress_file) in mark and each.runs]
        for each in found:
            each.end()
        return len(found)

    def signal(self, pid: int, number: int) -> None:
        """Signal a shim, in the place of ``os.kill``: it ends its command, as its stop request says if there is one."""
        if pid not in self.all:
            raise ProcessLookupError(pid)
        self.all[pid].is_signalled = True

    def requested(self, request: Any) -> Any:
        """Return how a rank is asked to end, of which its shim hears though nothing can be written."""

        def judge(folder: RankFolder, *arguments: Any) -> None:
            self.asked.add(folder.path)
            try:
                request(folder, *arguments)
            finally:
                running = [each for each in self.all.values() if each.folder.path == folder.path and each.runs]
                silent = [each.pid for each in running if each.poll() is None and not each.is_signalled]
                is_dead = isinstance(sys.exception(), KilledError)
                self.simulation.check("who is to end hears of it", is_dead or not silent, folder.path.name)

        return judge

    def given(self, take: Any) -> Any:
        """Return how a gang gets its devices, which it does while there is time to start it."""

        def judge(gangs: Gangs, gang: Any) -> None:
            had, left_s = gang.holding, gangs.deadline - shim.clock()
            take(gangs, gang)
            may = left_s >= LEAST_LEASE_S or had or not gang.holding
            self.simulation.check("who gets devices has time to start", may, f"{gang.allocation_id}: {left_s:.2f} s")
            if gang.holding and not had:
                self.may_stall()

        return judge

    def answered(self, answer: Any) -> Any:
        """Return how an agent takes a heartbeat's answer, after which it may stand still."""

        def take(gangs: Gangs, *arguments: Any) -> None:
            ending = {each.folder.path for each in gangs if each.state is RankState.STOPPING}
            self.asked.clear()
            answer(gangs, *arguments)
            again = sorted(path.name for path in ending & self.asked)
            self.simulation.check("who ends is not asked to end", not again, str(again))
            if any(each.named and not each.holding and not each.is_over for each in gangs):
                self.may_stall()

        return take

    def may_stall(self) -> None:
        """Have the process at work stand still after this step, as where its host is busy or it was stopped."""
        process, draw = self.simulation.loop.process_now(), self.simulation.choices.below
        if process is not None and self.stalls and not self.simulation.is_calm and draw(2, often=self.stalls):
            length_s = STALLS_S[draw(len(STALLS_S))]
            self.stood_s = max(self.stood_s, length_s)
            self.stood_in_all_s += length_s
            process.stand_still(length_s)

    def rejected(self, reject: Any) -> Any:
        """Return how an interval is set aside, which the control plane has refused for good."""

        def judge(spooled: Spool, interval: EnergyInterval) -> None:
            is_refused = interval.sequence in self.poison
            self.simulation.check("only what is refused is set aside", is_refused, str(interval.sequence))
            reject(spooled, interval)

        return judge

    def held(self) -> Iterator[int]:
        """Yield the devices of gangs that have processes, each as often as it is held."""
        return (index for each in self.running() for index in each.devices)

    def running(self) -> list[StartGang]:
        """Return the gangs that have processes."""
        return [each.start for each in self.all.values() if each.runs]


@dataclass(eq=False)
class _Allocation:
    """An allocation as the control plane has it."""

    start: StartGang
    is_live: bool = True
    is_over: bool = False
    wants_stop: bool = False
    was_given_up: bool = False
    may_start: bool = True
    put_s: float = 0.0
    settings: list[DeviceControls] = field(default_factory=list[DeviceControls])


class _Plane:
    """Telemetry and the scheduler: what a node says to them, and which of its gangs may run."""

    def __init__(self, simulation: Simulation, valkey: Client) -> None:
        self._simulation = simulation
        self._valkey = valkey
        self.allocations: dict[str, _Allocation] = {}
        self.intervals: dict[tuple[str, int], EnergyInterval] = {}
        self.heard_s = float("-inf")
        self.outbox = _Outbox(simulation)
        self.refused: set[str] = set()
        self.stale: set[str] = set()
        self.is_registered = False
        self.registering = 0
        self.heartbeats = 0
        self.answered = 0
        self.delay_s = self.slow_s = 0.0
        self.poison: int | None = None
        self.unheard_until_s = 0.0
        self.again = 0
        self.registered: Any = None
        self.same: tuple[Any, Any] | None = None
        self.shims: _Shims | None = None
        self.devices: _Devices | None = None
        self._tokens = 0

    async def call(self, method: str, path: str, answer: Any, *, body: Any, timeout_s: float = 10.0, **_: Any) -> Any:
        """Answer a call of the node, as ``ServiceClient.call``."""
        handle = {
            "register": self._register,
            "heartbeat": self._heartbeat,
            "energy": self._energy,
        }[path.rpartition("/")[2]]
        kind, document = type(body), body.model_dump_json()  # as it is when it is sent
        refusals = [unavailable("telemetry")]
        if not self._simulation.is_calm and self._simulation.loop.time() < self.unheard_until_s:
            await asyncio.sleep(min(timeout_s, 1.0))
            raise unavailable("telemetry")
        is_register = path.endswith("register")
        if path.endswith("heartbeat"):
            refusals.append(ProblemError(401, cast(Any, "unauthenticated"), "The token is not valid."))
        if is_register:
            self._simulation.check("a node registers when it has to", not self.is_registered and not self.registering)
        self.registering += is_register
        again = self.again
        try:
            async with asyncio.timeout(timeout_s):
                if self.slow_s and path.endswith("energy") and not self._simulation.is_calm:
                    await asyncio.sleep(self.slow_s)
                told = await self._simulation.boundary(
                    lambda: handle(kind.model_validate_json(document)), *refusals, may_be_silent=True, may_repeat=True
                )
                if not (is_register or self._simulation.is_calm) and self._simulation.choices.below(2, often=0.1):
                    await asyncio.sleep(ANSWERS_S)  # meanwhile the node may have been given something new
        except TimeoutError:
            raise unavailable("telemetry") from None
        except ProblemError as problem:
            self.is_registered &= problem.status != 401
            raise
        finally:
            self.registering -= is_register
        self.is_registered |= is_register and again == self.again
        self.answered += 1
        return told

    def register_again(self) -> None:
        """Take in that the node has to register anew."""
        self.is_registered = False
        self.again += 1

    def _register(self, registration: NodeRegistration) -> NodeCredentials:
        self._tokens += 1
        self.registered = registration.devices
        return NodeCredentials(
            node_id=NODE, token=f"t{self._tokens}", heartbeat_interval_s=HEARTBEAT_S, lease_ttl_s=LEASE_S, pue=1.0
        )

    def _heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        self.give_up()
        self.heard_s = shim.clock()
        self.heartbeats += 1
        is_told = len(heartbeat.devices) == GPUS or (self.devices is not None and self.devices.has_failed)
        self._simulation.check("a node says what its devices do", is_told, str(heartbeat.devices))
        for rank in heartbeat.ranks:
            known = self.allocations.get(rank.allocation_id)
            is_still = known is None or not known.is_over or rank.state is RankState.EXITED
            self._simulation.check("who is over stays so", is_still, f"{rank.allocation_id}: {rank.state}")
            is_known = known is not None or rank.allocation_id in self.refused - self.stale
            self._simulation.check("a node reports what it was given", is_known, rank.allocation_id)
            if known is not None and rank.state is RankState.EXITED and known.is_live:
                self._check_end(known, rank)
            if known is not None:
                self._check_rank(known, rank)
            agent = self.shims.agent if self.shims is not None else None
            gang = agent.gangs.get(rank.allocation_id) if agent is not None else None
            is_copied = gang is None or not gang.copying or rank.state is not RankState.EXITED
            self._simulation.check("a gang has ended when its checkpoint is copied", is_copied, rank.allocation_id)
            if known is not None and rank.state is RankState.EXITED:
                known.is_live, known.is_over = False, True
        named = [name for name, each in self.allocations.items() if each.is_live]
        return HeartbeatReply(lease_ttl_s=LEASE_S, allocations=named)

    def _check_rank(self, known: _Allocation, rank: RankStatus) -> None:
        """A gang's progress does not go back, and its controls are as its devices have them."""
        check, name = self._simulation.check, rank.allocation_id
        runs = self.shims is not None and name in self.shims.started
        check("a gang is said to run when it has begun", runs or rank.state is not RankState.RUNNING, name)
        done = rank.progress_done or 0.0
        most = self.shims.posted.get(name, 0.0) if self.shims is not None else 0.0
        check("progress is what was reported", done <= most, f"{name}: {done} of {most}")
        told = rank.settings
        if told is not None and known.settings:
            is_asked = any(
                told.revision == each.revision
                and told.power_limit_w in (None, each.power_limit_w)
                and told.clock_mhz in (None, each.clock_mhz)
                for each in known.settings
            )
            check("controls are told as they were asked for", is_asked, f"{name}: {told}")
            reached = [each for each in known.settings if each.revision == told.revision]
            is_reached = told.since is None or any(
                told.power_limit_w == each.power_limit_w or "power_limit" in told.refused for each in reached
            )
            check("controls count from when devices had them", is_reached, f"{name}: {told}")
            may_refuse = self.devices is not None and self.devices.refuses_clocks
            check("only what is refused counts as refused", not told.refused or may_refuse, f"{name}: {told.refused}")

    def _check_end(self, known: _Allocation, rank: RankStatus) -> None:
        """A gang ends for a reason that is true."""
        check, name = self._simulation.check, rank.allocation_id
        if rank.ended_by is EndedBy.STOP:
            check("nobody is stopped who may run", known.wants_stop or known.was_given_up, name)
        assert self.shims is not None
        shown = self.shims.exits.get(name)
        if shown is not None:
            is_told = (rank.exit_code, rank.ended_by) == shown or rank.ended_by is EndedBy.HOST
            check("an end is told as it was", is_told, f"{name}: {shown}, told {rank.exit_code} {rank.ended_by}")
            check("an end is told as it was", rank.started_at is not None and rank.ended_at is not None, name)
        elif name not in self.shims.started:
            check("what never ran has no beginning", rank.started_at is None, name)
        if rank.ended_by is EndedBy.HOST:
            assert self.shims is not None
            ran = next((each for each in self.shims.all.values() if each.start.allocation_id == name), None)
            mine = [each for each in self.shims.all.values() if each.start.allocation_id == name]
            is_ended = name in self.shims.killed or any(each.is_signalled for each in mine) or not mine
            check("no living shim is taken for dead", is_ended, name)
            was_restarted = ran is not None and name in self.shims.started and ran.boot != self.shims.boot
            is_told = (rank.detail or "").startswith("the host restarted") is was_restarted
            check(
                "an end is told as it was",
                is_told or not rank.started_at or shown is not None or name in self.shims.killed_first,
                f"{name}: {rank.detail}",
            )
        elif (limit := self.shims.memory.get(name)) is not None:
            words = "its own limit was not reached" if not limit else "of 1.0 GiB"
            check("an end is told as it was", words in (rank.detail or ""), f"{name}: {rank.detail}")
        else:  # whoever holds the port of a server that does not say that it is one
            is_odd = "killed because" in (rank.detail or "") or PORT_TAKEN in (rank.detail or "")
            check("an end is told as it was", not is_odd, f"{name}: {rank.detail}")

    def _energy(self, report: EnergyReport) -> EnergyReceipt:
        self._simulation.check("no empty report is sent", bool(report.intervals))
        if any(each.sequence == self.poison for each in report.intervals):
            raise ProblemError(422, cast(Any, "invalid_request"), "One of them is wrong.")
        for each in report.intervals:
            age_s = (utc_now() - each.end_at).total_seconds()
            was_set = self.shims is not None and self.shims.most_ahead_s > 0
            is_due = self.delay_s <= age_s or was_set
            self._simulation.check("an engine's node delivers when its bridge has told of the jobs", is_due, f"{age_s}")
            self.intervals.setdefault((each.boot_id, each.sequence), each)
        return EnergyReceipt(accepted=len(report.intervals), duplicates=0)

    def is_newest(self, document: dict[str, Any]) -> bool:
        """Whether a command starts a gang after which none of an earlier generation is accepted."""
        known = self.allocations.get(document.get("allocation_id", ""))
        starts = document.get("type") == "start_gang" and document["generation"] > 1
        return starts and known is not None and known.may_start

    def give_up(self) -> None:
        """Let the gangs of a node go that was silent until none of them can run any more."""
        if shim.clock() - self.heard_s > GIVEN_UP_S:
            for each in self.allocations.values():
                each.is_live, each.was_given_up = False, True

    async def relay(self) -> None:
        """Have commands published, by a scheduler that dies and is followed by another one."""
        draw = self._simulation.choices.below
        while True:
            process = self._simulation.process()
            process.start(Relay(cast(Any, self.outbox), cast(Any, self._valkey)).run())
            try:
                await asyncio.sleep(1 + draw(20))
            finally:
                process.kill()


class _Outbox:
    """The table of commands on their way, and the database that has it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rows: list[outbox.OutboxRow] = []
        self.sent: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    def put(self, command: AnyCommand | dict[str, Any]) -> None:
        """Commit a command, or what is none."""
        document = command if isinstance(command, dict) else command_document(command)
        self.sent.append(document)
        self._rows.append(outbox.OutboxRow(next(self._ids), command_stream(NODE), document, None))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        """Yield a connection."""
        await asyncio.sleep(0)
        yield

    async def oldest(self, _: Any, limit: int) -> list[outbox.OutboxRow]:
        """Answer as ``outbox.oldest``."""
        return await self._simulation.boundary(lambda: self._rows[:limit], ConnectionError("lost"))

    async def delete(self, _: Any, ids: list[int]) -> None:
        """Delete as ``outbox.delete``."""
        self._rows = await self._simulation.boundary(
            lambda: self._without(ids), ConnectionError("lost"), may_repeat=True
        )

    def _without(self, ids: list[int]) -> list[outbox.OutboxRow]:
        self._rows = [row for row in self._rows if row.id not in ids]
        return self._rows


class _Copies:
    """Checkpoints of gangs that have ended, which take a moment to be copied."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def outcome(self, start: StartGang | None, rank: RankFolder, ended: Any) -> str | None:
        """Return what became of it, None while it is copied."""
        if start is None or rank.started() is None:
            return ""
        until_s = self._until_s.setdefault(start.allocation_id, shim.clock() + COPY_S)
        return None if shim.clock() < until_s else ""

    def is_held_here(self, start: StartGang | None) -> bool | None:
        """Return that it is not known."""

    def is_settled(self, start: StartGang | None, rank: RankFolder) -> bool:
        """Whether nothing is left to do."""
        return start is None or shim.clock() >= self._until_s.get(start.allocation_id, 0.0)

    def forget(self, allocation_id: str) -> None:
        """Keep nothing of it."""
        self._until_s.pop(allocation_id, None)


FAILURES = (OSError, DeviceError, RuntimeError, RedisError, ProblemError)
"""What the loops of an agent may fail by: its disk, its devices, no thread, and others who do not answer."""
PIPE = "pipe"
SECRETS = [("secret", "word")]


class _Account:
    """The user of a job's command, to whom its files are given once they are there."""

    user_id = group_id = 1_000
    groups = (4,)

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def own(self, path: Path) -> None:
        """Give a file or folder to the user."""
        self._simulation.check("what is given to a user is there", path.exists(), path.name)


class _Health:
    """Faults of GPUs, which come and go."""

    def __init__(self, simulation: Simulation, agent: _Agent) -> None:
        self._simulation, self._agent = simulation, agent
        self._faults: list[Any] = []
        self._looked_s, self._stood_s = -math.inf, 0.0
        self.temperatures_c: dict[int, float | None] = {}

    def look(self, _: float) -> bool:
        """Whether anything is new."""
        shims = cast(Any, self._agent)._stand_in.shims
        self._looked_s, self._stood_s = shim.clock(), shims.stood_in_all_s
        found = not self._simulation.is_calm and self._simulation.choices.below(4, often=0.3) == 1
        if found:
            self._faults = [SimpleNamespace(gpu=self._simulation.choices.below(GPUS))]
        return found

    def due_probes(self, _: float) -> list[Any]:
        """Return the faults that a probe may show to be gone."""
        late_s = shim.clock() - self._looked_s
        shims = cast(Any, self._agent)._stand_in.shims
        stood_s = max(shims.stood_s, shims.stood_in_all_s - self._stood_s)  # it may have stood still more than once
        is_soon = self._simulation.is_calm or late_s < 0.95 * HEALTH_S + stood_s  # its whole host does at the end
        self._simulation.check("a GPU is tried as soon as it may be", is_soon, f"{late_s:.2f} s")
        return self._faults

    async def probe(self, fault: Any, _: float) -> None:
        """Try a GPU."""
        held = bool(self._agent.gangs.holders_of(fault.gpu))
        self._simulation.check("a GPU is tried while nobody has it", not held, str(fault.gpu))
        self._faults = []

    def faults(self) -> list[Any]:
        """Return none, as far as the control plane is concerned."""
        return []

    def returned(self, _: Any) -> None: ...


class _Judged(ReportingAgent):
    """What is asked of every agent, whatever else it does."""

    def _judge(self, simulation: Simulation, plane: _Plane) -> Any:
        """Take who asks, before anything is made; return how the node is enrolled."""
        assert plane.shims is not None
        plane.shims.beginning = self
        self._simulation, self._stand_in = simulation, plane
        return SimpleNamespace(
            until_enrolled=_nothing,
            renew=_nothing,
            refresh=_nothing,
            refused=lambda: simulation.check("no secret is given up that nobody has refused", False),
            secret=_a_secret,
        )

    def _judge_end(self) -> None:
        """Have nobody use devices of which the agent has taken leave, nor take leave of the folder before."""
        close, read, check = self.driver.close, self.driver.read, self._simulation.check
        self._is_closed = False

        def closed() -> None:
            at_work = [name for name, each in self._tasks.items() if not each.done()]
            check("who ends measures until its end", not at_work and self.meter._opened >= self.meter._sampled)
            check("who uses devices has the state folder", fcntl.fcntl(self._state_lock, fcntl.F_GETFD) >= 0)
            self._is_closed = True
            close()

        def asked(index: int) -> Any:
            check("who uses devices has the state folder", not self._is_closed, str(index))
            return read(index)

        driver = cast(Any, self.driver)
        driver.close, driver.read = closed, asked

    async def _keep_going(self, name: str, loop: Any) -> None:
        await super()._keep_going(name, self._simulation.judged(loop, *FAILURES))

    def is_held_up(self) -> bool:
        """Whether its devices have failed or refused just now, or its disk, which may hold it up."""
        devices = self._stand_in.devices
        fails = devices is not None and devices.failed_s >= self._simulation.loop.time() - HELD_UP_S
        return fails or bool(self._problems())

    def _register_again(self, devices: Any) -> None:
        is_other = devices != self.plane._registration.devices
        self._simulation.check("a node registers again when it has other devices", is_other)
        self._stand_in.register_again()
        ControlPlane.register_again(self.plane, devices)

    def lose_lock(self) -> None:
        """Give back the state folder, as the kernel does when a process ends."""
        if (lock := self.__dict__.pop("_state_lock", None)) is not None:  # else it had not come to that
            os.close(lock)


class _Measuring(_Judged, MeasuringAgent):
    """The agent that only measures."""

    def __init__(self, simulation: Simulation, settings: AgentSettings, plane: _Plane, _: Client) -> None:
        MeasuringAgent.__init__(self, settings, cast(Any, plane), self._judge(simulation, plane))
        self.plane.register_again = self._register_again  # type: ignore[method-assign]
        self._judge_end()


class _Agent(_Judged, Agent):
    """The agent, put together without what asks the kernel."""

    def __init__(self, simulation: Simulation, settings: AgentSettings, plane: _Plane, valkey: Client) -> None:
        enrolment = self._judge(simulation, plane)
        ReportingAgent.__init__(self, settings, enrolment)
        self._tick_due = asyncio.Event()
        self._device_files: dict[str, bytes] = {}
        self._state_problem = ""
        sweeper = SimpleNamespace(sweep=lambda _: None, close=lambda: None)
        self.confinement = cast(Any, SimpleNamespace(begin=lambda _: None, cgroups=sweeper))
        launcher = cast(
            Any,
            SimpleNamespace(
                check=self._check_start, prepare=self._prepare, home_of=lambda _: None, devices=self.devices
            ),
        )
        self._launcher = launcher
        self._ports = cast(Any, SimpleNamespace(who_listens=lambda _: {}))
        self.intervals = Intervals()
        self.controls = Controls(self.driver, settings.state_folder / "controls.json", self._device_lock)
        self.checkpoints = cast(
            Any, SimpleNamespace(problem="", copy_running=_forever, clean=lambda *_: None, close=_nothing)
        )
        self.gangs = Gangs(
            settings.state_folder,
            launcher,
            checkpoints=cast(Any, plane).shims.checkpoints(),
            on_change=self._heartbeat_due.set,
            is_billed=lambda allocation_id: not self.spool.mentions(allocation_id),
            is_clean=self.controls.is_clean,
            fetch=self._fetch,
            is_taken=lambda _: True,
        )
        self.partitions = cast(
            Any,
            SimpleNamespace(
                problem="", statuses=lambda: None, want=lambda _: None, step=lambda: None, finish=_nothing_with
            ),
        )
        self.meter = Meter(
            self.driver,
            self.devices,
            self._host(),
            self.spool,
            static_w=settings.static_w,
            boot_id=self.boot_id,
            shim_pids=self.gangs.shim_pids,
            progress_of=self._progress_of,
            lock=self._device_lock,
            activity_of=self.gangs.activity_of,
        )
        self.health = cast(Any, _Health(simulation, self))
        self._failed: set[str] = set()
        self.fetching: set[str] = set()
        self.waits_since: dict[str, float] = {}
        self.waits_now: set[str] = set()
        self._looks = set()
        registration = NodeRegistration(
            node_id=NODE,
            address="127.0.0.1",
            agent_url="",
            devices=self.devices,
            driver="simulated",
            host_power=self._host().source,
        )
        self.plane = ControlPlane(cast(Any, plane), cast(Any, enrolment), registration)
        self.plane.register_again = self._register_again  # type: ignore[method-assign]
        self.inbox = Inbox(cast(Any, valkey), NODE, self.gangs, settings.retry_s)
        self._learned = cast(Any, SimpleNamespace(save=_nothing_with))
        self.clocks = cast(
            Any,
            SimpleNamespace(
                orders=lambda gangs: gangs.orders(),
                recut=lambda _: None,
                decide=lambda *_: None,
                minutes=lambda *_: [],
                wanted_mhz=lambda _: None,
            ),
        )
        self._latency = cast(Any, SimpleNamespace(run=_forever))
        self._judge_end()

    def _prepare(self, start: StartGang, *_: Any) -> ranks.Launch:
        draw, shims = self._simulation.choices.below, cast(Any, self)._stand_in.shims
        account = shims.accounts[start.allocation_id] = _Account(self._simulation) if draw(4) == 1 else None
        secrets = SECRETS if draw(4) == 1 else []
        shims.may_stall()
        return ranks.Launch(["work"], {}, "/", 1.0, account=cast(Any, account), secrets=secrets, secrets_dir="there")

    async def _fetch(self, start: StartGang, rank: Path) -> Inputs:
        draw = self._simulation.choices.below
        self.fetching.add(start.allocation_id)
        try:
            if draw(4, often=0.5) == 1:  # as where much is to be fetched
                await asyncio.sleep(FETCH_S)
            return await self._simulation.boundary(lambda: Inputs(), InputError("it lacks a secret"))
        finally:
            self.fetching.discard(start.allocation_id)

    def _check_start(self, _: StartGang) -> None:
        """Say what a job's command needs and this host lacks."""
        if not self._simulation.is_calm and self._simulation.choices.below(2, often=0.05):
            raise InputError("it has no such user")


async def _nothing() -> None: ...


async def _nothing_with(*_: Any, **__: Any) -> None: ...


async def _a_secret() -> str:
    return "secret"


async def _forever(*_: Any) -> None:
    await asyncio.Event().wait()


@cache
def _settings() -> dict[str, Any]:
    """Return what all agents have in common; reading it from the environment takes longer than a run."""
    return cast(Any, AgentSettings)(
        node_id=NODE,
        driver="simulated",
        simulated_gpus=GPUS,
        containers="off",
        health="off",
        latency_clocks="off",
        checkpoints="local",
        disk_reserve_bytes=1,
        owner_tenants=["t"],
        energy_interval_s=INTERVAL_S,
        sample_interval_s=1.0,
        health_interval_s=HEALTH_S,
    ).model_dump()


class _Devices:
    """What is asked of devices, which now and then fail, refuse, or show what cannot be.

    Attributes:
        has_failed: Whether any ever did.
        failed_s: When one did last.
        estimates: Whether the power that they show is a guess.
    """

    def __init__(self, simulation: Simulation, plane: _Plane) -> None:
        """Take who knows whether the node registers just now."""
        draw = simulation.choices.below
        self._simulation, self.plane = simulation, plane
        self._often, self._nonsense = draw(2) * 0.03, draw(2) * 0.02
        self.refuses_clocks = draw(4) == 1
        self._counts = draw(6) != 1
        self.estimates = draw(6) == 1
        self.has_failed = not self._counts
        self.failed_s = -math.inf
        self._extra_gib = self._changes = 0
        self._fails_since_s = self._refuses_until_s = -math.inf
        self._odd: dict[int, tuple[float, int]] = {}

    def asks(self, work: Any, *, clock: bool = False, is_control: bool = False) -> Any:
        """Return a method of the driver that may fail; those that set something do so oftener, and for a while."""

        @functools.wraps(work)
        def ask(driver: Any, *arguments: Any) -> Any:
            if not self._simulation.is_calm and self._simulation.loop.process_now() is not None:
                now_s = self._simulation.loop.time()
                if self._often and self._simulation.choices.below(2, often=self._often):
                    self.has_failed, self._fails_since_s = True, now_s
                if now_s - self._fails_since_s <= (FAILS_S if self.plane.poison is not None else 0.0):
                    self.failed_s = now_s
                    raise DeviceError("it does not answer")
                if is_control and self._often and self._simulation.choices.below(2, often=5 * self._often):
                    self._refuses_until_s = now_s + FAILS_S
                if is_control and now_s < self._refuses_until_s:
                    self.failed_s = now_s
                    raise DeviceError("it cannot be set")
                if clock and self.refuses_clocks:
                    raise NotSupportedError("it has no clock to be set")
            return work(driver, *arguments)

        return ask

    def reads(self, work: Any) -> Any:
        """Return the reading of a driver, which may be none that can be."""
        asked = self.asks(work)

        def read(driver: Any, index: int) -> Any:
            sample = asked(driver, index)
            draw, is_calm = self._simulation.choices.below, self._simulation.is_calm
            if not self._counts:
                sample = replace(sample, energy_j=None)
            elif self.estimates:  # its power is a guess, which says nothing against its counter
                sample = replace(sample, power_w=0.2 * sample.power_w, estimated=True)
            now_s = self._simulation.loop.time()
            until_s, which = self._odd.get(index, (-math.inf, 0))
            if self._nonsense and not is_calm and now_s >= until_s and draw(2, often=self._nonsense):
                lasts, which = divmod(draw(2 * len(NONSENSE)), len(NONSENSE))
                until_s = now_s + lasts * FAILS_S
                self._odd[index] = until_s, which
                self.has_failed = True
                return replace(sample, **NONSENSE[which])
            return replace(sample, **NONSENSE[which]) if now_s < until_s and not is_calm else sample

        return read

    def refresh(self) -> bool:
        """Whether there are other devices than before, as when somebody has changed a GPU."""
        may_change = not self._simulation.is_calm and self._simulation.loop.process_now() is not None
        often = 0.5 if self.plane.registering > 0 else 0.05
        is_new = may_change and self._simulation.choices.below(2, often=often) == 1
        self._changes += is_new
        self._extra_gib ^= is_new and self._changes % 3 != 0  # at times it is as it was before
        return is_new

    def listed(self, work: Any) -> Any:
        """Return how a driver lists devices, which may have other memory than before."""

        def devices(driver: Any) -> list[Any]:
            return [each.model_copy(update={"memory_gib": each.memory_gib + self._extra_gib}) for each in work(driver)]

        return devices


class Drawn:
    """What the devices of hosts really drew: their power over time, from when to when, as drivers draw it.

    Attributes:
        made: Every interval that was made, by its key, and from when to when it is.
        put_s: When each gang was given to its node, where that is known.
        given_up: The keys of those that no longer fitted among those that wait.
    """

    def __init__(self, simulation: Simulation, shims: _Shims, devices: _Devices | None) -> None:
        self._simulation, self._shims, self._devices = simulation, shims, devices
        self._power: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        self._measured: set[int] = set()
        self.made: dict[tuple[str, int], tuple[EnergyInterval, float, float]] = {}
        self.put_s: dict[str, float] = {}
        self.given_up = set[tuple[str, int]]()
        self._longest_s = 0.0

    def noted(self, advance: Any) -> Any:
        """Return how a driver goes on, whose draw is written down; one that begins anew may begin a little earlier."""

        def note(driver: Any, *, save: bool = True) -> None:
            begin_s, draws_w = driver._at, [each.power_w for each in driver._devices]
            advance(driver, save=save)
            for index, draw_w in enumerate(draws_w):
                power = self._power.setdefault((driver._node_id, index), [])
                while power and power[-1][1] > begin_s:
                    first_s, _, was_w = power.pop()
                    if first_s < begin_s:
                        power.append((first_s, begin_s, was_w))
                power.append((begin_s, driver._at, draw_w))

        return note

    def _joules(self, node: str, devices: Iterable[int], begin_s: float, end_s: float) -> float:
        """Return what devices of a node drew between two times."""
        total_j = 0.0
        for device in devices:
            for first_s, last_s, draw_w in reversed(self._power[node, device]):
                if last_s <= begin_s:
                    break
                total_j += max(min(last_s, end_s) - max(first_s, begin_s), 0.0) * draw_w
        return total_j

    def judged(self, interval: Any) -> Any:
        """Return how intervals are made, each of which says what was drawn: in all, by each gang and by nobody."""

        def judge(meter_: Any, elapsed_s: float, cpu_s: dict[str, float]) -> EnergyInterval:
            found: EnergyInterval = interval(meter_, elapsed_s, cpu_s)
            begin_s, end_s = meter_._opened, meter_._sampled
            self.made[found.boot_id, found.sequence] = found, begin_s, end_s
            self._longest_s = max(self._longest_s, end_s - begin_s)
            is_first = id(meter_) not in self._measured  # until its first reading nobody can tell
            self._measured.add(id(meter_))
            self._simulation.at_end(lambda: meter_)  # kept, so that no other has its id
            has_failed = self._devices is not None and self._devices.has_failed
            static_j = {usage.allocation_id: usage.static_energy_j for usage in found.usages}
            whole_j = meter_._static_w * elapsed_s
            agent: Any = getattr(meter_._progress_of, "__self__", None) or self._shims.agent or self._shims.beginning
            if not isinstance(agent, _Measuring):
                self._simulation.check(*_parts_of(found.usages, static_j, whole_j))
            if not (is_first or has_failed or any(usage.until for usage in found.usages)):
                self._check(agent, found, begin_s, end_s)
            return found

        return judge

    def _check(self, agent: _Agent | _Measuring, found: EnergyInterval, begin_s: float, end_s: float) -> None:
        check, node = self._simulation.check, agent.settings.node_id
        if isinstance(agent, _Measuring):
            for usage in found.usages:
                drawn_j = self._joules(node, usage.devices, begin_s, end_s)
                is_own = usage.allocation_id is None and abs(usage.gpu_energy_j - drawn_j) <= SLACK_J
                check("a node is charged for what it drew", is_own, f"{usage}, and {drawn_j:.1f} J")
            check("a node is charged for what it drew", sum(len(each.devices) for each in found.usages) == GPUS)
            return
        told_j = {usage.allocation_id: usage.gpu_energy_j for usage in found.usages}
        drawn_j = self._joules(node, range(GPUS), begin_s, end_s)
        is_all = abs(sum(told_j.values()) - drawn_j) <= SLACK_J
        check("a node is charged for what it drew", is_all, f"{told_j}, and {drawn_j:.1f} J")
        mine = agent.gangs.folder
        shims = [each for each in self._shims.all.values() if each.folder.path.parent == mine]
        lasted = {each.start.allocation_id: each.lasted_s for each in shims}
        starts = [*(each.start for each in shims), *(each.start for each in agent.gangs if each.start)]

        def late_s(name: str) -> float:
            """Return how much later than it an end may be known; of a killed shim, once the agent looks again."""
            known_s = LATE_END_S * (2 if self._simulation.loop.lacks_threads else 1) + self._shims.stood_s
            return known_s + (self._longest_s if name in self._shims.killed else 0.0)

        here = {
            each.allocation_id: each
            for each in starts
            if self.put_s.get(each.allocation_id, 0.0) < end_s
            and lasted.get(each.allocation_id, NEVER)[1] + late_s(each.allocation_id) > begin_s
        }
        least_idle_j = most_idle_j = drawn_j
        for name, start in here.items():
            beside = [o for o in here.values() if o is not start and set(start.devices) & set(o.devices)]
            is_shared = any(o.shares or start.shares for o in beside)  # by estimate
            ran = [lasted.get(o.allocation_id, NEVER) for o in (start, *beside)]
            both_ran = is_shared and all(first_s <= begin_s and end_s <= last_s for first_s, last_s in ran)
            is_both = not both_ran or told_j.get(name, 0.0) > 0
            check("two that share a GPU are charged for it", is_both, f"{name}: {told_j}")
            ran_s, over_s = NEVER if is_shared else lasted.get(name, NEVER)
            least_j = self._joules(node, start.devices, max(ran_s, begin_s), min(over_s, end_s))
            until_s = min(lasted.get(name, NEVER)[1] + late_s(name), end_s)
            most_j = self._joules(node, start.devices, max(self.put_s.get(name, 0.0), begin_s), until_s)
            mine_j = told_j.get(name, 0.0)
            is_own = least_j - SLACK_J <= mine_j <= most_j + SLACK_J
            check("a gang is charged for what its devices drew", is_own, f"{name}: {least_j} <= {mine_j} <= {most_j}")
            least_idle_j, most_idle_j = least_idle_j - most_j, most_idle_j - least_j
        idle_j = told_j.get(None, 0.0)
        is_rest = least_idle_j - SLACK_J <= idle_j <= most_idle_j + SLACK_J
        what = f"{least_idle_j} <= {idle_j} <= {most_idle_j}"
        check("what nobody's devices drew is charged to nobody", is_rest, what)

    def booked(self, book: Any) -> Any:
        """Return how a reading is booked: one that cannot be is said to be modelled, and spoils no others."""

        def judge(meter_: Any, device: Any, sample: Any, now: float, elapsed_s: float) -> Any:
            shown_j, counter, check = sample.energy_j, device.counter, self._simulation.check
            was_good = counter is not None and counter.reading_j < NONSENSE_J and device.check.holds and elapsed_s > 0
            is_odd = was_good and shown_j is not None and not 0 <= shown_j < NONSENSE_J
            faults, booked = device.faults, book(meter_, device, sample, now, elapsed_s)
            is_told = booked[1] is EnergySource.MODELLED and device.faults == faults + 1 and not device.exact
            check("what was not measured is said to be modelled", is_told or not is_odd, str(booked))
            check("a counter that is right is believed", device.check.holds, str(device.check))
            return booked

        return judge


def _parts_of(usages: Iterable[Any], static_j: dict[str | None, float], whole_j: float) -> tuple[str, bool, str]:
    """Say whether what a host draws besides is charged once, to each gang no more than its devices' part."""
    most_j = {each.allocation_id: whole_j * len(each.devices) / GPUS for each in usages if each.allocation_id}
    is_all = abs(sum(static_j.values()) - whole_j) <= SLACK_J
    is_part = all(static_j[name] <= part_j + SLACK_J for name, part_j in most_j.items())
    return "a host's other energy is charged once", is_all and is_part, f"{static_j}, of {whole_j:.1f} J"


SLACK_J = 1.0
NEVER = (math.inf, math.inf)
NONSENSE_J = 1e11
NONSENSE: tuple[dict[str, float | None], ...] = (
    {"power_w": 1e6},
    {"power_w": -5.0},
    {"energy_j": math.nan},
    {"energy_j": -1.0},
    {"energy_j": None},
    {"energy_j": 1e12},
)
"""What a device may say that cannot be."""


def a_host(simulation: Simulation, shims: _Shims, commands: _Outbox, devices: _Devices | None = None) -> Path:
    """Return a state folder on a host whose kernel, shims and disk are stand-ins."""
    draw = simulation.choices.below
    drawn = shims.drawn = Drawn(simulation, shims, devices)
    fails = (0.0, 0.02, 0.0, 0.06)[draw(4)]
    release, renew = RankFolder.release, RankFolder.renew

    def may_write_less(descriptor: int, data: bytes, at: int) -> int:
        is_short = fails and not simulation.is_calm and draw(2, often=fails)
        written = write_bytes(descriptor, data[: (len(data) // 2, -1)[draw(2)]] if is_short else data, at)
        process = simulation.loop.process_now()
        if is_short and process is not None and process is shims.mortal and draw(2):  # it dies in the middle
            process.kill()
            raise KilledError
        return written

    def checked(folder: RankFolder) -> None:
        spooled = shims.agent_of(folder).spool  # type: ignore[union-attr]
        waiting = [*spooled._pending, *(interval for interval, _ in spooled._unsaved)]
        is_told = all(usage.allocation_id != folder.path.name for each in waiting for usage in each.usages)
        simulation.check("a gang is forgotten when its energy is told", is_told, folder.path.name)
        release(folder)
        shims.released.add(folder.path.name)

    def renewed(folder: RankFolder, *lease: float) -> None:
        agent = shims.agent_of(folder)
        gang = agent.gangs.get(folder.path.name) if agent is not None else None
        simulation.check("a lease is of a gang that has its devices", gang is None or gang.holding, folder.path.name)
        renew(folder, *lease)

    full_until_s = -math.inf

    def may_fail(work: Any) -> Any:
        @functools.wraps(work)
        def write(*arguments: Any, **options: Any) -> Any:
            nonlocal full_until_s
            now_s = simulation.loop.time()
            outcome = draw(3, often=fails) if fails and not simulation.is_calm and now_s >= full_until_s else 0
            full_until_s = now_s + FAILS_S if outcome == 2 else full_until_s
            if outcome or (now_s < full_until_s and not simulation.is_calm):
                raise OSError(errno.ENOSPC, "No space left on device")
            return work(*arguments, **options)

        return write

    kills = draw(2) * 0.02 if devices is not None else 0.0

    def may_be_the_last(work: Any) -> Any:
        def write(*arguments: Any, **options: Any) -> Any:
            process = simulation.loop.process_now()
            if process is not None and process is shims.mortal:
                if kills and process.is_alive and not simulation.is_calm and draw(2, often=kills):
                    process.kill()
                if not process.is_alive:
                    raise KilledError
            return work(*arguments, **options)

        return write

    simulation.instead(os, **{name: may_be_the_last(getattr(os, name)) for name in WRITES})
    renamed, rename, synced = set[str](), os.rename, shim.sync_folder

    def rename_(source: Any, target: Any) -> None:
        rename(source, target)
        renamed.add(os.path.dirname(target))

    def sync(where: str) -> None:
        synced(where)
        renamed.discard(where)

    def acknowledged(stream: Store, name: str, *ids: str) -> int:
        for entry_id in ids:
            _check_acknowledged(simulation, shims, stream, name, entry_id)
            simulation.check("what is acknowledged is on disk", not renamed, str(renamed))
        return delete(stream, name, *ids)

    delete = Store.xdel
    write_bytes = os.pwrite
    kernel = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
    kernel.kill = shims.signal
    disk = SimpleNamespace(**vars(kernel))
    disk.pwrite = may_write_less
    replaced = [
        (ranks, "os", kernel),
        (ranks, "kill_marked", shims.kill_marked),
        (meter, "cpu_seconds", lambda pids: dict.fromkeys(pids, 1.0)),
        (agent_module.secrets, "prepare_memory", lambda: None),
        (agent_module, "remove_keys", lambda _: None),
        (agent_module, "Scratch", lambda *_: SimpleNamespace(watch=_forever)),
        (agent_module.Retention, "clean", lambda *_: None),
        (outbox, "oldest", commands.oldest),
        (outbox, "delete", commands.delete),
        (files, "replace", may_fail(files.replace)),
        (files, "store", _written(simulation, files.store)),
        (shim, "write_facts", may_fail(write_facts)),
        (Spool, "reject", shims.rejected(Spool.reject)),
        (Gangs, "_take_devices", shims.given(Gangs._take_devices)),
        (Gangs, "answer", shims.answered(Gangs.answer)),
        (RankFolder, "request_stop", shims.requested(RankFolder.request_stop)),
        (SimulatedDriver, "_advance", drawn.noted(SimulatedDriver._advance)),
        (meter.Meter, "_interval", drawn.judged(meter.Meter._interval)),
        (meter.Meter, "_booked", drawn.booked(meter.Meter._booked)),
        (Spool, "_write", may_fail(Spool._write)),
        (ranks, "subprocess", SimpleNamespace(Popen=shims.launch, PIPE=PIPE, DEVNULL=None)),
        (ranks, "threading", SimpleNamespace(Thread=_at_once_instead)),
        *((each, "kernel_boot", lambda: shims.boot) for each in (shim, meter, simulated)),
        (spool, "os", disk),
        (os, "rename", rename_),
        *((each, "sync_folder", sync) for each in (shim, spool)),
        (Store, "xdel", acknowledged),
        (spool, "_COMPACT_BYTES", 4_000),
        (RankFolder, "release", checked),
        (RankFolder, "renew", renewed),
    ]

    if devices is not None:
        replaced.append((SimulatedDriver, "read", devices.reads(SimulatedDriver.read)))
        replaced.append((SimulatedDriver, "refresh", lambda _: devices.refresh()))
        replaced.append((SimulatedDriver, "devices", devices.listed(SimulatedDriver.devices)))
        for name in ("set_power_limit", "reset_power_limit", "set_clock"):
            asked = devices.asks(getattr(SimulatedDriver, name), clock="clock" in name, is_control=True)
            replaced.append((SimulatedDriver, name, asked))
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    simulation.at_end(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    for where, name, stand_in in replaced:
        simulation.instead(where, **{name: stand_in})
    return folder


def _check_acknowledged(simulation: Simulation, shims: _Shims, stream: Store, name: str, entry_id: str) -> None:
    """Have a command be taken away only once the node knows of it, or has done with it."""
    entry = stream._streams.get(name, {}).get(int(entry_id.partition("-")[0]))
    agent, document = shims.agent, json.loads((entry or {}).get(COMMAND_FIELD, "{}"))
    gang_id, generation = document.get("allocation_id", ""), document.get("generation")
    if agent is None or document.get("type") != "start_gang" or "job_id" not in document or "/" in gang_id:
        return
    newest, folder = agent.gangs._newest_generation(document["job_id"]), RankFolder(agent.gangs.folder / gang_id)
    is_known = agent.gangs.get(gang_id) is not None or folder.is_released() or generation < newest
    simulation.check("what is acknowledged is known", is_known, gang_id)


def _written(simulation: Simulation, store: Any) -> Any:
    """Have nothing written that is there already, unless something could not be written before."""
    stored = dict[Any, Any]()

    def judge(path: Path, content: Any, event: str, **how: Any) -> bool:
        key = simulation.loop.process_now(), path
        is_new = bool(how) or stored.get(key) != content  # others need not last, as a simulated driver's
        simulation.check("what is written is new", is_new, f"{path.name}: {content}")
        is_stored = store(path, content, event, **how)
        stored[key] = content if is_stored else None
        return is_stored

    return judge


def _at_once_instead(*, target: Any, args: Any, **_: Any) -> Any:
    """Return what does at once what a thread would do."""
    return SimpleNamespace(start=lambda: target(*args))


async def measuring(simulation: Simulation) -> None:
    """The same node, whose agent only measures: somebody else runs its jobs."""
    _check_drivers(simulation)
    await play(simulation, _Measuring)


def _check_drivers(simulation: Simulation) -> None:
    """An agent has the GPUs of its host, and says so if there are none."""
    settings = SimpleNamespace(driver="nvml", zeusd="", probe_controls=False, measure_only=True)
    for gpus in (["gpu"], [], None):

        def opened(*, gpus: Any = gpus, **_: Any) -> Any:
            if gpus is None:
                raise DriverMissingError("no library")
            return SimpleNamespace(devices=lambda: gpus, why="", close=lambda: None)

        simulation.instead(reporting, NvmlDriver=opened)
        found = ReportingAgent._open_driver(cast(Any, SimpleNamespace(settings=settings)))
        is_so = found.devices() == (gpus or []) and bool(found.why) is not bool(gpus)
        simulation.check("an agent has the GPUs of its host", is_so, f"{gpus}: {found.why}")


async def play(simulation: Simulation, kind: type[_Agent | _Measuring] = _Agent) -> None:
    """Jobs start, are stopped and started again on a node whose agent dies and returns; at the end nothing is left."""
    draw = simulation.choices.below
    simulation.most_steps = STEPS
    simulation.loop.lacks_threads = 0.005 * draw(2)
    shims = _Shims(simulation)
    store = Store()
    valkey = Client(simulation, store)
    plane = _Plane(simulation, valkey)
    simulation.holds("a job has one live gang at most, and a device one holder", lambda: _too_many_hold(shims))
    simulation.holds("a gang starts once, unless it was stopped before", lambda: _started_wrongly(plane, shims))
    simulation.holds("one thread writes the spool at a time, and one uses devices", lambda: _at_once(simulation))
    simulation.holds(
        "a node that is known is known with the devices that it has", lambda: _known_otherwise(plane, shims)
    )
    devices = plane.devices = _Devices(simulation, plane)
    folder = a_host(simulation, shims, plane.outbox, devices)
    own = {"state_dir": folder / "state", "data_dir": folder / "state"}
    own |= {"health": ("off", "on")[draw(2)], "stop_ranks_on_exit": draw(4) == 1, "exit_grace_s": 1.0}
    settings = AgentSettings.model_construct(**cast(Any, _settings() | own))
    plane.shims = shims
    plane.poison = draw(20) if draw(4) == 1 else None
    shims.poison = {plane.poison}
    shims.stalls = 0.5 if plane.poison is not None and plane.poison % 4 else 0.0
    if plane.poison is not None and plane.poison % 2:
        plane.delay_s = DELAY_S
        settings = settings.model_copy(update={"engine_delay_s": DELAY_S, "engine_node": f"engine.{NODE}"})
    relaying = simulation.loop.create_task(plane.relay())
    is_used = kind is _Agent
    user = simulation.start(_use(simulation, plane, shims) if is_used else asyncio.sleep(3.0 * (1 + draw(8))))
    _judge_the_log(simulation, plane, shims)
    agent: Any = None
    process = simulation.process(shims.clock)
    kills = (0.03, 0.15)[draw(2)]
    clock_sets = ((), SLEWS_S, SLEWS_S + STEPS_S)[draw(3)]
    if devices.refuses_clocks and not clock_sets:
        simulation.instead(spool, _MOST_PENDING=MOST_PENDING)
        plane.slow_s = SLOW_S
    deaths = 0
    while (
        agent is None
        or not process.is_alive
        or not user.done()
        or any(not each.is_over for each in plane.allocations.values())
    ):
        if agent is None:
            process = simulation.process(shims.clock)
            plane.is_registered, plane.registering = False, 0
            if draw(4) == 1:  # what an agent that was killed had begun to write
                (settings.state_folder / "allocations" / ".draft").mkdir(parents=True, exist_ok=True)
            is_known = _is_known(settings)
            shims.mortal = process if is_known and deaths < MOST_DEATHS else None
            agent = await _of(process, _begin(simulation, kind, settings, plane, valkey))
            shims.agent = agent
        if agent is None or not process.is_alive:  # killed between two writes
            deaths += 1
            if shims.beginning is not None:
                shims.beginning.lose_lock()
            agent = shims.agent = None
            await asyncio.sleep((0.1, 1.0, 10.0)[draw(3)])
            continue
        has_problem = any(agent._problems())
        is_ready = await _is_ready(agent)
        simulation.check("a node that has a problem is not ready", not (is_ready and has_problem))
        _check_agent(simulation, agent, shims)
        is_known = agent.plane.is_registered
        simulation.check("a node that nobody knows is not ready", is_known or not is_ready)
        await asyncio.sleep(0.25)
        running = [pid for pid, each in shims.all.items() if each.poll() is None]
        if draw(20) == 1:
            process.start(_recut(simulation, agent))
        if clock_sets and draw(2, often=0.2):
            shims.set_clock(clock_sets[draw(len(clock_sets))])
        if draw(2, often=0.02):
            plane.unheard_until_s = simulation.loop.time() + (3.0, 5.5, 9.0)[draw(3)]
        if running and draw(2, often=kills):
            shims.kill(running[draw(len(running))])
        is_known = _is_known(settings)
        if is_known and deaths < MOST_DEATHS:
            shims.mortal = process
        if is_known and deaths < MOST_DEATHS and draw(2, often=0.06):
            deaths += 1
            if draw(2):
                await _until_the_spool_is_written(simulation)
            has_stopped = draw(2) == 1 and process.is_alive and await _stop(process, agent)
            if not has_stopped:
                process.kill()
                agent.lose_lock()
                if draw(4) == 1:
                    devices.has_failed = True  # what was drawn since the last reading nobody can tell
                    shims.reboot()
            agent = shims.agent = None
            await asyncio.sleep((0.1, 1.0, 10.0)[draw(3)])
    simulation.calm_down()
    await asyncio.sleep(SETTLED_S)
    heartbeats, sequence = plane.heartbeats, agent.meter._sequence
    await asyncio.sleep(QUIET_S)
    said, closed = plane.heartbeats - heartbeats, agent.meter._sequence - sequence
    simulation.check("a node speaks as often as it should", 0.7 <= said * HEARTBEAT_S / QUIET_S <= 1.5, str(said))
    length_s = INTERVAL_S if agent.gangs_running or not is_used else 5 * INTERVAL_S
    simulation.check("intervals are as long as they should be", 0.6 <= closed * length_s / QUIET_S <= 1.5, str(closed))
    simulation.check(
        "what can be told is told", len(agent.spool) <= 2 + plane.delay_s / INTERVAL_S, str(len(agent.spool))
    )
    simulation.check("no control is left", not is_used or not agent.controls.in_force)
    changed = [each for each in agent.driver._devices if not _is_as_made(each, agent)]  # type: ignore[union-attr]
    simulation.check("no control is left", not changed, str(changed))
    specs = settings.state_folder.glob(f"allocations/*/{shim.SPEC}")
    left = [each.parent.name for each in specs if _is_released(each.parent)]
    simulation.check("who is forgotten leaves no secrets", not left, str(left))
    is_known = plane.registered == agent._usable(agent.driver.devices())
    simulation.check("a node registers with the devices that it has", is_known, str(plane.registered))
    left = store.xlen(command_stream(NODE))
    simulation.check("a command that was obeyed is not kept", not left, str(left))
    await agent.check_ready()
    names = {each.name for each in settings.state_folder.parent.iterdir()}
    simulation.check("nothing is written elsewhere", names == {settings.state_folder.name}, str(names))
    simulation.check("what was accepted ends", all(each.is_over for each in plane.allocations.values()))
    left = [each.allocation_id for each in agent.gangs] if is_used else []
    simulation.check("a gang that is over is forgotten", not left, str(left))
    if draw(8) == 1:
        with suppress(StateFolderTakenError):
            reporting._take_state_folder(settings.state_folder)
            simulation.check("one agent has the state folder", False)
    drafts = [each.name for each in settings.state_folder.glob("allocations/.*")]
    simulation.check("what was not finished is removed", not (drafts and is_used), str(drafts))
    await process.start(agent.stop())
    left = [path for each in os.listdir(OPEN) if (path := _open(each)).startswith(str(folder))]
    simulation.check("every file is closed", not left, str(left))
    relaying.cancel()
    await asyncio.wait([relaying])  # else the last relay would go on without this host
    _check_energy(simulation, plane, shims, agent, deaths)


def _judge_the_log(simulation: Simulation, plane: _Plane, shims: _Shims) -> None:
    """What goes on failing is said once, until something has succeeded."""
    done = Counter[str]()

    def counted(where: Any, name: str, key: Any) -> None:
        work = getattr(where, name)

        @functools.wraps(work)
        def count(*arguments: Any, **options: Any) -> Any:
            try:
                found = work(*arguments, **options)
            except NotSupportedError:
                done[key(*arguments)] += 1
                raise
            done[key(*arguments)] += 1
            return found

        simulation.instead(where, **{name: count})

    settle = Gangs._settle

    async def settled(gangs: Gangs, gang: Any) -> bool:
        found = await settle(gangs, gang)
        done[f"settled {gang.allocation_id}"] += 1
        return found

    def same(said: dict[str, Any]) -> tuple[str, int]:
        return said["error"], done[f"settled {said['allocation_id']}"]

    simulation.instead(Gangs, _settle=settled)
    simulation.says_once("gang.not_settled", same, "allocation_id")
    counted(Spool, "_write", lambda *_: "spool")
    counted(SimulatedDriver, "read", lambda _, index: f"read {index}")
    counted(Store, "xread", lambda *_: "inbox")
    for name in ("set_power_limit", "reset_power_limit", "set_clock", "reset_clock"):
        counted(SimulatedDriver, name, lambda _, index, *__: f"set {index}")
    for event in ("gang.accepted", "gang.stop", "gang.exited", "gang.started", "gang.released"):
        simulation.says(event, lambda said: None if SAFE.fullmatch(said["allocation_id"]) else str(said))
    simulation.says_once("gang.exited", lambda _: None, "allocation_id")
    simulation.says("spool.overflow", lambda said: _given_up(shims, said))
    simulation.says("agent.loop_failed", lambda _: done.update(("heartbeat.failed", "inbox")))
    simulation.says_once("spool.not_written", lambda _: done["spool"])
    simulation.says_once("heartbeat.failed", lambda _: (plane.answered, done["heartbeat.failed"]))
    simulation.says_once("inbox.interrupted", lambda _: done["inbox"])
    simulation.says_once("controls.failed", lambda each: done[f"set {each['index']}"], "index", "kind")
    simulation.says_once("meter.not_believed", lambda _: None, "meter", "fault")
    simulation.says_once("device.unreadable", lambda each: done[f"read {each['index']}"], "index")


def _given_up(shims: _Shims, said: dict[str, Any]) -> str | None:
    """Note an interval that its node gave up, which it may where more wait than may."""
    waiting = len(shims.beginning.spool._pending) if shims.beginning is not None else 0
    found = [key for key, (each, *_) in shims.drawn.made.items() if each.start_at == said["lost_from"]]
    shims.drawn.given_up.update(found)
    return None if found and waiting >= MOST_PENDING else f"{waiting} wait, and {said} is given up"


def _check_agent(simulation: Simulation, agent: _Agent | _Measuring, shims: _Shims) -> None:
    """Check what an agent knows, between two of its steps."""
    odd = [each.power_w for each in agent.meter._devices if not 0 <= each.power_w <= each.bound.most_w]
    simulation.check("no device is taken to draw what it cannot", not odd, str(odd))
    if isinstance(agent, _Measuring):
        return
    known = [each.allocation_id for each in agent.gangs if each.allocation_id in shims.released]
    simulation.check("a gang that is forgotten stays so", not known, str(known))
    now_s, gangs = shim.clock(), agent.gangs
    before_it_ends = (RankState.STARTING, RankState.RUNNING)  # whatever it takes itself for
    waiting = [
        each
        for each in gangs
        if each.state in before_it_ends and each.named and not each.holding and each.started_at is None
    ]
    is_leased = now_s < gangs.deadline - gangs._lease_s * 0.2
    shim_of = {each.folder.path: each for each in shims.all.values()}

    def at_last(name: str, what: str, within_s: float) -> None:
        """Have it be otherwise soon, unless something fails or stands still."""
        since_s = agent.waits_since.setdefault(f"{name}: {what}", now_s)
        agent.waits_now.add(f"{name}: {what}")
        waits = now_s - since_s > within_s + shims.stood_s and not simulation.loop.lacks_threads
        simulation.check(name, not waits or agent.is_held_up(), what)

    for each in waiting if is_leased else ():
        holders = [other for other in gangs if other.holding and set(other.devices) & set(each.devices)]
        start = each.start
        if start is None or holders or not agent.controls.is_clean(each.devices):
            continue
        if any(o.start and o.start.job_id == start.job_id and (o.holding or o.copying) for o in gangs):
            continue
        at_last("a gang begins when it may", each.allocation_id, STARTS_S)
    for each in gangs:
        name, mine = each.allocation_id, shim_of.get(each.folder.path)
        if each.state is RankState.STOPPING and each.holding and each.shim is None and each.folder.started() is None:
            at_last("who is not started yet ends at once", name, STARTS_S)
        if each.state is RankState.STARTING and each.holding and mine is None and is_leased:
            at_last("who has its devices begins", name, STARTS_S + FETCH_S)
        if mine is not None and mine.poll() is not None and not each.is_over and not each.copying:
            at_last("who has ended is known to have", name, STARTS_S)
        is_idle = each.launching is None or each.launching.done()
        simulation.check("nothing is fetched for who does not start", name not in agent.fetching or not is_idle, name)
    agent.waits_since = {name: at_s for name, at_s in agent.waits_since.items() if name in agent.waits_now}
    agent.waits_now.clear()


async def _is_ready(agent: _Agent | _Measuring) -> bool:
    try:
        await agent.check_ready()
    except RuntimeError:
        return False
    return True


def _is_as_made(device: Any, agent: _Agent | _Measuring) -> bool:
    board = agent.devices[0]
    return (device.limit_w, device.clock_mhz) == (board.power_limit_w, max(board.clocks_mhz))


def _open(descriptor: str) -> str:
    """Return what a descriptor of this process is open at."""
    try:
        return os.readlink(f"{OPEN}/{descriptor}")
    except OSError:  # that by which these were listed
        return ""


def _is_released(folder: Path) -> bool:
    return RankFolder(folder).is_released()


async def _recut(simulation: Simulation, agent: _Agent | _Measuring) -> None:
    """End an interval, as where slices are cut anew."""
    begin_s = shim.clock()
    with suppress(RuntimeError):  # no thread could be started
        await agent.meter.recut(agent.devices)
        ended_s = agent.meter._opened
        simulation.check("an interval ends where GPUs are cut anew", ended_s >= begin_s, f"{ended_s} < {begin_s}")


def _is_known(settings: AgentSettings) -> bool:
    """Whether an interval is on disk: what was drawn before that, nobody can tell."""
    path = settings.state_folder / "energy.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") > 0


async def _of(process: Process, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what work of a process comes to; None if it was killed meanwhile."""
    task = process.start(work)
    while not task.done() and process.is_alive:
        await asyncio.wait([task], timeout=0.1)
    return task.result() if process.is_alive else None


async def _stop(process: Process, agent: _Agent | _Measuring) -> bool:
    """End the agent; return whether it could do all that it does at its end."""
    loop, has_ended = agent._simulation.loop, True
    lacked, loop.lacks_threads = loop.lacks_threads, LACKS_AT_END if loop.lacks_threads else 0.0
    try:
        await _of(process, agent.stop())
    except RuntimeError:  # no thread could be started
        has_ended = False
    finally:
        loop.lacks_threads = lacked
    at_work = [name for name, each in agent._tasks.items() if not each.done()]
    agent._simulation.check("who has ended does no more", not process.is_alive or not at_work, str(at_work))
    return has_ended and process.is_alive


async def _until_the_spool_is_written(simulation: Simulation) -> None:
    """Return at a moment at which an end does most harm; after three seconds in any case."""
    for _ in range(300):
        if any(getattr(each, "__name__", "") == "_write" for each in simulation.loop.threads):
            return
        await asyncio.sleep(0.01)


async def _begin(simulation: Simulation, kind: Any, settings: AgentSettings, plane: _Plane, valkey: Client) -> Any:
    agent = plane.shims.agent = kind(simulation, settings, plane, valkey)  # type: ignore[union-attr]
    lacked, simulation.loop.lacks_threads = simulation.loop.lacks_threads, 0.0  # else it would end, and begin again
    await agent.start()
    simulation.loop.lacks_threads = lacked
    return agent


async def _use(simulation: Simulation, plane: _Plane, shims: _Shims) -> None:
    """Have jobs run, one gang after the other, as the scheduler would."""
    draw = simulation.choices.below
    generations: dict[str, int] = {}
    for _ in range(2 + draw(8)):
        await asyncio.sleep(0.5 * draw(8))
        plane.give_up()
        job = ("a", "b", "c")[draw(3)]
        live = [each for each in plane.allocations.values() if each.is_live]
        mine = next((each for each in live if each.start.job_id == job), None)
        if mine is not None and draw(3) == 1:  # as of a node that was given up, and is there after all
            mine.is_live, mine.was_given_up = False, True
            live.remove(mine)
        elif mine is not None:
            grace_s, wait_s = 0.5 * draw(3), WAITS_S * draw(2, often=0.5)
            name = mine.start.allocation_id
            plane.outbox.put(StopGang(allocation_id=name, grace_s=grace_s, reason="asked", wait_s=wait_s))
            mine.wants_stop = True
            continue
        taken = {index for each in live for index in each.start.devices}
        free = [index for index in range(GPUS) if index not in taken]
        alone = [index for index in taken if sum(index in each.start.devices for each in live) == 1]
        shared = draw(2) == 1 and len(alone) > 0
        if shared:
            free = alone
        if not free:
            continue
        generations[job] = generations.get(job, 0) + 1
        start = _a_gang(job, generations[job], free[: 1 if shared else 1 + draw(2)], shares=shared)
        allocation = plane.allocations[start.allocation_id] = _Allocation(start, put_s=shim.clock())
        shims.drawn.put_s[start.allocation_id] = allocation.put_s
        if draw(8) == 1:  # its stop overtakes it
            allocation.wants_stop, allocation.may_start = True, False
            plane.outbox.put(StopGang(allocation_id=start.allocation_id, grace_s=0.0, reason="asked"))
        plane.outbox.put(start)
        if draw(4) == 1:
            _send_strange_commands(plane, draw(6))
        if draw(2) == 1:
            limit_w = (LIMIT_W, None)[draw(2, often=0.3)]
            controls = DeviceControls(revision=2, power_limit_w=limit_w, clock_mhz=(None, CLOCK_MHZ)[draw(2)])
            plane.outbox.put(SetDevices(allocation_id=start.allocation_id, settings=controls))
            allocation.settings.append(controls)
            if draw(2):  # of an earlier revision, which comes late
                stale = DeviceControls(revision=1, power_limit_w=None, clock_mhz=None)
                plane.outbox.put(SetDevices(allocation_id=start.allocation_id, settings=stale))
                allocation.settings.append(stale)


def _send_strange_commands(plane: _Plane, which: int) -> None:
    """Send what a node has seen before, does not know, or should not obey."""
    outbox_, document = plane.outbox, plane.outbox.sent[-1]
    match which:
        case 0 | 1:  # as a relay does that has lost its database
            for each in outbox_.sent[-8:]:
                outbox_.put(each)
        case 2:
            outbox_.put(StopGang(allocation_id="../elsewhere", grace_s=0.0, reason="asked"))
            outbox_.put({**document, "type": "start_gang", "allocation_id": "../elsewhere"})
            outbox_.put({"type": "start_gang", "allocation_id": "../elsewhere"})
        case 3:  # of a newer release
            plane.refused.add("new.1")
            outbox_.put({**document, "type": "start_gang", "allocation_id": "new.1", "new_field": 1})
        case 4 if plane.is_newest(document):  # of a generation that is over
            plane.stale.add("old.1")
            plane.refused.add("old.1")
            outbox_.put({**document, "allocation_id": "old.1", "generation": document["generation"] - 1})
        case 4:  # of a type that is not known
            outbox_.put({"type": "resize_gang", "allocation_id": "odd.1"})
        case _:
            plane.refused.add("bad.1")
            outbox_.put({"type": "start_gang", "allocation_id": "bad.1"})


@cache
def _spec() -> JobSpec:
    return JobSpec.model_validate({"name": "job", "command": ["work"], "grace_s": 1.0, "progress": {"source": "http"}})


def _a_gang(job: str, generation: int, devices: list[int], *, shares: bool) -> StartGang:
    return StartGang(
        allocation_id=f"{job}.{generation}",
        job_id=job,
        generation=generation,
        tenant_id="t",
        spec=_spec(),
        devices=devices,
        shares=shares,
        node_rank=0,
        rank_offset=0,
        nnodes=1,
        world_size=len(devices),
        master_addr="127.0.0.1",
        master_port=29_500,
    )


def _check_energy(
    simulation: Simulation, plane: _Plane, shims: _Shims, agent: _Agent | _Measuring, deaths: int
) -> None:
    metered_j = sum(device.energy_j for device in agent.driver._devices)  # type: ignore[union-attr]
    intervals = [*plane.intervals.values(), *agent.spool.batch(10**6)]
    known = {(each.boot_id, each.sequence): each for each in intervals}
    rejected = agent.spool._rejected_path
    known |= {key: shims.drawn.made[key][0] for key in shims.drawn.given_up}
    for line in rejected.read_bytes().splitlines() if rejected.exists() else ():
        each = EnergyInterval.model_validate_json(line)
        known[each.boot_id, each.sequence] = each
    for each in known.values():
        for usage in each.usages:
            given = plane.allocations.get(usage.allocation_id or "")
            if given is not None:
                early_s = EPOCH_S + given.put_s - each.end_at.timestamp() - shims.most_ahead_s
                what = f"{usage.allocation_id}: {early_s:.1f} s"
                simulation.check("no energy of a gang is earlier than the gang", early_s <= 0.0, what)
    _check_intervals(simulation, plane, shims, list(known.values()))
    told_j = sum(usage.gpu_energy_j for each in known.values() for usage in each.usages)
    has_failed = plane.devices is not None and plane.devices.has_failed  # then a model takes the place of the meter
    is_all = has_failed or abs(told_j - metered_j) <= 1e-3 * metered_j + 500.0
    simulation.check("every joule is told once", is_all, f"{told_j:.1f} J are told, {metered_j:.1f} J were drawn")
    if deaths:
        return
    ended_at = {each.start.allocation_id: each.ended_s for each in shims.all.values() if each.ended_s is not None}
    for each in known.values():
        for usage in each.usages:
            end_s = ended_at.get(usage.allocation_id or "")
            if end_s is not None and usage.gpu_energy_j > 0:
                late_s = each.end_at.timestamp() - end_s - 2 * shims.most_ahead_s
                what = f"{usage.allocation_id}: {late_s:.1f} s"
                simulation.check(
                    "no energy of a gang is later than its end and one interval",
                    late_s <= LATE_END_S + shims.stood_s,
                    what,
                )


def _check_intervals(simulation: Simulation, plane: _Plane, shims: _Shims, known: list[EnergyInterval]) -> None:
    """Intervals follow one another, come to what was metered, and name devices of their own gangs."""
    by_boot: dict[str, list[EnergyInterval]] = {}
    for each in sorted(known, key=lambda each: each.sequence):
        by_boot.setdefault(each.boot_id, []).append(each)
        booked_j = sum(usage.gpu_energy_j for usage in each.usages)
        is_all = each.metered_gpu_energy_j is None or abs(each.metered_gpu_energy_j - booked_j) <= 1.0 + 1e-3 * booked_j
        has_failed = plane.devices is not None and plane.devices.has_failed
        what = f"{each.metered_gpu_energy_j} J were metered, {booked_j} J are told"
        simulation.check("an interval comes to what was metered", is_all or has_failed, what)
        is_modelled = any(usage.source is EnergySource.MODELLED for usage in each.usages)
        is_cut = any(usage.until is not None for usage in each.usages)
        may_be = has_failed or is_cut or (plane.devices is not None and plane.devices.estimates)
        simulation.check("what was metered is not modelled", may_be or not is_modelled, str(each))
        length_s = (each.end_at - each.start_at).total_seconds()
        simulation.check("an interval does not end before it begins", length_s >= 0, str(length_s))
        for usage in each.usages:
            given = plane.allocations.get(usage.allocation_id or "")
            own = given is None or set(usage.devices) <= set(given.start.devices)
            simulation.check("energy is of a gang's own devices", own, f"{usage.allocation_id}: {usage.devices}")
            is_there = usage.until is None or not usage.gpu_energy_j or each.start_at <= usage.until <= each.end_at
            simulation.check("who ended within an interval did so within it", is_there, str(usage.until))
    for begins_s in shims.boots:
        first_s, last_s = begins_s - 2 * shims.most_ahead_s, begins_s + 2 * shims.most_ahead_s
        spans = [each for each in known if each.start_at.timestamp() < first_s and last_s < each.end_at.timestamp()]
        simulation.check("no interval spans a restart of the host", not spans, str([each.sequence for each in spans]))
    for intervals in by_boot.values():
        for one, other in pairwise(intervals):
            gap_s = (other.start_at - one.end_at).total_seconds()
            was_set = shims.most_ahead_s > 0 and abs(gap_s) >= CLOCK_SET_S
            follows = other.sequence == one.sequence + 1 and (abs(gap_s) < 1e-3 or was_set)
            simulation.check("intervals follow one another", follows, f"{one.sequence}, {other.sequence}: {gap_s} s")


def _known_otherwise(plane: _Plane, shims: _Shims) -> str | None:
    """Say with which devices a node was registered, if it takes itself to be registered with others."""
    agent = shims.agent
    if agent is None or not agent.plane.is_registered:
        return None
    known = plane.registered, agent.plane._registration.devices
    if plane.same is not None and plane.same[0] is known[0] and plane.same[1] is known[1]:
        return None
    if known[0] == known[1]:
        plane.same = known  # compared once: this is asked after every step
        return None
    return str(plane.registered)


def _started_wrongly(plane: _Plane, shims: _Shims) -> str | None:
    return next((k for k, n in shims.started.items() if n > 1 or not plane.allocations[k].may_start), None)


def _too_many_hold(shims: _Shims) -> str | None:
    running = shims.running()
    if len(running) < 2:
        return None
    if len({each.job_id for each in running}) < len(running):
        return str([each.allocation_id for each in running])
    for device in range(GPUS):
        holders = [each for each in running if device in each.devices]
        if len(holders) > 1 + any(each.shares for each in holders):
            return f"{device}: {[each.allocation_id for each in holders]}"
    return None


def _at_once(simulation: Simulation) -> str | None:
    threads = simulation.loop.threads
    if len(threads) < 2:
        return None
    names = [getattr(each, "__name__", "") for each in threads]
    found = [[name for name in names if name in known] for known in ({"_write"}, USING_DEVICES)]
    return str(found) if max(map(len, found)) > 1 else None
