"""A burst on each service that is asked from outside, while the database makes all of them wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from services.contracts.identity import Identity, Role
from tests.support.control_plane import JOIN_TOKEN, FakeAgent, eventually
from tests.support.services import services
from tests.support.tokens import TOKEN, headers_for

AT_ONCE, BURST = 8, 100
SETTINGS = {"WATTSHIFT_MAX_REQUESTS": str(AT_ONCE), "WATTSHIFT_NODE_JOIN_TOKEN": JOIN_TOKEN}


@pytest.fixture
async def asks(database_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[dict[str, tuple[str, Any]]]:
    """For each service, the table that its answers wait for, and a question to it."""
    with (
        services(tmp_path, database_url, redis_url) as found,
        found.started("services.admission.app", **SETTINGS),
        found.started("services.telemetry.app", **SETTINGS),
        found.started("gateway.app", ready_path="/healthz", **SETTINGS),
    ):
        urls, user = found.urls, Identity(tenant_id="default", role=Role.USER, key_id="key-u")
        limits = httpx.Limits(max_connections=2 * BURST)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            agent = FakeAgent(http, "n0", 2, base_url=urls["TELEMETRY"])
            await agent.register()
            of_user = headers_for("admission", user, issuer="gateway", root=TOKEN)
            of_admin = {"authorization": f"Bearer {found.admin_key()}"}
            beat = agent.heartbeat()
            of_node = {"authorization": f"Bearer {agent.token}"}
            yield {
                "gateway": ("jobs", lambda: http.get(f"{urls['GATEWAY']}/v1/jobs", headers=of_admin)),
                "admission": ("jobs", lambda: http.get(f"{urls['ADMISSION']}/v1/jobs", headers=of_user)),
                "telemetry": (
                    "nodes",
                    lambda: http.post(f"{urls['TELEMETRY']}/v1/nodes/n0/heartbeat", json=beat, headers=of_node),
                ),
            }


@asynccontextmanager
async def _locked(database_url: str, table: str) -> AsyncIterator[None]:
    connection = await asyncpg.connect(database_url)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


async def test_a_burst_is_refused_with_a_time_to_come_back_and_then_all_is_as_before(
    asks: dict[str, tuple[str, Any]], database_url: str
) -> None:
    for name, (table, ask) in asks.items():
        assert (await ask()).status_code == 200, name
        async with _locked(database_url, table):
            asked = [asyncio.create_task(ask()) for _ in range(BURST)]

            async def answered(asked: list[asyncio.Task[httpx.Response]] = asked) -> bool:
                return sum(task.done() for task in asked) >= BURST - AT_ONCE

            await eventually(answered)
            for answer in (task.result() for task in asked if task.done()):
                assert answer.status_code == 503, name
                assert int(answer.headers["retry-after"]) >= 1, name
        late = [await task for task in asked]
        assert {answer.status_code for answer in late} <= {200, 503}, name
        assert sum(answer.status_code == 200 for answer in late) <= AT_ONCE

        async def recovered(ask: Any = ask) -> bool:
            return (await ask()).status_code == 200

        await eventually(recovered)
        again = [await ask() for _ in range(AT_ONCE)]
        assert {answer.status_code for answer in again} == {200}, name
