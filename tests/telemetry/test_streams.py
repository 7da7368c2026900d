"""A node's commands reach it at least once, from Valkey or relayed by telemetry, and nobody else gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from pydantic import BaseModel
from redis.exceptions import ConnectionError as RedisConnectionError

from services.contracts.problems import Problem
from services.contracts.streams import COMMAND_FIELD, LATENCY_FIELD, command_stream, latency_stream
from services.kit.app import AT_ONCE
from services.kit.command_stream import CommandStream, RelayedRedis
from services.kit.problems import ProblemError, unavailable
from services.kit.redis import connect
from tests.support.control_plane import FakeAgent, eventually
from tests.telemetry.test_enrolment import allowed, keys, revoked, sent

SOURCES = ("direct", "relayed")


class Plane:
    """What ``ControlPlane`` is to a node, over the client of a telemetry in this process."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.lost_answers = 0

    async def call(self, what: str, body: BaseModel, answer: Any, timeout_s: float) -> Any:
        path = f"/v1/nodes/{self.agent.node_id}/{what}"
        found = await self.agent.post(path, body.model_dump(mode="json"))
        if self.lost_answers:
            self.lost_answers -= 1
            raise unavailable("telemetry")
        if found.status_code != 200:
            problem = Problem.model_validate_json(found.content)
            raise ProblemError(found.status_code, problem.code, problem.detail)
        return answer.model_validate_json(found.content)


class Commands(CommandStream):
    """Writes down what it obeys."""

    def __init__(self, source: Any, node_id: str) -> None:
        super().__init__(source, node_id, retry_s=0.01)
        self.obeyed: list[str] = []
        self.full_disks = 0

    def obey(self, text: str) -> None:
        if self.full_disks:
            self.full_disks -= 1
            raise OSError(28, "No space left on device")
        self.obeyed.append(text)


async def enrolled(http: Any, name: str) -> FakeAgent:
    agent = FakeAgent(http, name)
    assert (await sent(http, name, "enroll", await allowed(http, name), keys(name)))[0] == 200
    agent.token = (await sent(http, name, "register", name, agent.registration))[1]["token"]
    return agent


@asynccontextmanager
async def running(commands: Commands) -> AsyncIterator[None]:
    task = asyncio.create_task(commands.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def redis(plane: Any, redis_url: str) -> AsyncIterator[Any]:
    async with connect(redis_url) as found:
        yield found
        for node in ("n1", "n2"):
            await found.delete(command_stream(node), latency_stream(node))


def a_source(which: str, plane: Plane, redis: Any) -> Any:
    return redis if which == "direct" else RelayedRedis(cast(Any, plane))


@pytest.mark.parametrize("which", SOURCES)
async def test_commands_come_in_order_and_are_removed_when_they_are_on_disk(plane, redis, which: str) -> None:
    agent = Plane(await enrolled(plane.http, "n1"))
    commands = Commands(a_source(which, agent, redis), "n1")
    wanted = [str(number) for number in range(30)]
    for text in wanted[:20]:
        await redis.xadd(command_stream("n1"), {COMMAND_FIELD: text})
    commands.full_disks = 3
    async with running(commands):
        await eventually(lambda: _is(len(commands.obeyed) >= 20))
        for text in wanted[20:]:
            await redis.xadd(command_stream("n1"), {COMMAND_FIELD: text})
        await eventually(lambda: _is(len(commands.obeyed) == 30))
        await eventually(lambda: _is_empty(redis))
        await eventually(lambda: _is(not commands.problem))
    assert commands.obeyed == wanted


@pytest.mark.parametrize("which", SOURCES)
async def test_what_a_killed_agent_was_given_is_given_to_the_next(plane, redis, which: str) -> None:
    """It dies behind the answer, with some commands on disk and one that was not removed yet."""
    agent = Plane(await enrolled(plane.http, "n1"))
    source = a_source(which, agent, redis)
    for text in ("a", "b", "c"):
        await redis.xadd(command_stream("n1"), {COMMAND_FIELD: text})

    class Killed(Commands):
        def obey(self, text: str) -> None:
            super().obey(text)
            if text == "b":
                raise asyncio.CancelledError

    first = Killed(source, "n1")
    with pytest.raises(asyncio.CancelledError):
        await first.run()
    assert first.obeyed == ["a", "b"]
    second = Commands(source, "n1")
    async with running(second):
        await eventually(lambda: _is(len(second.obeyed) == 2))
    assert second.obeyed == ["b", "c"], "b is delivered again: agents know it by its allocation"


async def test_answers_that_are_lost_lose_no_command(plane, redis) -> None:
    """As when telemetry, or the connection, dies after it has read, and after it has removed."""
    agent = Plane(await enrolled(plane.http, "n1"))
    commands = Commands(RelayedRedis(cast(Any, agent)), "n1")
    await redis.xadd(command_stream("n1"), {COMMAND_FIELD: "a"})
    agent.lost_answers = 2
    async with running(commands):
        await eventually(lambda: _is(commands.obeyed == ["a"]))
        agent.lost_answers = 1
        await redis.xadd(command_stream("n1"), {COMMAND_FIELD: "b"})
        await eventually(lambda: _is(commands.obeyed[-1] == "b"))
        await eventually(lambda: _is(not agent.lost_answers))
    assert commands.obeyed[:2] == ["a", "b"]


async def test_a_node_reads_and_removes_what_is_its_own_alone(plane, redis) -> None:
    one, two = await enrolled(plane.http, "n1"), await enrolled(plane.http, "n2")
    kept = await redis.xadd(command_stream("n2"), {COMMAND_FIELD: "x"})
    seen = await redis.xadd(latency_stream("n1"), {LATENCY_FIELD: "{}"})
    ask = {"stream": "commands", "after": "0-0"}
    for token in (one.token, "", "n2"):
        answer = await two.post("/v1/nodes/n2/stream", {**ask, "done": kept}, token=token)
        assert answer.status_code == 401
    assert (await one.post("/v1/nodes/n1/stream", {"stream": "commands", "done": kept})).status_code == 200
    assert (await two.post("/v1/nodes/n2/stream", ask)).json()["entries"] == [{"id": kept, "fields": {"command": "x"}}]
    assert (await one.post("/v1/nodes/n1/stream", {"stream": "latency", "done": seen})).status_code == 200
    read = await one.post("/v1/nodes/n1/stream", {"stream": "latency", "after": "0-0"})
    assert read.json()["entries"] == [{"id": seen, "fields": {"report": "{}"}}]
    for wrong in ({"stream": "hints", "after": "0-0"}, {**ask, "after": "0"}, {**ask, "after": "9" * 20 + "-0"}):
        assert (await one.post("/v1/nodes/n1/stream", wrong)).status_code == 422


async def test_a_node_that_is_revoked_while_it_waits_gets_nothing(plane, redis) -> None:
    agent = await enrolled(plane.http, "n1")
    waits = asyncio.create_task(agent.post("/v1/nodes/n1/stream", {"stream": "commands", "after": "0-0"}))

    async def is_waiting() -> bool:
        return any(each["cmd"] == "xread" for each in await redis.client_list())

    await eventually(is_waiting)
    assert await revoked(plane.http, "n1") == 204
    await redis.xadd(command_stream("n1"), {COMMAND_FIELD: "secret"})
    assert (await waits).status_code == 401
    refused = RelayedRedis(cast(Any, Plane(agent)))
    with pytest.raises(RedisConnectionError, match="token"):
        await refused.xread({command_stream("n1"): "0-0"})


async def _is(what: bool) -> bool:
    return what


async def _is_empty(redis: Any) -> bool:
    return await redis.xlen(command_stream("n1")) == 0


async def test_a_node_has_only_so_many_requests_waiting(plane, redis) -> None:
    """Each takes a place that the heartbeats of all nodes need, and reads of streams last: no lease must be lost."""
    agent, other = await enrolled(plane.http, "n1"), await enrolled(plane.http, "n2")
    body = {"stream": "commands", "after": "0-0"}
    asked = [asyncio.create_task(agent.post("/v1/nodes/n1/stream", body)) for _ in range(AT_ONCE + 20)]
    refused = [each for each in (await asyncio.wait(asked, timeout=1))[0] if each.result().status_code == 429]
    assert len(refused) == 20
    secrets = await agent.post("/v1/nodes/n1/secrets", {"allocation_id": "job_1.1"})
    assert secrets.status_code == 429, "whatever it asks for"
    stranger = await plane.http.post("/v1/nodes/n1/stream", json=body)
    assert stranger.status_code == 401, "who is not the node takes none of its places"
    await redis.xadd(command_stream("n2"), {COMMAND_FIELD: "x"})
    assert (await other.post("/v1/nodes/n2/stream", body)).status_code == 200
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200, 429}
    assert (await agent.post("/v1/nodes/n1/stream", {"stream": "commands", "done": "1-1"})).status_code == 200
