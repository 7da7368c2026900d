"""An installation with a second gateway and a second admission, each pair with an address of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import httpx
import pytest

from services.contracts.streams import GATEWAY_LIMITS_HASH
from services.kit.redis import connect
from services.standalone import processes
from services.standalone.doors import Door
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.control_plane import eventually
from tests.support.ports import Ports
from tests.support.servers import fresh_database, scratch_folder
from tests.support.services import Running

SPEC: dict[str, Any] = {"name": "train", "command": ["true"]}
JOBS = "/v1/jobs"


class Second:
    """A second process of a service, in the environment of the first but for its port."""

    def __init__(self, stack: Stack, name: str, ports: Ports, environment: Mapping[str, str]) -> None:
        (service,) = [each for each in SERVICES if each.name == name]
        port = ports.take(service.port + 20_000)
        self.url = f"http://127.0.0.1:{port}"
        process = processes.http_process(
            name, service, Door(("127.0.0.1", port)), stack.identities.of_process(name, environment), stack.folder.path
        )
        self.running = Running(process, stack.folder.path / f"second-{name}.log")


@dataclass
class Two:
    """Both gateways, each before an admission of its own, and the database that they share."""

    stack: Stack
    gateways: list[httpx.AsyncClient]
    second_gateway: Running
    database: asyncpg.Connection
    accepted: dict[str, str] = field(default_factory=dict[str, str])

    def headers(self, **more: str) -> dict[str, str]:
        key = (self.stack.folder.path / "admin.key").read_text().strip()
        return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in more.items()}

    async def submit(self, name: str, first: int) -> None:
        """Submit a job at one gateway and the other in turn, with its idempotency key, until it is accepted."""
        turn = first
        while True:
            turn += 1
            try:
                answer = await self.gateways[turn % 2].post(
                    JOBS, json=SPEC | {"name": name}, headers=self.headers(idempotency_key=name)
                )
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            if answer.is_success:
                self.accepted[name] = answer.json()["id"]
                return
            assert answer.status_code == 503, answer.text

    async def ids(self, prefix: str) -> list[tuple[str, str]]:
        rows = await self.database.fetch("SELECT name, id FROM jobs WHERE name LIKE $1 ORDER BY name", f"{prefix}%")
        return [(row["name"], row["id"]) for row in rows]


@pytest.fixture(scope="module")
async def two(postgres_url: str) -> AsyncIterator[Two]:
    env = {"DATABASE_URL": fresh_database(postgres_url), "GATEWAY_KEY_MAX_AGE_S": "0.5"}
    ports = Ports()
    with scratch_folder() as data, ExitStack() as second:
        async with Stack(data, nodes="", env=env, services=SERVICES, workers=()) as stack:
            admission = Second(stack, "admission", ports, stack.environment)
            gateway = Second(stack, "gateway", ports, stack.environment | {"WATTSHIFT_ADMISSION_URL": admission.url})
            for each in (admission, gateway):
                second.callback(each.running.stop)
                await asyncio.to_thread(each.running.start)
            database = await asyncpg.connect(env["DATABASE_URL"])
            async with (
                httpx.AsyncClient(base_url=stack.gateway_url, timeout=30) as one,
                httpx.AsyncClient(base_url=gateway.url, timeout=30) as other,
            ):
                yield Two(stack, [one, other], gateway.running, database)
            await database.close()
            second.close()
    ports.release()


async def test_a_submission_sent_to_both_at_once_is_one_job(two: Two) -> None:
    names = [f"both-{number}" for number in range(20)]
    answers = await asyncio.gather(
        *(
            gateway.post(JOBS, json=SPEC | {"name": name}, headers=two.headers(idempotency_key=name))
            for name in names
            for gateway in two.gateways
        )
    )
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert {(answer.json()["name"], answer.json()["id"]) for answer in answers} == set(await two.ids("both-"))
    assert len(await two.ids("both-")) == len(names)


async def test_a_key_revoked_at_one_is_refused_by_the_other_too(two: Two) -> None:
    one, other = two.gateways
    made = await one.post("/v1/keys", json={"tenant_id": "default", "role": "user"}, headers=two.headers())
    assert made.is_success, made.text
    caller = {"authorization": f"Bearer {made.json()['secret']}"}
    for gateway in two.gateways:
        assert (await gateway.get(JOBS, headers=caller)).status_code == 200
    revoked = await one.delete(f"/v1/keys/{made.json()['id']}", headers=two.headers())
    assert revoked.is_success

    async def is_refused() -> bool:
        return (await other.get(JOBS, headers=caller)).status_code == 401

    await eventually(is_refused, 20)


async def test_gateways_of_an_installation_share_their_limits(two: Two) -> None:
    redis = connect(two.stack.environment["REDIS_URL"])

    async def both_have_told() -> bool:
        return await redis.hlen(GATEWAY_LIMITS_HASH) == 2  # pyright: ignore[reportGeneralTypeIssues]

    await eventually(both_have_told)
    await redis.aclose()


async def test_what_was_accepted_exists_once_though_a_gateway_and_an_admission_are_killed(two: Two) -> None:
    async def submit_many(submitter: int) -> None:
        for number in range(40):
            await two.submit(f"kill-{submitter}-{number}", submitter)

    async def has_accepted(count: int) -> None:
        async def there_are() -> bool:
            return len(two.accepted) >= count

        await eventually(there_are)

    submitters = [asyncio.create_task(submit_many(submitter)) for submitter in range(8)]
    await has_accepted(60)
    two.second_gateway.kill()
    await has_accepted(120)
    await asyncio.to_thread(two.second_gateway.start)
    (pid,) = [each.pid for each in two.stack.status().processes if each.name == "admission"]
    assert pid
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*submitters)

    assert len(two.accepted) == 320
    assert sorted(two.accepted.items()) == await two.ids("kill-")
