"""The server of the Model Context Protocol: each tool asks the API, answers as it does, and passes on its refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from wattshift import AsyncClient

pytest.importorskip("mcp", reason="the package mcp is not installed")
from mcp import Client, StdioServerParameters

from wattshift.integrations.mcp import server


class Api:
    """Answers as the gateway would, and keeps what it was asked."""

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        self._answers = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        status, body = self._answers.pop(0)
        return httpx.Response(status, json=body)

    async def call(self, tool: str, **arguments: Any) -> Any:
        """Return the result of a tool that a client of the protocol calls."""
        http = AsyncClient("http://gateway", "ws_key", retries=0, transport=httpx.MockTransport(self))
        async with http, Client(server(http, poll_s=0)) as client:
            return await client.call_tool(tool, arguments)


JOB = {"name": "a", "command": ["true"]}
MADE = {"id": "job_1", "state": "queued", "name": "a", "count": None}


@pytest.mark.parametrize(
    ("tool", "arguments", "asked"),
    [
        ("submit", {"job": JOB, "idempotency_key": "k"}, "POST /v1/jobs"),
        ("explain", {"job_id": "job_1/../x"}, "GET /v1/jobs/job_1%2F..%2Fx/explain?one_change=true"),
        ("report", {"group_by": "job", "limit": 5}, "GET /v1/reports/footprint?group_by=job&limit=5"),
    ],
)
async def test_the_answer_of_a_tool_is_that_of_the_api(tool: str, arguments: dict[str, Any], asked: str) -> None:
    api = Api((200, MADE))
    result = await api.call(tool, **arguments)

    assert not result.is_error
    assert result.structured_content == MADE
    (request,) = api.asked
    assert f"{request.method} {request.url.raw_path.decode()}" == asked
    assert request.headers["authorization"] == "Bearer ws_key"
    if tool == "submit":
        assert (json.loads(request.content), request.headers["idempotency-key"]) == (JOB, "k")


async def test_a_simulation_is_waited_for_and_can_be_asked_for_again() -> None:
    done = {"id": "sim_1", "status": "succeeded", "result": [1]}
    api = Api((202, {"id": "sim_1"}), (200, {"id": "sim_1", "status": "queued"}), (200, done))
    assert (await api.call("what_if", simulation={"policy": ["fifo"]})).structured_content == done
    assert [request.method for request in api.asked] == ["POST", "GET", "GET"]

    still = {"id": "sim_1", "status": "running"}
    api = Api((200, still))
    assert (await api.call("what_if", simulation={"id": "sim_1"}, wait_s=0)).structured_content == still
    assert [request.url.path for request in api.asked] == ["/v1/simulations/sim_1"]


async def test_a_refusal_is_the_error_of_the_tool_with_its_code_and_fields() -> None:
    fields = [{"pointer": "/gpus/min", "detail": "must be at least 1, not 0"}]
    problem = {"type": "/problems/invalid_request", "title": "Unprocessable", "status": 422, "code": "invalid_request"}
    api = Api((422, {**problem, "detail": "/gpus/min: must be at least 1, not 0", "errors": fields}))
    result = await api.call("submit", job={"gpus": {"min": 0}})

    assert result.is_error
    assert "must be at least 1, not 0" in result.content[0].text
    assert "invalid_request" in result.content[0].text


async def test_it_speaks_over_standard_input_and_output() -> None:
    """As an assistant starts it: by the command line, which has address and key from the environment."""
    environment = {**os.environ, "WATTSHIFT_URL": "http://127.0.0.1:9", "WATTSHIFT_API_KEY": f"ws_{'k' * 43}"}
    command = StdioServerParameters(command=sys.executable, args=["-m", "services.cli.main", "mcp"], env=environment)
    async with Client(command) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool("explain", {"job_id": "job_1"})

    assert tools.keys() == {"submit", "explain", "what_if", "report"}
    assert all(tool.description and tool.input_schema["properties"] for tool in tools.values())
    assert result.is_error
    assert "does not answer" in result.content[0].text or "127.0.0.1" in result.content[0].text


def test_ctrl_c_ends_it() -> None:
    """While its standard input stays open, as a terminal's does."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # as it is in a foreground
        "from wattshift.integrations.mcp import main; main('http://127.0.0.1:9', 'ws_key')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == -signal.SIGINT
        finally:
            process.kill()
