"""PostgreSQL and Redis over TLS, with certificates of `wattshift ca`, as every process of ours reaches them."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.exceptions import RedisError
from sqlalchemy import text
from typer.testing import CliRunner

from services.cli.main import app as cli
from services.db.database import Database
from services.db.engine import create_engine
from services.kit.celery import TaskLimits, create_celery
from services.kit.redis import connect
from services.kit.settings import SharedSettings
from tests.support.ports import Ports
from tests.support.servers import ROOT, scratch_folder, wait_until
from tests.support.tokens import TOKEN

SECURE = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Our authority with a host's certificate, and another authority."""
    with scratch_folder() as found:
        for name in ("ours", "others"):
            for words in (["init"], ["issue", "host"]):
                made = CliRunner().invoke(cli, ["ca", *words, "--folder", str(found / name)])
                assert made.exit_code == 0, made.output
        yield found


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    ports = Ports()
    yield ports.take(22_000)
    ports.release()


@pytest.fixture(scope="module")
def postgres(folder: Path, port: int) -> Iterator[str]:
    """The address of a PostgreSQL that takes no sessions but over TLS; the embedded one is built without it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("no PostgreSQL with TLS: Debian's package postgresql is not installed")
    place = folder / "postgres"
    place.mkdir()
    (place / "password").write_text("secret")
    for name in ("host.crt", "host.key"):
        shutil.copy(folder / "ours" / name, place / name)
    options: dict[str, Any] = {"cwd": place}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        options |= {"user": nobody.pw_uid, "group": nobody.pw_gid}
        for path in (place, *place.iterdir()):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    (place / "host.key").chmod(0o600)
    make = [found[-1].with_name("initdb"), "-D", "data", "-U", "wattshift", "-A", "scram-sha-256", "--pwfile=password"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, **options)
    (place / "data" / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
    settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "ssl=on"]
    settings += [f"ssl_cert_file={place}/host.crt", f"ssl_key_file={place}/host.key"]
    words = [word for setting in settings for word in ("-c", setting)]
    server = subprocess.Popen([found[-1], "-D", "data", "-p", str(port), *words], stderr=subprocess.DEVNULL, **options)
    url = f"postgresql://wattshift:secret@127.0.0.1:{port}/postgres"
    try:
        wait_until(lambda: server.poll() is not None or answers(url + verified(folder, "ours")))
        yield url
    finally:
        server.terminate()
        server.wait()


def verified(folder: Path, authority: str) -> str:
    return f"?sslmode=verify-full&sslrootcert={folder / authority / 'ca.crt'}"


def answers(url: str) -> bool:
    async def ask() -> bool:
        connection = await asyncpg.connect(url, timeout=5)
        try:
            return await connection.fetchval(SECURE)
        finally:
            await connection.close()

    with suppress(OSError, asyncpg.PostgresError, TimeoutError):
        return asyncio.run(ask())
    return False


def test_all_ways_to_the_database_are_over_tls(postgres: str, folder: Path) -> None:
    url = postgres + verified(folder, "ours")
    environment = {**os.environ, "DATABASE_URL": url}
    subprocess.run([sys.executable, "-m", "migrations"], cwd=ROOT, env=environment, check=True)

    async def look() -> list[bool]:
        database, engine = await Database.open(url), create_engine(url)
        async with database.connection() as ours, engine.connect() as alchemy:
            found = [await ours.fetchval(SECURE), bool((await alchemy.execute(text(SECURE))).scalar())]
            assert await ours.fetchval("SELECT count(*) FROM jobs") == 0
        await engine.dispose()
        await database.close()
        return found

    assert asyncio.run(look()) == [True, True]


def test_a_database_of_another_authority_and_one_without_tls_are_refused(postgres: str, folder: Path) -> None:
    assert answers(postgres + verified(folder, "ours"))
    assert not answers(postgres + verified(folder, "others"))
    assert not answers(postgres.replace("127.0.0.1", "127.0.0.2") + verified(folder, "ours"))
    assert not answers(postgres + "?sslmode=disable")


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[str]:
    """The address of a Redis over TLS that asks its clients for certificates; the embedded Valkey has no TLS."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no Redis with TLS: Debian's package redis-server is not installed")
    ports = Ports()
    port, ours = ports.take(27_500), folder / "ours"
    settings = {
        **{"port": "0", "tls-port": str(port), "bind": "127.0.0.1", "requirepass": "secret", "save": ""},
        **{"tls-cert-file": str(ours / "host.crt"), "tls-key-file": str(ours / "host.key")},
        **{"tls-ca-cert-file": str(ours / "ca.crt"), "tls-auth-clients": "yes", "dir": str(folder)},
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    url = f"rediss://:secret@127.0.0.1:{port}/0"
    try:
        wait_until(lambda: server.poll() is not None or asyncio.run(pings(url, settings_with(folder, url, "ours"))))
        assert server.poll() is None
        yield url
    finally:
        server.terminate()
        server.wait()
        ports.release()


def settings_with(folder: Path, url: str, authority: str, of: str = "ours") -> SharedSettings:
    return SharedSettings(
        redis_url=url,
        service_token=TOKEN,
        tls_cert=folder / of / "host.crt",
        tls_key=folder / of / "host.key",
        tls_ca=folder / authority / "ca.crt",
    )


async def pings(url: str, settings: SharedSettings) -> bool:
    client = connect(url, settings)
    try:
        return bool(await client.ping())
    except RedisError:
        return False
    finally:
        await client.aclose()


def test_streams_are_over_tls_and_both_sides_are_known(redis: str, folder: Path) -> None:
    assert asyncio.run(pings(redis, settings_with(folder, redis, "ours")))
    assert not asyncio.run(pings(redis, settings_with(folder, redis, "others")))
    assert not asyncio.run(pings(redis, settings_with(folder, redis, "ours", of="others")))
    assert not asyncio.run(pings(redis.replace("rediss:", "redis:"), settings_with(folder, redis, "ours")))


def test_tasks_are_queued_and_taken_over_tls(redis: str, folder: Path) -> None:
    tasks = create_celery("over-tls", settings_with(folder, redis, "ours"), TaskLimits(5, 10))
    tasks.send_task("a.task", args=["row-7"])
    with tasks.connection_for_read() as connection, connection.SimpleQueue("over-tls") as queue:
        message = queue.get(timeout=30)
        assert (message.headers["task"], message.payload[0]) == ("a.task", ["row-7"])
        message.ack()
    strange = create_celery("over-tls", settings_with(folder, redis, "others"), TaskLimits(5, 10))
    with pytest.raises(Exception, match="certificate verify failed"), strange.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0.01, interval_step=0)
