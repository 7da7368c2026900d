"""Pools under control, on the real database and the real admission; nodes and model servers are stand-ins.

A test says what the scheduler would: which job runs, and at which server. Clocks are moved by dating rows back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.pools import PlannedInstances, PoolsResult
from services.contracts.serving import PoolSpec
from services.core.domain.solving import Backend, SolveStatus
from services.db.database import prepare
from services.db.engine import create_engine
from services.db.sealing import Sealer, open_instance_key
from services.kit.http import ServiceClient, new_session
from services.kit.ids import new_id
from services.serving.controller.controller import Controller
from services.serving.controller.probes import Prober, new_probe_session
from services.serving.controller.server_jobs import ServerJobs
from services.serving.repository import ServingRepository
from services.serving.settings import ServingSettings
from tests.gateway.peer import a_peer
from tests.support.pools import SECRETS_KEY, a_pool
from tests.support.services import TOKEN, services
from tests.support.tokens import tokens

MODEL = "A100-SXM4-40GB"
PROBES = {"ready_timeout_s": 600.0, "unhealthy_timeout_s": 60.0, "drain_min_s": 5.0, "drain_timeout_s": 300.0}
_numbers = itertools.count(1)


@dataclass
class ModelServer:
    """A server that does as the test says."""

    url: str = ""
    is_up: bool = True
    held: int = 0
    hangs: asyncio.Event | None = None
    checks: str | None = None
    sent: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])

    async def answer(self, request: web.Request) -> web.Response:
        self.sent.append((request.path, request.headers.get("authorization")))
        if self.checks is not None and request.path.startswith("/v1/"):
            return web.Response(status=200 if self.sent[-1][1] == f"Bearer {self.checks}" else 401)
        if self.hangs:
            await self.hangs.wait()
        if not self.is_up:
            return web.Response(status=503)
        return web.Response(text=f"vllm:num_requests_running {self.held}\n" if request.path == "/metrics" else "")


@dataclass
class Controlled:
    """A controller and its pools."""

    database: asyncpg.Pool
    engine: AsyncEngine
    controller: Controller
    admission: Any
    servers: contextlib.AsyncExitStack
    clients: dict[str, Any] = field(default_factory=dict[str, Any])

    def another(self, **settings: Any) -> Controller:
        """Return a controller that remembers nothing: that of another process, or after a kill."""
        changed = self.clients["settings"].model_copy(update=settings)
        return Controller(ServingRepository(self.engine), **self.clients | {"settings": changed})

    async def pool(self, counts: dict[tuple[str, str, str | None], int] | None = None, **spec: Any) -> str:
        """Make a pool with a plan in force, if one is given, and return its name."""
        name = f"pool{next(_numbers)}"
        document = PoolSpec.model_validate(a_pool(**{"probes": PROBES} | spec)).model_dump(mode="json")
        await self.database.execute(
            "INSERT INTO pools (name, tenant_id, key_id, spec, updated_at) VALUES ($1, 'acme', 'key', $2, now())",
            *(name, document),
        )
        if counts is not None:
            await self.plan(name, counts)
        return name

    async def plan(self, pool: str, counts: dict[tuple[str, str, str | None], int]) -> None:
        """Put a plan in force: how many instances by place, mode and class."""
        planned = [
            PlannedInstances(location=place, mode=mode, request_class=name, count=count, power_w=300)
            for (place, mode, name), count in counts.items()
        ]
        result = PoolsResult(
            status=SolveStatus.OPTIMAL, solver=Backend.HIGHS, partition="halves", instances=planned
        ).model_dump(mode="json")
        plan_id = new_id("plan")
        await self.database.execute(
            "INSERT INTO pool_plans (id, tenant_id, key_id, pool, revision, trigger, slot_at, from_at, deadline_at, "
            "outcome, state, problem, problem_sha256, result) SELECT $1, 'acme', 'key', name, revision, 'clock', "
            "now(), now(), now(), 'applied', 'succeeded', '{}', $3, $4 FROM pools WHERE name = $2",
            *(plan_id, pool, plan_id.encode(), {"plan": result}),
        )
        await self.database.execute("UPDATE pools SET plan_id = $2, planned_at = now() WHERE name = $1", pool, plan_id)

    async def change(self, pool: str, **spec: Any) -> None:
        """Give a pool another spec."""
        document = PoolSpec.model_validate(a_pool(**{"probes": PROBES} | spec)).model_dump(mode="json")
        await self.database.execute(
            "UPDATE pools SET spec = $2, revision = revision + 1, updated_at = now() WHERE name = $1", pool, document
        )

    async def rows(self, pool: str, *states: str) -> list[asyncpg.Record]:
        """Return a pool's instances, the oldest first; without states, all that have not ended."""
        query = "SELECT * FROM pool_instances WHERE pool = $1 AND (state = ANY($2) OR $3 AND state <> 'ended')"
        return await self.database.fetch(f"{query} ORDER BY id", pool, states, not states)

    async def states(self, pool: str) -> list[str]:
        return [row["state"] for row in await self.rows(pool)]

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.controller.look()

    async def server(self) -> ModelServer:
        """Return a model server that listens until the test module ends."""
        server = ModelServer()
        server.url = await self.servers.enter_async_context(a_peer(server.answer))
        return server

    async def runs(self, job_id: str, server: ModelServer) -> None:
        """Have a job run at a server."""
        port = int(server.url.rpartition(":")[2])
        await self.database.execute(
            "UPDATE jobs SET state = 'running', generation = generation + 1 WHERE id = $1", job_id
        )
        await self.database.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, running_at) "
            "SELECT $1, id, generation, 'running', 1, $2, $3, now() FROM jobs WHERE id = $4",
            *(new_id("allocation"), [{"node_id": "node", "devices": [0]}], port, job_id),
        )

    async def heard(self, job_id: str, listener: str) -> None:
        """Have its node say who listens on a job's port."""
        await self.database.execute(
            "INSERT INTO rank_statuses (allocation_id, node_id, state, listener) SELECT id, 'node', 'running', $2 "
            "FROM allocations WHERE job_id = $1 AND state = 'running' "
            "ON CONFLICT (allocation_id, node_id) DO UPDATE SET listener = excluded.listener",
            *(job_id, listener),
        )

    async def key_of(self, row: asyncpg.Record) -> str:
        """Return the key of an instance."""
        return open_instance_key(self.clients["sealer"], row["sealed_key"], row["tenant_id"], row["id"])

    async def waits(self, job_id: str, reason: str, for_s: float = 60) -> None:
        """Have a job that runs no more, or not yet, wait in the queue."""
        await self._release(job_id)
        await self.database.execute(
            "UPDATE jobs SET state = 'queued', reason = $2, detail = 'It waits.', "
            "queued_at = now() - make_interval(secs => $3) WHERE id = $1",
            *(job_id, reason, for_s),
        )

    async def ends(self, job_id: str, state: str = "failed", reason: str = "failed") -> None:
        """Have a job end."""
        await self._release(job_id)
        await self.database.execute(
            "UPDATE jobs SET state = $2, reason = $3, detail = 'It ended.', ended_at = now() WHERE id = $1",
            *(job_id, state, reason),
        )

    async def _release(self, job_id: str) -> None:
        await self.database.execute("UPDATE allocations SET state = 'ended' WHERE job_id = $1", job_id)

    async def serving(self, pool: str) -> dict[str, ModelServer]:
        """Have every instance that starts run, become ready, and return their servers by id."""
        await self.look(2)
        servers: dict[str, ModelServer] = {}
        for row in await self.rows(pool, "starting"):
            servers[row["id"]] = await self.server()
            await self.runs(row["job_id"], servers[row["id"]])
        await self.look()
        assert {row["state"] for row in await self.rows(pool) if row["id"] in servers} == {"ready"}
        return servers

    async def date_back(self, instance_id: str, column: str, seconds: float) -> None:
        """Let so much time have passed since something happened to an instance."""
        await self.database.execute(
            f"UPDATE pool_instances SET {column} = {column} - make_interval(secs => $2) WHERE id = $1",
            *(instance_id, seconds),
        )

    async def jobs_of(self, pool: str) -> list[asyncpg.Record]:
        return await self.database.fetch("SELECT * FROM jobs WHERE project = $1 ORDER BY id", pool)


@asynccontextmanager
async def controlled_pools(database_url: str, redis_url: str, folder: Path) -> AsyncIterator[Controlled]:
    """Run an admission on these servers and yield a controller beside it."""
    engine = create_engine(database_url)
    # A look hears all answers, however slow the machine.
    values: dict[str, Any] = {"service_token": TOKEN, "instance_look_s": 60, "instance_probe_s": 1e-9}
    settings = ServingSettings(**values)
    with (
        services(folder, database_url, redis_url, ADMISSION_CAPACITY_MAX_AGE_S="0.001") as found,
        found.started("services.admission.app") as admission,
    ):
        async with (
            contextlib.AsyncExitStack() as servers,
            new_session() as session,
            new_probe_session() as probe_session,
            asyncpg.create_pool(database_url, min_size=1, max_size=2, init=prepare) as database,
        ):
            await database.execute("INSERT INTO tenants (id, limits) VALUES ('acme', '{}')")
            await database.execute(
                "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, "
                "devices) VALUES ('node', '', '127.0.0.1', '', 'DE', 'simulated', false, 'modelled', $1)",
                [{"index": index, "model": MODEL, "memory_gib": 40.0} for index in range(8)],
            )
            client = ServiceClient(
                session, found.urls["ADMISSION"], "Admission", tokens=tokens("admission", issuer="serving"), timeout_s=5
            )
            parts = {
                "jobs": ServerJobs(client),
                "prober": Prober(probe_session, timeout_s=10, at_once=50),
                "settings": settings,
                "sealer": Sealer(SECRETS_KEY),
            }
            yield Controlled(
                database, engine, Controller(ServingRepository(engine), **parts), admission, servers, parts
            )
    await engine.dispose()
