"""Admission as the gateway speaks to it, and a hand in its database."""

import json
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import asyncpg
import httpx
from fastapi import FastAPI

from services.admission.keys import new_secret
from services.contracts.identity import Identity
from services.contracts.jobs import SubmissionAnswer, SubmissionAnswers, SubmissionEntry, SubmissionRequest
from tests.support.tokens import headers_for

SPEC: dict[str, Any] = {"name": "train", "command": ["python", "train.py"]}


def an_entry(
    spec: dict[str, Any] | list[dict[str, Any]] | str | None = None,
    *,
    key: str | None = None,
    tenant: str = "default",
    service: bool = False,
) -> SubmissionEntry:
    """Return a submission: a spec, several for a batch, or a body as it is."""
    is_batch = isinstance(spec, list)
    body = spec if isinstance(spec, str) else json.dumps({"jobs": spec} if is_batch else SPEC | (spec or {}))
    return SubmissionEntry(
        tenant_id=tenant, key_id="key", idempotency_key=key, batch=is_batch, body=body, service=service
    )


class Admission:
    """Admission in this process."""

    def __init__(self, app: FastAPI, database_url: str) -> None:
        self.app = app
        self.database_url = database_url
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://admission")
        )
        self.database = await asyncpg.connect(self.database_url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.database.close()
        await self._stack.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        tenant: str = "default",
        role: str = "user",
        headers: dict[str, Any] | None = None,
        caller: dict[str, Any] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Ask as a caller the gateway let in."""
        who = {"tenant_id": tenant, "role": role, "key_id": "key_of_test", **(caller or {})}
        identity = None if path.startswith("/internal/") else Identity.model_validate(who)
        sent = {**headers_for("admission", identity), **(headers or {})}
        return await self.http.request(method, path, headers=sent, **options)

    async def submit_all(self, *entries: SubmissionEntry) -> list[SubmissionAnswer]:
        """Submit in one request, as the gateway gathers them."""
        answer = await self.ask(
            "POST", "/internal/submissions", content=SubmissionRequest(entries=list(entries)).model_dump_json()
        )
        assert answer.status_code == 200, answer.text
        return SubmissionAnswers.model_validate_json(answer.content).answers

    async def submit(self, spec: dict[str, Any] | None = None, *, tenant: str = "default") -> str:
        """Submit a job and return its id."""
        (answer,) = await self.submit_all(an_entry(spec, tenant=tenant))
        assert answer.status == 201, answer.body
        return str(json.loads(answer.body)["id"])

    async def make_tenant(self, name: str, **limits: Any) -> str:
        """Make a tenant and return its name."""
        made = await self.ask("POST", "/v1/tenants", role="admin", json={"id": name, "limits": limits})
        assert made.status_code == 201, made.text
        return name

    async def add_node(self, name: str, *models: str, memory_gib: float = 40, agent_url: str = "http://x") -> None:
        """Register a node as telemetry would."""
        devices = [{"index": i, "model": model, "memory_gib": memory_gib} for i, model in enumerate(models)]
        await self.database.execute(
            "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices) "
            "VALUES ($1, $2, 'here', $3, 'DE', 'simulated', false, 'modelled', $4)",
            name,
            new_secret().encode(),
            agent_url,
            json.dumps(devices),
        )

    async def start(self, job_id: str, *, node: str = "node-1", state: str = "running") -> str:
        """Give a job a gang as the scheduler would; return the allocation's id."""
        generation = await self.database.fetchval(
            "UPDATE jobs SET state = $2, generation = generation + 1, started_at = now() WHERE id = $1 "
            "RETURNING generation",
            job_id,
            state,
        )
        allocation_id = f"{job_id}.{generation}"
        await self.database.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
            "VALUES ($1, $2, $3, 'running', 2, $4, 29500)",
            allocation_id,
            job_id,
            generation,
            json.dumps([{"node_id": node, "devices": [0, 1]}]),
        )
        return allocation_id

    async def stop(self, job_id: str, state: str = "queued") -> None:
        """Stop a job and its gang as the scheduler would."""
        async with self.database.transaction():
            await self.database.execute("UPDATE allocations SET state = 'ended' WHERE job_id = $1", job_id)
            await self.database.execute(
                "UPDATE jobs SET state = $2, hold_requested = false WHERE id = $1", job_id, state
            )

    async def end(self, job_id: str, state: str = "succeeded") -> None:
        """End a job and its gang as the scheduler would."""
        async with self.database.transaction():
            await self.database.execute("UPDATE allocations SET state = 'ended' WHERE job_id = $1", job_id)
            await self.database.execute("UPDATE jobs SET state = $2, ended_at = now() WHERE id = $1", job_id, state)
            await self.database.execute(
                "INSERT INTO job_events (job_id, tenant_id, type) SELECT id, tenant_id, $2 FROM jobs WHERE id = $1",
                job_id,
                f"job.{state}",
            )

    async def count(self, table: str, where: str = "true") -> int:
        """Count rows."""
        return int(await self.database.fetchval(f"SELECT count(*) FROM {table} WHERE {where}") or 0)
