"""What a gang is charged: the time from when it is given its devices until it ends, in whichever way it ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_agent import meter, shim
from gpu_agent.gangs import Gang, Gangs
from gpu_agent.inputs import Fetcher, Inputs
from gpu_agent.meter import Meter
from gpu_agent.ranks import Launch, RankFolder
from gpu_agent.secrets import InputError
from gpu_agent.spool import Spool
from services.contracts.codes import ProblemCode
from services.contracts.commands import StartGang, StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy
from services.contracts.secrets import OpenedSecrets
from services.contracts.sources import OpenedChunk, Source
from services.core.domain.errors import DomainError
from services.kit.problems import ProblemError
from tests.agent.conftest import a_launcher
from tests.agent.test_gangs import a_start
from tests.agent.test_meter import World, a_meter

LEASE_S = 1_000.0
WATTS = 100.0
"""Of device 0 of the world."""


def live_in(world: World, patch: pytest.MonkeyPatch) -> None:
    """Have meters and leases live in a world's time."""
    patch.setattr(meter, "clock", lambda: world.now_s)
    patch.setattr(meter, "utc_now", lambda: world.at)
    patch.setattr(meter, "cpu_seconds", lambda _: dict[str, float]())
    patch.setattr(shim, "clock", lambda: world.now_s)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose time the node lives in."""
    made = World()
    live_in(made, monkeypatch)
    return made


class Plane:
    """A control plane that has none of the inputs it is asked for, and answers when a gang's gate opens."""

    def __init__(self, gates: Mapping[str, asyncio.Event]) -> None:
        self.gates = gates

    async def open_secrets(self, allocation_id: str) -> OpenedSecrets:
        await self.gates[allocation_id].wait()
        return OpenedSecrets(secrets=[], missing=["The secret A does not exist any more."])

    async def read_chunk(self, allocation_id: str, number: int) -> OpenedChunk:
        await self.gates[allocation_id].wait()
        raise ProblemError(404, ProblemCode.NOT_FOUND, "There is no such part.")


class Sources:
    """Sources that read the upload they are asked for, and have no commit."""

    def __init__(self, gates: Mapping[str, asyncio.Event]) -> None:
        self.gates = gates

    async def make(self, source: Source, rank: Path, read_chunk: Any, *_: Any) -> Path:
        if source.upload is not None:
            await read_chunk(0)
        await self.gates[rank.name].wait()
        raise InputError("There is no commit 0123456 in the repository.")


class Host:
    """A node of two GPUs with its meter; no process runs, and a rank's folder says what the test says.

    What a gang needs is there once its gate is open; ``trouble`` is what its start meets then.
    """

    def __init__(self, world: World, folder: Path, measuring: Meter) -> None:
        self.world, self.folder, self.meter = world, folder, measuring
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.trouble: Exception | None = None
        self.locks: dict[str, int] = {}
        plane, sources = Plane(self.gates), Sources(self.gates)
        self.launcher = a_launcher(folder, 2)
        self.fetcher = Fetcher(plane, sources, 0.01, self.launcher)  # pyright: ignore[reportArgumentType]
        self.gangs = Gangs(folder, self.launcher, fetch=self.fetch)
        self.gangs.load()

    async def fetch(self, start: StartGang, rank: Path) -> Inputs:
        inputs = await self.fetcher.fetch(start, rank)
        await self.gates[start.allocation_id].wait()
        return inputs

    def launch(self, folder: RankFolder) -> subprocess.Popen[bytes] | None:
        """Start a rank as a shim would say it did, or fail."""
        if self.trouble is not None:
            raise self.trouble
        self.locks[folder.path.name] = lock = os.open(folder.path / shim.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        shim.write_facts(
            str(folder.path / shim.STARTED), {"started_at": 0.0, "shim": os.getpid(), "kernel_boot": shim.kernel_boot()}
        )

    def end(self, gang: Gang, code: int, ended_by: EndedBy) -> None:
        """End a rank as a shim would say it did."""
        facts = {"code": code, "ended_by": ended_by.value, "ended_at": self.world.at.timestamp()}
        shim.write_facts(str(gang.folder.path / shim.EXITED), facts)
        os.close(self.locks.pop(gang.allocation_id))

    def start(self, job: str, device: int = 0, **spec: Any) -> Gang:
        """Have a gang accepted and named."""
        command = a_start(job, 1, [device])
        whole = {"name": "a", "command": ["true"], **spec}
        self.gangs.accept(command.model_copy(update={"spec": JobSpec.model_validate(whole)}))
        self.renew()
        gang = self.gangs.get(command.allocation_id)
        assert gang is not None
        return gang

    def renew(self) -> None:
        """Have the control plane name every gang."""
        states = {each.allocation_id: each.state for each in self.gangs}
        self.gangs.answer(states, set(states), self.world.now_s, LEASE_S)

    async def tick(self) -> None:
        """Look, as the agent does four times a second."""
        await self.gangs.tick(self.meter.switch)
        await asyncio.sleep(0)

    async def until_launched(self, gang: Gang) -> None:
        """Let a gang have what it needs, and return once its start is over."""
        self.gates[gang.allocation_id].set()
        if gang.launching is not None:
            await gang.launching

    def charged_s(self, gang: str) -> float:
        """Return for how long the gang's lines run."""
        intervals = Spool(self.folder).batch(10_000)
        mine = [(each, usage) for each in intervals for usage in each.usages if usage.allocation_id == gang]
        return sum((each.end_at - each.start_at).total_seconds() for each, _ in mine)

    def charged_j(self, gang: str) -> float:
        """Return the GPU energy of the gang's lines."""
        intervals = Spool(self.folder).batch(10_000)
        return sum(usage.gpu_energy_j for each in intervals for usage in each.usages if usage.allocation_id == gang)

    def clear(self) -> None:
        """Let go of what ranks hold."""
        for lock in self.locks.values():
            os.close(lock)


async def a_host(world: World, folder: Path, patch: pytest.MonkeyPatch) -> Host:
    host = Host(world, folder, await a_meter(world, folder))

    def launch(self: RankFolder, made: Launch, deadline: float, lease_s: float) -> Any:
        return host.launch(self) or Running()

    patch.setattr(RankFolder, "launch", launch)
    return host


class Running:
    """A shim that runs."""

    pid = 1

    def poll(self) -> None:
        return None


# --- the ways in which a gang can end: each begins it, lets it have its devices for five seconds, and ends it

Way = Callable[[Host, World, pytest.MonkeyPatch], Awaitable[Gang]]


async def begun(host: Host, world: World, **spec: Any) -> Gang:
    """Return a gang that has had its devices for five seconds, without what it needs."""
    gang = host.start("job_1", **spec)
    await host.tick()
    assert host.gangs.owners() == {0: "job_1.1"}
    world.pass_time(5)
    return gang


async def running(host: Host, world: World) -> Gang:
    """Return a gang that has run for five seconds."""
    gang = host.start("job_1")
    await host.tick()
    await host.until_launched(gang)
    world.pass_time(5)
    await host.tick()
    assert gang.started_at is not None
    return gang


def lacks(**spec: Any) -> Way:
    async def way(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
        gang = await begun(host, world, **spec)
        await host.until_launched(gang)
        return gang

    return way


def cannot(name: str, error: Exception) -> Way:
    async def way(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
        def fails(*_: Any) -> None:
            raise error

        gang = await begun(host, world, working_dir=str(host.folder))
        patch.setattr(host.launcher, name, fails)
        await host.until_launched(gang)
        return gang

    return way


def meets(error: Exception) -> Way:
    async def way(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
        host.trouble = error
        gang = await begun(host, world)
        await host.until_launched(gang)
        return gang

    return way


async def closed_folder(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    class Account:
        name, environment = "tenant-t", dict[str, str]()

        def can_enter(self, path: Path) -> bool:
            return False

    gang = await begun(host, world, working_dir=str(host.folder))
    patch.setattr(host.launcher, "account_of", lambda _: Account())
    await host.until_launched(gang)
    assert "cannot" in gang.detail
    return gang


async def cancelled_while_fetching(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await begun(host, world)
    host.gangs.stop(StopGang(allocation_id=gang.allocation_id, grace_s=0, reason="cancelled"))
    assert gang.launching is not None
    await gang.launching
    return gang


async def lease_lost_while_fetching(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await begun(host, world)
    host.gangs.deadline = world.now_s - 1
    assert gang.launching is not None
    await gang.launching
    host.gangs.deadline = world.now_s + LEASE_S
    return gang


async def superseded_while_fetching(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await begun(host, world)
    host.gangs.accept(a_start("job_1", 2, [1]))
    assert gang.launching is not None
    await gang.launching
    return gang


async def unknown_while_fetching(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await begun(host, world)
    host.gangs.answer({gang.allocation_id: gang.state}, set(), world.now_s, LEASE_S)
    assert gang.launching is not None
    await gang.launching
    return gang


def exits(code: int, ended_by: EndedBy) -> Way:
    async def way(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
        gang = await running(host, world)
        host.end(gang, code, ended_by)
        return gang

    return way


async def shim_killed(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await running(host, world)
    os.close(host.locks.pop(gang.allocation_id))
    return gang


async def looked_at_between_ticks(host: Host, world: World, patch: pytest.MonkeyPatch) -> Gang:
    gang = await running(host, world)
    host.end(gang, 0, EndedBy.ITSELF)
    host.gangs._observe(gang)  # pyright: ignore[reportPrivateUsage]
    return gang


UPLOAD = {"upload": "0" * 64}
COMMIT = {"git": {"url": "https://example.com/a.git", "revision": "0123456789" * 4}}

WAYS: dict[str, Way] = {
    "missing secret": lacks(secrets=[{"name": "A", "env": "TOKEN"}]),
    "missing upload": lacks(source=UPLOAD),
    "missing commit": lacks(source=COMMIT),
    "closed folder": closed_folder,
    "missing account": cannot("account_of", DomainError("this node has no account for the tenant t")),
    "device gone": cannot("_lack_of_devices", InputError("this node has no devices for it")),
    "engine gone": cannot("_command", FileNotFoundError("docker")),
    "disk full": meets(OSError(28, "No space left on device")),
    "a fault of ours": meets(KeyError("rank")),
    "cancelled while fetching": cancelled_while_fetching,
    "lease lost while fetching": lease_lost_while_fetching,
    "superseded while fetching": superseded_while_fetching,
    "unknown while fetching": unknown_while_fetching,
    "finished": exits(0, EndedBy.ITSELF),
    "failed": exits(3, EndedBy.ITSELF),
    "stopped": exits(-15, EndedBy.STOP),
    "time limit": exits(-15, EndedBy.TIME_LIMIT),
    "lease": exits(-9, EndedBy.LEASE),
    "shim killed": shim_killed,
    "seen between two ticks": looked_at_between_ticks,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_a_gang_is_charged_until_it_ends_and_no_longer(
    way: Way, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await a_host(world, tmp_path, monkeypatch)
    try:
        gang = await way(host, world, monkeypatch)
        await host.tick()
        assert gang.is_over
        ended_at = world.at
        for _ in range(3):
            world.pass_time(10)
            await host.tick()
        await host.meter.close()
    finally:
        host.clear()

    assert host.charged_s("job_1.1") == pytest.approx(5)
    assert host.charged_j("job_1.1") == pytest.approx(5 * WATTS)
    named = [each for each in Spool(tmp_path).batch(1_000) if "job_1.1" in {u.allocation_id for u in each.usages}]
    assert max(each.end_at for each in named) == ended_at


async def test_a_gang_without_an_engine_for_its_container_is_charged_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await a_host(world, tmp_path, monkeypatch)
    gang = host.start("job_1", image="python:3.12")
    for _ in range(3):
        world.pass_time(10)
        await host.tick()
    await host.meter.close()

    assert gang.is_over
    assert host.charged_s("job_1.1") == 0


async def test_a_meter_that_could_not_be_told_is_told_at_the_next_tick(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await a_host(world, tmp_path, monkeypatch)
    await begun(host, world)
    await host.until_launched(host.gangs.get("job_1.1"))  # pyright: ignore[reportArgumentType]
    await host.tick()
    host.end(host.gangs.get("job_1.1"), 0, EndedBy.ITSELF)  # pyright: ignore[reportArgumentType]

    async def fails(*_: object) -> None:
        raise OSError("the driver does not answer")

    with pytest.raises(OSError, match="driver"):
        await host.gangs.tick(fails)
    world.pass_time(1)
    await host.tick()
    world.pass_time(10)
    await host.meter.close()
    assert host.charged_s("job_1.1") == pytest.approx(6)


STEP = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("pass"), st.integers(1, 9), st.booleans()),
)
"""What happens, on which device or for how many seconds, and whether a tick follows."""


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, min_size=4, max_size=24))
def test_whatever_starts_and_ends_between_ticks_each_second_is_its_holders(steps: list[tuple[str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        asyncio.run(_live(steps, Path(folder), patch))


async def _live(steps: list[tuple[str, int, bool]], folder: Path, patch: pytest.MonkeyPatch) -> None:
    world = World()
    live_in(world, patch)
    host = await a_host(world, folder, patch)
    alive: dict[int, Gang] = {}
    holders: dict[int, str] = {}  # at the last tick
    expected_j: dict[str, float] = {}
    for number, (what, value, ticks) in enumerate(steps):
        if what == "start" and value not in alive:
            alive[value] = host.start(f"job_{number}", value)
        elif what == "end" and value in alive:
            gang = alive.pop(value)
            if gang.launching is not None:  # its start fails; a gang that has no devices yet is stopped
                host.trouble = InputError("There is no such commit.")
                await host.until_launched(gang)
            else:
                host.gangs.stop(StopGang(allocation_id=gang.allocation_id, grace_s=0, reason="cancelled"))
        elif what == "pass":
            world.pass_time(value)
            for device, name in holders.items():
                expected_j[name] = expected_j.get(name, 0.0) + value * world.power_w[device]
        if ticks:
            host.renew()
            await host.tick()
            holders = {device: gang.allocation_id for device, gang in alive.items()}
    for gang in alive.values():
        if gang.launching is not None:
            gang.launching.cancel()
    await host.meter.close()
    booked = {gang.allocation_id: host.charged_j(gang.allocation_id) for gang in host.gangs}
    assert {name: j for name, j in booked.items() if j} == pytest.approx(expected_j)


async def test_each_gang_that_ends_with_its_agent_is_charged_until_it_ends(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ends at once, and the other takes the whole grace period."""
    host = await a_host(world, tmp_path, monkeypatch)
    quick, slow = host.start("job_1"), host.start("job_2", device=1)
    await host.tick()
    for gang in (quick, slow):
        await host.until_launched(gang)
    world.pass_time(5)
    await host.tick()
    sleep, looks = asyncio.sleep, 0

    async def later(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            host.end(quick, -15, EndedBy.AGENT)
        elif looks == 12:
            host.end(slow, -9, EndedBy.AGENT)
        else:
            world.pass_time(1)
            await host.meter.close()
        await sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", later)
        patch.setattr(os, "kill", lambda *_: None)  # the shim is this process
        await host.gangs.stop_all(60.0, host.meter.switch)
    await host.meter.close()
    assert host.charged_s(quick.allocation_id) == pytest.approx(5)
    assert host.charged_s(slow.allocation_id) == pytest.approx(15)
    host.clear()
