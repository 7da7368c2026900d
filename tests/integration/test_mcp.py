"""The server for assistants beside a live gateway: each tool's answer is the API's."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.integration.conftest import Installation

pytest.importorskip("mcp", reason="the package mcp is not installed")
from mcp import Client, StdioServerParameters


async def test_each_answer_of_a_tool_equals_that_of_the_api(installation: Installation) -> None:
    get = installation.gateway.get
    environment = {
        "WATTSHIFT_URL": installation.gateway.url,
        "WATTSHIFT_API_KEY": (installation.folder / "admin.key").read_text().strip(),
    }
    command = StdioServerParameters(command=sys.executable, args=["-m", "services.cli.main", "mcp"], env=environment)
    async with Client(command) as client:

        async def called(tool: str, **arguments: Any) -> Any:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result.content
            return result.structured_content

        spec = {"name": "by-assistant", "command": ["sh", "-c", "echo done"], "project": "assistants"}
        made = await called("submit", job=spec, idempotency_key="once")
        assert (await called("submit", job=spec, idempotency_key="once"))["id"] == made["id"]
        (listed,) = get("/v1/jobs", project="assistants")["items"]
        fixed = ("id", "number", "name", "submitted_at")
        assert {name: made[name] for name in fixed} == {name: listed[name] for name in fixed}
        (ended,) = installation.wait_for_ends([made["id"]], 60)
        assert ended["state"] == "succeeded"

        explained = await called("explain", job_id=made["id"])
        assert explained | {"as_of": ""} == get(f"/v1/jobs/{made['id']}/explain") | {"as_of": ""}

        asked = {"policy": ["fifo"], "jobs": "green-day", "carbon": "GB", "days": 1}
        simulated = await called("what_if", simulation=asked, wait_s=300)
        assert simulated["status"] == "succeeded", simulated
        assert simulated == get(f"/v1/simulations/{simulated['id']}")
        assert await called("what_if", simulation={"id": simulated["id"]}) == simulated

        end = datetime.now(UTC) - timedelta(seconds=30)
        period = {"start": (end - timedelta(hours=1)).isoformat(), "end": end.isoformat()}
        for group_by in ("project", "job"):
            report = await called("report", group_by=group_by, **period)
            assert report == get("/v1/reports/footprint", group_by=group_by, limit=100, **period)

        refused = await client.call_tool("explain", {"job_id": "job_none"})
        assert refused.is_error
        assert "not_found" in str(refused.content[0])
