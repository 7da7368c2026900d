"""A service with background work as it is installed: its HTTP API as tenants see it, its processes to be killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import httpx

from services.contracts.identity import Identity, Role
from services.kit.tokens import Outgoing, outgoing
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import ON_PORTS, http_ready, scratch_folder

ENDED = {"succeeded", "failed", "cancelled"}


@dataclass
class Installation:
    """The running stack, and the API of one of its services.

    Attributes:
        tokens: Those that the gateway sends it.
        service: Its name in the installation.
        submit_path: Where work is submitted.
        path: Where it is listed and read.
        state: The field that says how it stands.
        table: Its table.
    """

    stack: Stack
    http: httpx.AsyncClient
    tokens: Outgoing
    service: str
    submit_path: str
    path: str
    state: str
    table: str

    async def call(
        self, method: str, path: str, *, tenant: str = "acme", role: Role = Role.USER, **options: Any
    ) -> httpx.Response:
        headers = self.tokens.headers(Identity(tenant_id=tenant, role=role, key_id="key_test"))
        return await self.http.request(method, path, headers={**headers, **options.pop("headers", {})}, **options)

    async def submit(self, body: dict[str, Any], path: str | None = None, **options: Any) -> httpx.Response:
        return await self.call("POST", path or self.submit_path, json=body, **options)

    async def accepted(self, body: dict[str, Any], **options: Any) -> str:
        answer = await self.submit(body, **options)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    async def read(self, work_id: str, **options: Any) -> dict[str, Any]:
        answer = await self.call("GET", f"{self.path}/{work_id}", **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def summary(self, work_id: str, **options: Any) -> dict[str, Any]:
        answer = await self.call("GET", f"{self.path}?limit=500", **options)
        if answer.status_code == 503:  # while the database is away
            return {self.state: "unknown"}
        return next(work for work in answer.json()["items"] if work["id"] == work_id)

    async def ended(self, work_id: str, **options: Any) -> dict[str, Any]:
        await self.until(work_id, lambda work: work[self.state] in ENDED, **options)
        return await self.read(work_id, **options)

    async def running(self, body: dict[str, Any], **options: Any) -> str:
        work_id = await self.accepted(body, **options)
        await self.until(work_id, lambda work: work[self.state] == "running", **options)
        return work_id

    async def until(
        self, work_id: str, holds: Callable[[dict[str, Any]], bool], within_s: float = 60, **options: Any
    ) -> dict[str, Any]:
        deadline_s = time.monotonic() + within_s
        while not holds(work := await self.summary(work_id, **options)):
            assert time.monotonic() < deadline_s, work
            await asyncio.sleep(0.03)
        return work

    def pid(self, process: str) -> int:
        return next(child.pid for child in self.stack.status().processes if child.name == process and child.pid)

    def is_back(self, former: int) -> bool:
        """Whether another process of the service has taken the place of ``former``."""
        service = next(child for child in self.stack.status().processes if child.name == self.service)
        return service.pid not in (None, former) and http_ready(("127.0.0.1", service.port))

    @asynccontextmanager
    async def database(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.stack.environment["DATABASE_URL"])
        try:
            yield connection
        finally:
            await connection.close()

    async def count_ends(self) -> None:
        """Have the database itself note every time a piece of work ends."""
        async with self.database() as connection:
            await connection.execute(f"""
                CREATE TABLE ends (id TEXT, state TEXT);
                CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN INSERT INTO ends VALUES (NEW.id, NEW.state); RETURN NEW; END $$;
                CREATE TRIGGER ended AFTER UPDATE ON {self.table} FOR EACH ROW
                WHEN (NEW.state IN ('succeeded', 'failed', 'cancelled')) EXECUTE FUNCTION note();
            """)

    async def ends(self, work_id: str) -> list[str]:
        async with self.database() as connection:
            return [row["state"] for row in await connection.fetch("SELECT state FROM ends WHERE id = $1", work_id)]


@asynccontextmanager
async def installed(
    *names: str, workers: tuple[str, ...], env: dict[str, str], nodes: str = "", **api: str
) -> AsyncIterator[Installation]:
    """Run an installation of the services ``names`` and some workers; ``api`` as the attributes of ``Installation``."""
    services = [service for service in SERVICES if service.name in names]
    with scratch_folder() as folder, forked_by_the_supervisor():
        made = Stack(folder, nodes=nodes, services=services, workers=workers, env=ON_PORTS | env, watches=False)
        async with made as stack:
            gateway = stack.identities.credential("gateway")
            async with httpx.AsyncClient(base_url=stack.urls[api["service"]], timeout=20) as http:
                try:
                    yield Installation(stack, http, outgoing(gateway, api["service"]), **api)
                finally:
                    for log in sorted((folder / "log").glob("*.log")):
                        print(f"--- {log.name}\n{log.read_text()}")
