"""An optimizer as it is installed: its service, a worker, the carbon service, on a real PostgreSQL and Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from services.contracts.identity import Identity, Role
from services.kit.identity import identity_headers
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.servers import scratch_folder

ENDED = {"succeeded", "failed", "cancelled"}
QUICK = {
    "OPTIMIZER_LEASE_S": "2",
    "OPTIMIZER_SWEEP_S": "0.3",
    "OPTIMIZER_RESEND_S": "0.5",
    "OPTIMIZER_MAX_PENDING_PER_TENANT": "5",
}


@dataclass
class Installation:
    """The running stack, and its HTTP API as tenants see it."""

    stack: Stack
    http: httpx.AsyncClient

    async def call(
        self, method: str, path: str, *, tenant: str = "acme", role: Role = Role.USER, **options: Any
    ) -> httpx.Response:
        headers = identity_headers(Identity(tenant_id=tenant, role=role, key_id="key_test"))
        return await self.http.request(method, path, headers={**headers, **options.pop("headers", {})}, **options)

    async def submit(self, body: dict[str, Any], **options: Any) -> httpx.Response:
        return await self.call("POST", "/v1/optimize/carbon-bound", json=body, **options)

    async def accepted(self, body: dict[str, Any], **options: Any) -> str:
        answer = await self.submit(body, **options)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    async def read(self, solve_id: str, **options: Any) -> dict[str, Any]:
        answer = await self.call("GET", f"/v1/optimize/{solve_id}", **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def summary(self, solve_id: str, **options: Any) -> dict[str, Any]:
        answer = await self.call("GET", "/v1/optimize?limit=500", **options)
        if answer.status_code == 503:  # while the database is away
            return {"state": "unknown"}
        return next(solve for solve in answer.json()["items"] if solve["id"] == solve_id)

    async def ended(self, solve_id: str, **options: Any) -> dict[str, Any]:
        await self.until(solve_id, lambda solve: solve["state"] in ENDED, **options)
        return await self.read(solve_id, **options)

    async def until(
        self, solve_id: str, holds: Callable[[dict[str, Any]], bool], within_s: float = 30, **options: Any
    ) -> dict[str, Any]:
        deadline_s = time.monotonic() + within_s
        while not holds(solve := await self.summary(solve_id, **options)):
            assert time.monotonic() < deadline_s, solve
            await asyncio.sleep(0.03)
        return solve

    def pid(self, process: str) -> int:
        return next(child.pid for child in self.stack.status().processes if child.name == process and child.pid)


@asynccontextmanager
async def installed(**env: str) -> AsyncIterator[Installation]:
    """Run an installation with these settings."""
    services = [service for service in SERVICES if service.name in ("carbon", "optimizer")]
    with scratch_folder() as folder:
        async with Stack(folder, nodes="", services=services, env={**QUICK, **env}) as stack:
            token = stack.environment["WATTSHIFT_SERVICE_TOKEN"]
            headers = {"authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(base_url=stack.urls["optimizer"], headers=headers, timeout=20) as http:
                try:
                    yield Installation(stack, http)
                finally:
                    for log in sorted((folder / "log").glob("*.log")):
                        print(f"--- {log.name}\n{log.read_text()}")
