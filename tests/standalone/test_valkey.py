"""Valkey from its wheel keeps what it has written down through kill -9 and a half-written last entry."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.standalone import valkey
from tests.support.servers import running, scratch_folder

PASSWORD = "a-password"


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture
def address(folder: Path) -> Path:
    return folder / "valkey.sock"


def test_kill_9_keeps_every_entry_written_down(folder: Path, address: Path) -> None:
    server = valkey.prepare(folder / "a folder", password=PASSWORD, address=address)
    with running(server) as process, redis.Redis.from_url(valkey.url(PASSWORD, address)) as client:
        client.xgroup_create("work", "group", mkstream=True)
        acknowledged = [client.xadd("work", {"number": number}) for number in range(200)]
        client.xreadgroup("group", "worker", {"work": ">"}, count=10)
        client.waitaof(1, 0, 10_000)
        process.kill()
        process.wait()
    again = valkey.prepare(folder / "a folder", password=PASSWORD, address=address)
    with running(again), redis.Redis.from_url(valkey.url(PASSWORD, address)) as client:
        assert [entry for entry, _ in client.xrange("work")] == acknowledged
        assert client.xpending("work", "group")["pending"] == 10


def test_a_half_written_last_entry_is_dropped(folder: Path, address: Path) -> None:
    server = valkey.prepare(folder / "valkey", password=PASSWORD, address=address)
    with running(server) as process, redis.Redis.from_url(valkey.url(PASSWORD, address)) as client:
        client.set("first", "kept")
        client.set("second", "lost")
        client.waitaof(1, 0, 10_000)
        process.kill()
        process.wait()
    (log,) = (folder / "valkey" / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(log.read_bytes()[:-3])
    with running(server), redis.Redis.from_url(valkey.url(PASSWORD, address)) as client:
        assert client.mget("first", "second") == [b"kept", None]


def test_nobody_gets_in_without_the_password(folder: Path, address: Path) -> None:
    server = valkey.prepare(folder / "valkey", password=PASSWORD, address=address)
    assert PASSWORD not in " ".join(server.command)
    assert (folder / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0
    never = Retry(NoBackoff(), 0)
    with (
        running(server),
        redis.Redis(unix_socket_path=str(address), retry=never) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
