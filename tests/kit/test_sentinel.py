"""Valkey found through real Sentinels, which promote a replica when the master dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from lab.experiments.remote import connect_blocking
from services.kit import sentinel
from services.kit.celery import TaskLimits, create_celery
from services.kit.queue_keys import queue_key
from services.kit.redis import connect
from services.kit.redis_users import with_user
from services.kit.settings import SharedSettings
from services.standalone.process import Process
from tests.support.ports import Ports
from tests.support.servers import running, scratch_folder, tcp_valkey, wait_until

PASSWORD, SERVICE_PASSWORD = "secret", "of@a/service"


@dataclass
class Watched:
    """A master, the replica that is promoted when it dies, and the address of both."""

    url: str
    master: Popen[bytes]
    master_port: int
    replica_port: int

    def settings(self) -> SharedSettings:
        return SharedSettings(redis_url=self.url, service_token="x" * 40)  # type: ignore[call-arg]


@pytest.fixture
def servers() -> Iterator[Watched]:
    ports = Ports()
    with ExitStack() as opened:
        folder = opened.enter_context(scratch_folder())
        at = [ports.take(24_000) for _ in range(4)]
        processes = [tcp_valkey(folder / name, port, PASSWORD) for name, port in zip("ab", at[:2], strict=True)]
        started = [opened.enter_context(running(process)) for process in processes]
        for port in at[:2]:
            with Redis(port=port, password=PASSWORD) as server:
                server.execute_command("ACL", "SETUSER", "service", "on", f">{SERVICE_PASSWORD}", "~*", "&*", "+@all")
                server.config_set("masterauth", PASSWORD)
                if port == at[1]:
                    server.execute_command("REPLICAOF", "127.0.0.1", at[0])
        for port in at[2:]:
            configuration = folder / f"{port}.conf"
            configuration.write_text(
                f"bind 127.0.0.1\nport {port}\ndir {folder}\nsentinel monitor wattshift 127.0.0.1 {at[0]} 1\n"
                f"sentinel auth-pass wattshift {PASSWORD}\nsentinel down-after-milliseconds wattshift 500\n"
                "sentinel failover-timeout wattshift 3000\n"
            )
            command = (processes[0].command[0], str(configuration), "--sentinel")
            opened.enter_context(
                running(Process(name=f"sentinel-{port}", command=command, environment={}, folder=folder))
            )
        with Redis(port=at[2]) as asked:
            wait_until(lambda: knows_a_replica(asked))
        hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *at[2:]))  # the first does not answer
        url = with_user(f"redis+sentinel://{hosts}/0?master=wattshift", "service", SERVICE_PASSWORD)
        yield Watched(url, started[0], at[0], at[1])
    ports.release()


def knows_a_replica(asked: Any) -> bool:
    try:
        return (
            bool(asked.sentinel_slaves("wattshift")) and asked.sentinel_master("wattshift")["num-other-sentinels"] == 1
        )
    except RedisError:
        return False


@pytest.mark.slow
async def test_clients_and_queues_follow_to_the_replica_that_sentinels_promote(servers: Watched) -> None:
    client, blocking = connect(servers.url), connect_blocking(servers.settings())
    celery = create_celery("work", servers.settings(), TaskLimits(1, 2))
    await client.set("before", "1")
    assert blocking.get("before") == b"1"
    celery.send_task("any", ["before"])
    with Redis(port=servers.replica_port, password=PASSWORD) as replica:
        wait_until(lambda: replica.get("before") == b"1" and replica.llen(queue_key("work")) == 1)
        servers.master.kill()
        servers.master.wait()
        deadline_s = time.monotonic() + 60
        while True:
            try:
                await client.set("after", "1")
                break
            except RedisError:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.1)
        assert replica.get("after") == b"1"
        assert blocking.set("blocking", "1")
        await asyncio.to_thread(celery.send_task, "any", ["after"])
        assert replica.llen(queue_key("work")) == 2
    await client.aclose()
    blocking.close()
    celery.close()


def test_an_address_without_sentinels_is_that_of_a_server() -> None:
    assert sentinel.watched("redis://:p@127.0.0.1:6379/0") is None
    found = sentinel.watched("rediss+sentinel://u:p%40@one,[::1]:5/2?master=m&sentinel_password=s")
    assert found is not None
    assert (found.sentinels, found.over_tls) == ((("one", 26_379), ("::1", 5)), True)
    assert found.user == {"db": 2, "username": "u", "password": "p@"}
    assert found.sentinel_options({"ssl_ca_certs": "/ca"}).items() >= {"password": "s", "ssl_ca_certs": "/ca"}.items()


@pytest.mark.parametrize(
    ("rest", "wrong"),
    [
        ("one:1/0", "add [?]master=NAME"),
        ("one:1/x?master=m", "'x', which is no number"),
        ("one:x/0?master=m", "'one:x', which is no HOST:PORT"),
        ("one:1,/0?master=m", "'', which is no HOST:PORT"),
        ("one:1/0?master=m&timeout=3", "timeout"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(rest: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        SharedSettings(redis_url=f"redis+sentinel://{rest}", service_token="x" * 40)  # type: ignore[call-arg]
