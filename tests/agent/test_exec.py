"""Commands beside a rank: its environment, their streams, and that nothing of them outlives client, agent or rank."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest

from services.contracts.commands import StopGang
from services.contracts.identity import Identity, Role
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import headers_to

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def headers(node: Node, key: str = "key_1") -> dict[str, str]:
    """Return the headers with which admission asks for somebody with a key."""
    return headers_to(node.id, Identity(tenant_id="t", role=Role.USER, key_id=key))


DUMP = "import os, json, sys; json.dump([dict(os.environ), os.getcwd()], sys.stdout)"


@dataclass
class Session:
    """A session as its client sees it."""

    node: Node
    http: aiohttp.ClientSession
    answer: aiohttp.ClientResponse
    id: str
    stdout: bytes = b""
    stderr: bytes = b""
    notices: list[str] = field(default_factory=list[str])
    code: int | None = None
    detail: str | None = None

    async def read(self, until: bytes = b"\0never") -> None:
        """Read events until `until` is printed, or to the end."""
        kind = ""
        while until not in self.stdout + self.stderr and (line := await self.answer.content.readline()):
            if line.startswith(b"event: "):
                kind = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                self._take(kind, json.loads(line[6:]))

    def _take(self, kind: str, event: dict[str, Any]) -> None:
        assert event["type"] == kind
        if kind == "output":
            data = base64.b64decode(event["data"])
            self.stdout += data if event["stream"] == "stdout" else b""
            self.stderr += data if event["stream"] == "stderr" else b""
        elif kind == "notice":
            self.notices.append(event["detail"])
        elif kind == "exit":
            self.code, self.detail = event["code"], event.get("detail")

    async def send(self, data: bytes = b"", offset: int = 0, key: str = "key_1", **more: Any) -> tuple[int, Any]:
        """Send input; return status and answer."""
        body = {"offset": offset, "data": base64.b64encode(data).decode(), **more}
        url = f"http://127.0.0.1:{self.node.port}/v1/exec/{self.id}"
        async with self.http.put(url, json=body, headers=headers(self.node, key)) as answer:
            return answer.status, await answer.json()

    async def send_all(self, data: bytes, piece: int = 200_000) -> None:
        """Send all of standard input, and its end."""
        offset = 0
        while offset < len(data):
            status, answer = await self.send(data[offset : offset + piece], offset)
            assert status == 200
            offset = answer["offset"]
        await self.send(offset=offset, end=True)


@asynccontextmanager
async def entered(node: Node, gang: str, *command: str, **request: Any) -> AsyncIterator[Session]:
    """Run a command beside a gang; the client leaves at the end."""
    number = os.urandom(8).hex()
    url = f"http://127.0.0.1:{node.port}/v1/allocations/{gang}/exec/{number}"
    async with (
        aiohttp.ClientSession(read_bufsize=2**20) as http,
        http.post(url, json={"command": list(command), **request}, headers=headers(node)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        yield Session(node, http, answer, number)


async def run(node: Node, gang: str, *command: str, **request: Any) -> Session:
    """Run a command to its end."""
    async with entered(node, gang, *command, **request) as session:
        await session.read()
        return session


async def running(node: Node, *argv: str, **options: Any) -> str:
    """Return a gang that runs."""
    gang = await node.run(*(argv or SLEEP), **options)
    await eventually(lambda: node.plane.state(gang) == "running")
    return gang


async def test_a_command_has_the_environment_and_folder_of_its_rank(node: Node) -> None:
    await node.start()
    gang = await running(
        node,
        *(sys.executable, "-c", f"{DUMP}; sys.stdout.flush(); import time; time.sleep(600)"),
        environment={"A": "b c\n"},
        devices=[2, 3],
        processes="per_gpu",
    )
    printed = node.rank_dir(gang) / "stdout"
    await eventually(lambda: printed.read_text().count("]") == 2)
    own = {each[0]["RANK"]: each for each in _json_values(printed.read_text())}
    for rank in (0, 1):
        session = await run(node, gang, sys.executable, "-c", DUMP, rank=rank)
        assert json.loads(session.stdout) == own[str(rank)]
        assert session.code == 0
    assert own["1"][0]["CUDA_VISIBLE_DEVICES"] == "2,3"


def _json_values(text: str) -> list[Any]:
    decoder, found = json.JSONDecoder(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_streams_are_apart_and_the_exit_code_is_the_commands(node: Node) -> None:
    await node.start()
    gang = await running(node)
    session = await run(node, gang, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (session.stdout, session.stderr, session.code) == (b"out\n", b"err\n", 7)
    assert (await run(node, gang, "sh", "-c", "kill -KILL $$")).code == 137
    missing = await run(node, gang, "no-such-program")
    assert (missing.code, missing.detail) == (127, "cannot run no-such-program: No such file or directory")
    assert (await run(node, gang, "/etc/passwd")).code == 126
    assert (await run(node, gang, "cat")).stdout == b"", "standard input is empty unless it is sent"
    assert node.plane.state(gang) == "running"


async def test_five_megabytes_go_in_and_come_back(node: Node) -> None:
    await node.start()
    gang = await running(node)
    data = os.urandom(5_000_000)
    async with entered(node, gang, "cat", stdin=True) as session:
        await asyncio.gather(session.read(), session.send_all(data))
    assert session.stdout == data
    assert session.code == 0


async def test_input_that_is_sent_again_counts_once(node: Node) -> None:
    await node.start()
    gang = await running(node)
    async with entered(node, gang, "cat", stdin=True) as session:
        assert await session.send(b"abc") == (200, {"offset": 3})
        assert await session.send(b"abcd") == (200, {"offset": 4})
        assert (await session.send(b"zz", offset=9))[0] == 409
        assert (await session.send(b"zz", offset=4, key="key_2"))[0] == 404, "another key's session"
        await session.send(offset=4, end=True)
        await session.read()
    assert session.stdout == b"abcd"


async def test_a_terminal_has_a_size_that_changes_and_ctrl_c(node: Node) -> None:
    await node.start()
    gang = await running(node)
    program = "stty size; echo $TERM; trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    size = {"rows": 33, "columns": 111}
    async with entered(node, gang, "sh", "-c", program, stdin=True, terminal=size, terminal_type="vt100") as session:
        await session.read(until=b"ready")
        assert session.stdout.split() == [b"33", b"111", b"vt100", b"ready"]
        await session.send(size={"rows": 40, "columns": 80})
        await session.read(until=b"40 80")
        await session.send(b"\x03")
        await session.read()
    assert session.code == 130


async def test_a_signal_reaches_a_command_without_a_terminal(node: Node) -> None:
    await node.start()
    gang = await running(node)
    async with entered(
        node, gang, "sh", "-c", "trap 'exit 9' INT; echo ready; while :; do sleep 0.05; done"
    ) as session:
        await session.read(until=b"ready")
        await session.send(signal="INT")
        await session.read()
    assert session.code == 9


async def test_a_client_that_leaves_takes_its_command_along(node: Node) -> None:
    await node.start()
    gang = await running(node)
    async with entered(node, gang, "sh", "-c", "sh -mc 'sleep 4321 & sleep 4322'; :") as session:
        await eventually(lambda: len(node.processes("sleep 432")) >= 2)
        assert session.code is None
    await eventually(lambda: not node.processes("sleep 432"))
    assert node.plane.state(gang) == "running"


async def test_a_command_that_floods_its_output_waits_for_its_reader(node: Node) -> None:
    await node.start()
    gang = await running(node)
    agent = psutil.Process(_pid(node))
    async with entered(node, gang, "cat", "/dev/zero") as session:
        await session.read(until=b"\0")
        writer = node.processes("/dev/zero")[0]
        before, beats = agent.memory_info().rss, len(node.plane.heartbeats)
        await eventually(lambda: _is_blocked(writer))
        await eventually(lambda: len(node.plane.heartbeats) > beats + 5)
        assert _is_blocked(writer)
        assert agent.memory_info().rss - before < 32 * 2**20
    await eventually(lambda: not node.processes("/dev/zero"))


def _is_blocked(process: psutil.Process) -> bool:
    written = process.io_counters().write_chars
    return process.status() == psutil.STATUS_SLEEPING and written == process.io_counters().write_chars


def _pid(node: Node) -> int:
    assert node.process is not None
    return node.process.pid


async def test_an_agent_that_is_killed_leaves_no_command_behind(node: Node) -> None:
    await node.start()
    gang = await running(node)
    async with entered(node, gang, "sh", "-c", "sleep 4321; :") as session:
        await eventually(lambda: node.processes("sleep 4321"))
        node.kill()
        await eventually(lambda: not node.processes("sleep 4321"))
        with pytest.raises(aiohttp.ClientError):
            await session.read()
    await node.start()
    assert (await run(node, gang, "echo", "again")).stdout == b"again\n", "the next agent enters the same rank"


async def test_a_command_ends_with_its_rank_and_before_its_devices_are_free(node: Node) -> None:
    await node.start()
    go = node.folder / "go"
    gang = await running(node, "sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done; exit 5")
    async with entered(node, gang, "sh", "-c", "trap '' TERM; setsid sleep 4321 & sleep 4322; :") as session:
        await eventually(lambda: len(node.processes("sleep 432")) >= 2)
        go.touch()
        await eventually(lambda: node.plane.state(gang) == "exited")
        assert not node.processes("sleep 432")
        await session.read()
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (5, EndedBy.ITSELF)
    assert session.code in (128 + signal.SIGHUP, 128 + signal.SIGKILL)


async def test_a_command_ends_when_the_gang_is_stopped_and_its_user_is_told(node: Node) -> None:
    await node.start()
    # Many short sleeps: the signal may reach the first of them as well, since it is sent to all processes of the rank.
    lingers = "i=0; while [ $i -lt 60 ]; do i=$((i + 1)); sleep 0.1; done; exit 0"
    gang = await running(node, "sh", "-c", f"trap '{lingers}' TERM; echo up; while :; do sleep 0.05; done")
    await eventually(lambda: (node.rank_dir(gang) / "stdout").read_text() == "up\n")
    trapped = node.rank_dir(gang) / "scratch" / "trapped"
    stays = f"trap '' TERM; touch {trapped}; while :; do sleep 0.05; done"
    async with entered(node, gang, "sh", "-c", stays) as session:
        await eventually(trapped.exists)
        await node.send(StopGang(allocation_id=gang, grace_s=20, reason="test"))
        await session.read()
    assert session.notices == ["the job is being stopped: it is ended in 1 s at the latest"]
    assert session.code == 128 + signal.SIGHUP


async def test_a_rank_that_does_not_run_cannot_be_entered(node: Node) -> None:
    await node.start(GPU_AGENT_EXEC_SESSIONS="1")
    gang = await running(node)
    url = f"http://127.0.0.1:{node.port}/v1/allocations"
    async with aiohttp.ClientSession() as http:

        async def status(path: str, token: str = "", **body: Any) -> int:
            sent = {"authorization": f"Bearer {token}"} if token else headers(node)
            async with http.post(url + path, json={"command": ["true"], **body}, headers=sent) as answer:
                return answer.status

        assert await status("/none.1/exec/s1") == 409
        assert await status(f"/{gang}/exec/s1", rank=1) == 404
        assert await status(f"/{gang}/exec/s1", command=[]) == 422
        assert await status(f"/{gang}/exec/s1", token="x" * 32) == 401
        async with entered(node, gang, *SLEEP):
            assert await status(f"/{gang}/exec/s2") == 429
