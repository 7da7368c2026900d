"""Gateway and admission as processes, on real servers; a module's tests share them."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.support.services import Running, Services, services


@dataclass
class Front:
    """What the tests hold: the processes, the database behind them, and a client with the admin's key."""

    services: Services
    admission: Running
    gateway: Running
    client: httpx.AsyncClient
    database: asyncpg.Pool

    async def count(self, table: str, where: str = "true", *values: Any) -> int:
        """Count rows."""
        return int(await self.database.fetchval(f"SELECT count(*) FROM {table} WHERE {where}", *values) or 0)

    async def key_for(self, tenant: str, role: str = "user", **limits: Any) -> dict[str, str]:
        """Make a tenant, and return the headers of a caller with a key of it."""
        made = await self.client.post("/v1/tenants", json={"id": tenant, "limits": limits})
        assert made.status_code == 201, made.text
        key = await self.client.post("/v1/keys", json={"tenant_id": tenant, "role": role})
        assert key.status_code == 201, key.text
        return {"authorization": f"Bearer {key.json()['secret']}", "x-key-id": key.json()["id"]}


@pytest.fixture(scope="module")
def started(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Services, Running, Running]]:
    """The two processes."""
    folder: Path = tmp_path_factory.mktemp("front")
    with (
        services(folder, database_url, redis_url) as found,
        found.started("services.admission.app") as admission,
        found.started("gateway.app", ready_path="/healthz") as gateway,
    ):
        yield found, admission, gateway


@pytest.fixture(scope="module")
async def front(started: tuple[Services, Running, Running], database_url: str) -> AsyncIterator[Front]:
    """The public API as its users reach it."""
    found, admission, gateway = started
    async with (
        httpx.AsyncClient(
            base_url=found.urls["GATEWAY"],
            headers={"authorization": f"Bearer {found.admin_key()}"},
            timeout=30,
            limits=httpx.Limits(max_connections=300),
        ) as client,
        asyncpg.create_pool(database_url, min_size=1, max_size=4) as database,
    ):
        yield Front(found, admission, gateway, client, database)
