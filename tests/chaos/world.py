"""A whole installation whose processes are joined by links, and the hand that does things to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import psutil
from redis.exceptions import RedisError

from services.contracts.streams import command_stream
from services.kit.redis import connect
from services.kit.tasks import end_tasks
from services.standalone import processes
from services.standalone.data_folder import ProcessStatus
from services.standalone.doors import Door
from services.standalone.identities import Identities
from services.standalone.stack import Stack
from services.standalone.supervisor import Supervisor
from tests.chaos.clocks import Clocks
from tests.chaos.faults import Fault
from tests.chaos.links import TROUBLES, Link, Trouble
from tests.chaos.models import FLEET_GPUS, FLEET_MODEL
from tests.chaos.watch import Watch
from tests.integration.conftest import QUICK
from tests.support.ports import Ports
from tests.support.servers import ON_PORTS, tcp_postgres, tcp_postgres_url, tcp_valkey, tcp_valkey_url

SETTINGS = QUICK | {
    "TELEMETRY_LEASE_TTL_S": "4",
    "TELEMETRY_RETENTION_INTERVAL_S": "5",  # also how often lines outside their gangs' lives are given back
    "SCHEDULER_NODE_RETURN_S": "0.5",
    "GPU_AGENT_DISK_RESERVE_BYTES": "0",
    "SERVING_INSTANCE_LOOK_S": "0.3",
    "SERVING_PLAN_LOOK_S": "0.5",
    "SERVING_PLAN_RETRY_S": "3",
    "SERVING_PLAN_SETTLE_S": "2",
    "SERVING_PLAN_EVENT_GAP_S": "10",
    "SERVING_FLEET_CUT_S": "30",
    "SERVING_FLEET_RETRY_S": "3",
    "GPU_AGENT_PARTITION_RETRY_S": "0.5",
    "ROUTER_QUEUE_TIMEOUT_S": "15",
}
"""Leases that long faults outlast, nodes that are given up although the scheduler was away a moment ago, and
small disks that count as free until they are full; plans and instances by the second, as rounds are."""
NODES = processes.parse_nodes(f"2x2,1x4,1x{FLEET_GPUS}:{FLEET_MODEL}")
WORKERS = ("plan-solver",)
DISK_MB = 32
PASSWORD = "chaos"
CONTROL = "control"
"""The host of the control plane, as one that has a clock."""
REPEATED = 8
"""How many of a node's last commands are sent again at once."""


class World:
    """Servers, services and agents; ``apply`` does a fault, ``calm`` waits until everything runs again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.done: Counter[str] = Counter()
        self.job, self.server = folder / "programs" / "job.py", folder / "programs" / "server.py"
        self.watch = Watch(self.job, self.server)
        self.slain: defaultdict[str, set[str]] = defaultdict(set)
        self.stack = Stack(folder / "data", nodes="", env=ON_PORTS | SETTINGS, workers=WORKERS, watches=False)
        # A supervisor that watched would replace what is frozen before its lease is over.
        self._servers, self._agents = Supervisor(folder, watches=False), Supervisor(folder, watches=False)
        self._ports = Ports()
        self._links: dict[str, Link] = {}
        self._valkey_url = ""
        self._disks: list[Path] = []
        self._clocks = Clocks(folder / "clocks", (CONTROL, *(node.node_id for node in NODES)))
        self._heard: dict[str, deque[dict[Any, Any]]] = {node.node_id: deque(maxlen=REPEATED) for node in NODES}
        self._listeners: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()

    @property
    def gateway_url(self) -> str:
        """Where the public API answers."""
        return self.stack.gateway_url

    @property
    def router_url(self) -> str:
        """Where models are asked."""
        return self.stack.urls["router"]

    @property
    def key(self) -> str:
        """The admin key."""
        return (self.folder / "data" / "admin.key").read_text().strip()

    def targets(self) -> dict[str, Sequence[str]]:
        """Return what each kind of fault can hit."""
        running = [process.name for process in self._processes()]
        nodes = [node.node_id for node in NODES]
        agents = [f"agent-{node}" for node in nodes]
        on_nodes = dict.fromkeys(("repeat", "reorder", "slay", "orphan"), nodes)
        links = {trouble: [*self._links] for trouble in TROUBLES}
        full = [path.name for path in self._disks]
        return {
            "kill": running,
            "freeze": running,
            "lose": agents,
            "part": nodes,
            **links,
            **on_nodes,
            "wipe": ["valkey"],
            "fill": full,
            "jump": self._clocks.hosts,
        }

    async def apply(self, fault: Fault) -> None:
        """Let something go wrong for as long as it lasts; what could not be done is not counted."""
        match fault.kind:
            case "kill":
                happened = self._signal(fault.target, signal.SIGKILL)
            case "freeze" | "lose":
                happened = await self._freeze(fault)
            case "repeat" | "reorder" | "wipe":
                happened = await self._disturb(fault)
            case "slay" | "orphan":
                happened = self._slay(fault)
            case "fill":
                happened = await self._fill(fault)
            case "jump":
                self._clocks.move(fault.target, fault.by_s)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._clocks.move(fault.target, 0)
                happened = True
            case "part":
                links = [link for name, link in self._links.items() if name.startswith(f"{fault.target}-")]
                happened = await _trouble(links, "cut", fault.lasts_s)
            case _:
                happened = await _trouble([self._links[fault.target]], cast(Trouble, fault.kind), fault.lasts_s)
        self.done[fault.kind] += happened

    async def calm(self, within_s: float = 90.0) -> list[str]:
        """Return the names of processes that do not run in time, none if all is well."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while late := [process.name for process in self._processes() if process.state != "running"]:
            if loop.time() > deadline:
                return late
            await asyncio.sleep(0.1)
        return []

    async def __aenter__(self) -> Self:
        self.notes.mkdir()
        self.notes.chmod(0o777)  # jobs write there, each as the account of its tenant
        self.job.parent.mkdir()
        self.job.parent.chmod(0o755)  # every account reads them
        for program in (self.job, self.server):
            install(program)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        at, asked = self._ports.take(21_000), self._ports.take(27_000)
        database = replace(tcp_postgres(self.folder / "postgres", at, PASSWORD), stop_within_s=5)
        cache = tcp_valkey(self.folder / "valkey", asked, PASSWORD)
        clock = self._clocks.environment(CONTROL)
        database, cache = (replace(each, environment={**each.environment, **clock}) for each in (database, cache))
        await self._servers.start([database, cache])
        self._valkey_url = tcp_valkey_url(asked, PASSWORD)
        to_database, to_cache = await self._link("services-postgres", at), await self._link("services-valkey", asked)
        self.stack.environment |= clock | {
            "DATABASE_URL": tcp_postgres_url(to_database.port, PASSWORD),
            "REDIS_URL": tcp_valkey_url(to_cache.port, PASSWORD),
        }
        await self.stack.start()
        telemetry = next(each.port for each in self.stack.status().processes if each.name == "telemetry")
        assert telemetry
        folder = self.folder / "data" / "nodes"
        folder.mkdir(exist_ok=True, mode=0o711)
        secrets = Identities(self.stack.folder, self.stack.environment)
        agents: list[Any] = []
        for node in NODES:
            self._mount(folder / node.node_id)
            reports = await self._link(f"{node.node_id}-telemetry", telemetry)
            commands = await self._link(f"{node.node_id}-valkey", asked)
            own = {
                "WATTSHIFT_TELEMETRY_URL": f"http://127.0.0.1:{reports.port}",
                "REDIS_URL": tcp_valkey_url(commands.port, PASSWORD),
            } | self._clocks.environment(node.node_id)
            port = self._ports.take(28_000)
            own["GPU_AGENT_PROGRESS_PORT"] = str(self._ports.take(28_100))
            environment = secrets.of_node(node.node_id, self.stack.environment) | own
            agents.append(processes.agent_process(node, Door(("127.0.0.1", port)), environment, folder))
        await self._agents.start(agents)
        self._listeners = [asyncio.create_task(self._listen(node.node_id)) for node in NODES]

    async def _stop(self) -> None:
        await end_tasks(self._listeners)
        for process in self._processes():
            self._signal(process.name, signal.SIGCONT)
        await self._agents.stop()
        await self.stack.stop()
        await self._servers.stop()
        await self._open.aclose()
        self._ports.release()
        self._clocks.close()
        for disk in self._disks:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)  # noqa: ASYNC221, at the very end

    async def _link(self, name: str, port: int) -> Link:
        self._links[name] = await self._open.enter_async_context(Link("127.0.0.1", port))
        return self._links[name]

    def _mount(self, folder: Path) -> None:
        """Give a node a small disk of its own, where that is permitted."""
        folder.mkdir(mode=0o711)
        size = f"size={DISK_MB}m,mode=711"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
        if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
            self._disks.append(folder)

    def _processes(self) -> tuple[ProcessStatus, ...]:
        return (*self._servers.status(), *self.stack.status().processes, *self._agents.status())

    def _signal(self, name: str, number: signal.Signals) -> bool:
        pid = next(process.pid for process in self._processes() if process.name == name)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def _slay(self, fault: Fault) -> bool:
        """Kill a process of a job or model server on a node, or the shim above it; remember whose gang that was."""
        running = sorted((each for each in self.watch.look() if each.node == fault.target), key=lambda each: each.pid)
        if not running:
            return False
        victim = running[int(1e3 * fault.at_s) % len(running)]
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(victim.pid)
            if fault.kind == "orphan":
                process = process.parent()
                if process is None or not any("import shim" in word for word in process.cmdline()):
                    return False
            self.slain[victim.job].add(victim.allocation)
            process.kill()
            return True
        return False

    async def _freeze(self, fault: Fault) -> bool:
        pid = next(process.pid for process in self._processes() if process.name == fault.target)
        if pid is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            frozen = psutil.Process(pid)
            # PostgreSQL's sessions are processes of their own.
            family = [frozen, *frozen.children(recursive=True)] if fault.target == "postgres" else [frozen]
            try:
                for each in family:
                    each.suspend()
                await asyncio.sleep(fault.lasts_s)
            finally:
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.resume()
            return True
        return False

    async def _disturb(self, fault: Fault) -> bool:
        redis = connect(self._valkey_url)
        try:
            async with asyncio.timeout(5):
                if fault.kind == "wipe":
                    return bool(await redis.flushall())
                heard = self._heard[fault.target]
                for fields in [*reversed(heard)] if fault.kind == "reorder" else [*heard]:
                    await redis.xadd(command_stream(fault.target), fields)
                return bool(heard)
        except (RedisError, TimeoutError):
            return False
        finally:
            with contextlib.suppress(RedisError, TimeoutError):
                await redis.aclose()

    async def _listen(self, node_id: str) -> None:
        """Remember a node's last commands; the agent removes those that it has read."""
        stream = command_stream(node_id)
        while True:
            redis = connect(self._valkey_url)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                last: Any = "$"
                while True:
                    for _, entries in cast(list[Any], await redis.xread({stream: last}, block=1_000)):
                        last = entries[-1][0]
                        known = self._heard[node_id]
                        known.extend(fields for _, fields in entries if fields not in known)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await redis.aclose()
            await asyncio.sleep(0.2)

    async def _fill(self, fault: Fault) -> bool:
        folder = next(path for path in self._disks if path.name == fault.target)
        balloon = folder / f"balloon-{fault.at_s:.3f}"
        try:
            with contextlib.suppress(OSError), balloon.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            await asyncio.sleep(fault.lasts_s)
        finally:
            balloon.unlink(missing_ok=True)
        return True


async def _trouble(links: Sequence[Link], trouble: Trouble, lasts_s: float) -> bool:
    for link in links:
        link.begin(trouble)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        for link in links:
            link.end(trouble)
    return True


def install(program: Path) -> None:
    """Copy the program of this name to where every account can read it."""
    shutil.copyfile(Path(__file__).with_name(program.name), program)
    program.chmod(0o644)
