"""A node for a test: an agent process, its state folder, its command stream, and the control plane's stand-in."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from redis.asyncio import Redis

from gpu_agent import trees
from gpu_agent.confinement import Confinement
from gpu_agent.containers import Engine
from gpu_agent.launch import Inputs, Launcher
from gpu_agent.settings import AgentSettings
from services.contracts.commands import AnyCommand, SetDevices, StartGang, command_document
from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls, DeviceInfo
from services.contracts.streams import COMMAND_FIELD, command_stream
from services.kit.redis import connect
from tests.agent.stand_in import JOIN_TOKEN, StandIn, headers_to
from tests.support.forked import Forked
from tests.support.ports import Ports
from tests.support.servers import ROOT, scratch_folder

_numbers = itertools.count(1)


async def eventually(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    """Return as soon as ``condition`` holds; fail if it does not within ``within_s``."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what a test waits for happens in another process
            await asyncio.sleep(0.01)


def gpus(count: int) -> list[DeviceInfo]:
    """Return GPUs, numbered from 0."""
    return [
        DeviceInfo(index=index, uuid=f"GPU-{index}", model="X", memory_gib=1, power_limit_w=300)
        for index in range(count)
    ]


def a_confinement(folder: Path, **settings: Any) -> Confinement:
    """Return how jobs are confined on a node whose state is in a folder."""
    return Confinement(AgentSettings(state_dir=folder, data_dir=folder, owner_tenants=["t"], **settings), {})


def a_launcher(folder: Path, devices: int = 4, engine: Engine | None = None, **settings: Any) -> Launcher:
    """Return what prepares the jobs of such a node."""
    chosen = AgentSettings(state_dir=folder, data_dir=folder, **settings)
    return Launcher(chosen, engine, gpus(devices), a_confinement(folder))


async def no_inputs(start: StartGang, rank: Path) -> Inputs:
    return Inputs()


class Node:
    """One agent and everything around it."""

    def __init__(self, folder: Path, plane: StandIn, redis: Redis, redis_url: str, ports: Ports, wanted: int) -> None:
        self.id = f"node-{os.getpid()}-{next(_numbers)}"
        self.folder = folder
        self.plane = plane
        self.redis = redis
        self.port, self.progress_port = ports.take(wanted), ports.take(wanted + 100)
        self.process: Forked | subprocess.Popen[bytes] | None = None
        self._others = {*psutil.pids()}  #: What ran before: to read what each process of a host is takes long
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "REDIS_URL": redis_url,
            "WATTSHIFT_TELEMETRY_URL": plane.url,
            "WATTSHIFT_NODE_JOIN_TOKEN": JOIN_TOKEN,
            "WATTSHIFT_DATA_DIR": str(folder / "data"),
            "GPU_AGENT_STATE_DIR": str(self.state_dir),
            "GPU_AGENT_NODE_ID": self.id,
            "GPU_AGENT_PORT": str(self.port),
            "GPU_AGENT_PROGRESS_PORT": str(self.progress_port),
            "GPU_AGENT_DRIVER": "simulated",
            "GPU_AGENT_CONTAINERS": "off",
            "GPU_AGENT_OWNER_TENANTS": "t",
            "GPU_AGENT_TICK_S": "0.05",
            "GPU_AGENT_SAMPLE_INTERVAL_S": "0.1",
            "GPU_AGENT_ENERGY_INTERVAL_S": "0.2",
            "GPU_AGENT_RETRY_S": "0.1",
        }

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def rank_dir(self, allocation_id: str) -> Path:
        return self.state_dir / "allocations" / allocation_id

    async def start(self, **environment: str) -> None:
        """Start the agent and wait until the control plane has heard from it."""
        heard = len(self.plane.heartbeats)
        self._spawn(self.environment | environment)
        await eventually(lambda: len(self.plane.heartbeats) > heard or self._died(), 90)

    def _spawn(self, environment: dict[str, str]) -> None:
        log = self.folder / "agent.log"
        if "LD_LIBRARY_PATH" not in environment:  # which is read when a program begins
            self.process = Forked("gpu_agent.app", env=environment, cwd=ROOT, output=log)
            return
        with log.open("ab") as output:
            command = [sys.executable, "-m", "gpu_agent.app"]
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _died(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            pytest.fail(f"the agent ended: {(self.folder / 'agent.log').read_text()[-3000:]}")
        return False

    def kill(self) -> None:
        """Kill the agent as the kernel would when memory runs out."""
        assert self.process
        self.process.kill()
        self.process.wait()
        self.process = None

    async def stop(self) -> None:
        """Ask the agent to end, and wait for it."""
        assert self.process
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 30)
        self.process = None

    async def send(self, command: AnyCommand | str) -> None:
        """Put a command into the node's stream."""
        text = command if isinstance(command, str) else json.dumps(command_document(command))
        await self.redis.xadd(command_stream(self.id), {COMMAND_FIELD: text})

    async def run(self, *argv: str, allocation: str = "", **options: Any) -> str:
        """Send a gang of one node and name it; return its allocation."""
        start = self.gang(*argv, allocation=allocation, **options)
        self.plane.named.add(start.allocation_id)
        await self.send(start)
        return start.allocation_id

    async def set(
        self,
        allocation: str,
        revision: int,
        *,
        w: float | None = None,
        mhz: int | None = None,
        interval_s: float | None = None,
    ) -> None:
        """Send what a gang's devices are to be set to; with ``interval_s`` it is measured."""
        measure = interval_s is not None
        settings = DeviceControls(
            revision=revision, power_limit_w=w, clock_mhz=mhz, measure=measure, interval_s=interval_s or 0.0
        )
        await self.send(SetDevices(allocation_id=allocation, settings=settings))

    def gang(self, *argv: str, allocation: str = "", job: str = "", **options: Any) -> StartGang:
        """Return a command for a gang of this node alone; ``options`` are fields of the command or of the spec."""
        job = job or f"job_{next(_numbers)}"
        generation = options.pop("generation", 1)
        devices = options.pop("devices", [0])
        tenant = options.pop("tenant", "t")
        fields = ("node_rank", "nnodes", "master_port", "world_size", "rank_offset", "account", "uuids")
        whole = {"node_rank": 0, "rank_offset": 0, "nnodes": 1, "master_port": 29_500, "world_size": len(devices)}
        placed: dict[str, Any] = whole | {name: options.pop(name) for name in fields if name in options}
        spec: dict[str, Any] = {"name": "test", "command": list(argv), "grace_s": 1.0, **options}
        return StartGang(
            allocation_id=allocation or f"{job}.{generation}",
            job_id=job,
            generation=generation,
            tenant_id=tenant,
            spec=JobSpec.model_validate(spec),
            devices=devices,
            master_addr="127.0.0.1",
            **placed,
        )

    async def get(self, path: str, *, token: str | None = None) -> tuple[int, Any, bytes]:
        """Call the agent as admission does, or with another token or none; return status, headers and body."""
        headers = headers_to(self.id) if token is None else {"authorization": f"Bearer {token}"} if token else {}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    def processes(self, named: str = "") -> list[psutil.Process]:
        """Return the living processes that ranks of this node are made of, those with `named` in their command."""
        mark = str(self.state_dir)
        found: list[psutil.Process] = []
        for pid in sorted({*psutil.pids()} - self._others):
            try:
                process = psutil.Process(pid)
                command = " ".join(process.cmdline())
                marked = mark in command or mark in process.environ().get("WATTSHIFT_PROGRESS_FILE", "")
                if marked and named in command and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_ranks(self, named: str = "") -> None:
        """Kill what `processes` returns."""
        for process in self.processes(named):
            with suppress(psutil.NoSuchProcess):  # its own parent's end may have taken it along
                process.kill()

    def clear(self) -> None:
        """Leave nothing behind, whatever runs."""
        if self.process is not None:
            self.kill()
        self.kill_ranks()


def states(nodes: list[Node], gang: str) -> list[tuple[str, int | None]]:
    """The gang's state on each node, by the newest heartbeat of each."""
    found: list[tuple[str, int | None]] = []
    for number, _ in enumerate(nodes):
        boot_id = list(dict.fromkeys(beat.boot_id for beat in nodes[0].plane.heartbeats))[number]
        newest = next(beat for beat in reversed(nodes[0].plane.heartbeats) if beat.boot_id == boot_id)
        found += [(rank.state.value, rank.exit_code) for rank in newest.ranks if rank.allocation_id == gang]
    return found


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that the accounts of jobs can write to; pytest closes its own ones whenever another run begins."""
    with scratch_folder() as folder:
        folder.chmod(0o777)
        yield folder


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that is beneath no temporary folder, of which each job has its own."""
    folder = Path(tempfile.mkdtemp(prefix="wattshift-test-", dir="/srv"))
    folder.chmod(0o755)
    yield folder
    trees.remove(folder)


@pytest.fixture
async def plane() -> AsyncIterator[StandIn]:
    """The control plane's stand-in."""
    async with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
async def node(tmp_path: Path, plane: StandIn, redis_url: str) -> AsyncIterator[Node]:
    """A node whose agent is not started yet; nothing of it is left when the test ends."""
    ports = Ports()
    redis = connect(redis_url)
    made = Node(tmp_path, plane, redis, redis_url, ports, 31_000)
    try:
        yield made
    finally:
        made.clear()
        await redis.aclose()
        ports.release()


@pytest.fixture
async def open_node(plane: StandIn, redis_url: str) -> AsyncIterator[Node]:
    """A node in a folder that every user can pass through, unlike pytest's own."""
    ports = Ports()
    redis = connect(redis_url)
    with scratch_folder() as folder:
        made = Node(folder, plane, redis, redis_url, ports, 31_800)
        (folder / "data").mkdir(mode=0o711)
        try:
            yield made
        finally:
            made.clear()
            await redis.aclose()
            ports.release()


@pytest.fixture
async def nodes(tmp_path: Path, plane: StandIn, redis_url: str) -> AsyncIterator[list[Node]]:
    """Two nodes that share a data folder, as the nodes of a cluster do."""
    ports = Ports()
    redis = connect(redis_url)
    made: list[Node] = []
    for name in ("n1", "n2"):
        (tmp_path / name).mkdir()
        made.append(Node(tmp_path / name, plane, redis, redis_url, ports, 31_600))
        made[-1].environment["WATTSHIFT_DATA_DIR"] = str(tmp_path / "shared")
    try:
        for node in made:
            await node.start()
        await eventually(lambda: len({beat.boot_id for beat in plane.heartbeats}) == len(made))
        yield made
    finally:
        for node in made:
            node.clear()
        await redis.aclose()
        ports.release()
