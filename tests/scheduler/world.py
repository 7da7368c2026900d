"""A cluster as the scheduler's database shows it: what admission and telemetry would have written, written here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from redis.asyncio import Redis

from lab.recording import recording_to
from services.contracts.commands import AnyCommand, command_adapter
from services.contracts.streams import command_stream
from services.db.database import Database
from services.kit.carbon import Carbon
from services.kit.http import ServiceClient, new_session
from services.kit.ids import new_block_id, new_id
from services.kit.redis import connect
from services.scheduler.loop import Scheduler
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.power.hooks import build_hook
from services.scheduler.settings import SchedulerSettings
from tests.support.servers import as_service

TOKEN = "a-token-of-sixteen-and-more"


class World:
    """The database, a scheduler that turns when asked to, and the words of users and nodes."""

    def __init__(self, database: Database, redis: Redis, scheduler: Scheduler, settings: SchedulerSettings) -> None:
        self.database = database
        self.redis = redis
        self.scheduler = scheduler
        self.settings = settings

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        async with self.database.connection() as connection:
            return await connection.fetch(query, *arguments)

    async def node(self, name: str, gpus: int = 4, *, lease_s: float = 60, model: str = "A100", zone: str = "Z") -> str:
        devices = [{"index": index, "model": model, "memory_gib": 40.0} for index in range(gpus)]
        await self.fetch(
            "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, "
            "heartbeat_at, lease_until) VALUES ($1, '', '10.0.0.' || $2::int, '', $5, 'simulated', false, 'modelled', "
            "$3, now(), now() + make_interval(secs => $4))",
            name,
            gpus,
            devices,
            lease_s,
            zone,
        )
        return name

    async def lease(self, name: str, lease_s: float) -> None:
        await self.fetch(
            "UPDATE nodes SET lease_until = now() + make_interval(secs => $2) WHERE id = $1 RETURNING 1", name, lease_s
        )

    async def job(self, minimum: int = 1, maximum: int | None = None, **spec: Any) -> str:
        job_id = new_id("job")
        document = {"name": "a", "command": ["true"], "gpus": {"min": minimum, "max": maximum or minimum}, **spec}
        await self.fetch(
            "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at) "
            "VALUES ($1, 'default', 'a', 'default', '{}', $2, 'queued', now())",
            job_id,
            document,
        )
        return job_id

    async def array(self, tasks: int, limit: int | None = None, **spec: Any) -> tuple[str, list[str]]:
        """Store an array as admission does; return its id and its tasks' ids."""
        array_id = new_block_id("array")
        ids = [await self.job(**spec) for _ in range(tasks)]
        await self.fetch(
            "INSERT INTO job_arrays (id, tenant_id, name, project, labels, spec, tasks, first_index, last_index, "
            "max_running) VALUES ($1, 'default', 'sweep', 'default', '{}', '{}', $2, 0, $2 - 1, $3)",
            array_id,
            tasks,
            limit,
        )
        for index, job_id in enumerate(ids):
            await self.fetch(
                "UPDATE jobs SET array_id = $2, array_index = $3, gated = $4 WHERE id = $1",
                job_id,
                array_id,
                index,
                limit is not None,
            )
        return array_id, ids

    async def after(self, dependent: str, needed: str, condition: str) -> None:
        """Let a job, or all tasks of an array, depend on another."""
        await self.fetch("INSERT INTO job_dependencies VALUES ($1, $2, $3)", dependent, needed, condition)
        await self.fetch("UPDATE jobs SET gated = true WHERE id = $1 OR array_id = $1", dependent)

    async def report(self, allocation_id: str, state: str, node: str | None = None, **words: Any) -> None:
        """Say on behalf of one node, or of all nodes of the gang, how it stands with its share."""
        (row,) = await self.fetch("SELECT shares FROM allocations WHERE id = $1", allocation_id)
        for share in row["shares"]:
            if node in (None, share["node_id"]):
                await self.fetch(
                    "INSERT INTO rank_statuses (allocation_id, node_id, state, exit_code, ended_by, detail) "
                    "VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (allocation_id, node_id) "
                    "DO UPDATE SET state = $3, exit_code = $4, ended_by = $5, detail = $6",
                    allocation_id,
                    share["node_id"],
                    state,
                    words.get("exit_code"),
                    words.get("ended_by"),
                    words.get("detail"),
                )

    async def running(self, minimum: int = 1, **spec: Any) -> str:
        """Return a job that runs on all its nodes."""
        job_id = await self.job(minimum, **spec)
        await self.scheduler.turn()
        await self.report(await self.allocation(job_id), "running")
        await self.scheduler.turn()
        assert await self.state(job_id) == "running"
        return job_id

    async def exits(self, job_id: str, exit_code: int = 0, ended_by: str = "itself") -> None:
        await self.report(await self.allocation(job_id), "exited", exit_code=exit_code, ended_by=ended_by)
        await self.scheduler.turn()

    async def ask(self, job_id: str, wish: str) -> None:
        await self.fetch(f"UPDATE jobs SET {wish}_requested = true WHERE id = $1", job_id)
        await self.scheduler.turn()

    async def allocation(self, job_id: str) -> str:
        rows = await self.fetch("SELECT id FROM allocations WHERE job_id = $1 ORDER BY generation DESC", job_id)
        return rows[0]["id"]

    async def state(self, job_id: str) -> str:
        (row,) = await self.fetch("SELECT state FROM jobs WHERE id = $1", job_id)
        return row["state"]

    async def claims(self) -> int:
        (row,) = await self.fetch("SELECT count(*) AS n FROM device_claims")
        return row["n"]

    async def events(self, job_id: str) -> list[str]:
        rows = await self.fetch("SELECT type FROM job_events WHERE job_id = $1 ORDER BY sequence", job_id)
        return [row["type"].removeprefix("job.") for row in rows]

    async def outbox(self) -> list[tuple[str, AnyCommand]]:
        """Return what waits to be published: (stream, command)."""
        rows = await self.fetch("SELECT stream, payload FROM outbox ORDER BY id")
        return [(row["stream"], command_adapter.validate_json(orjson.dumps(row["payload"]))) for row in rows]

    async def published(self, node: str) -> list[AnyCommand]:
        """Return what Redis has for a node."""
        entries: Any = await self.redis.xrange(command_stream(node))
        return [command_adapter.validate_json(fields["command"]) for _, fields in entries]


class FixedGrid(CarbonWatch):
    """A grid that nobody needs to be asked about."""

    async def _refresh(self, zone: str) -> None:
        """Ask nobody."""


@asynccontextmanager
async def a_world(
    database_url: str, redis_url: str, record_dir: Path | None = None, **options: Any
) -> AsyncIterator[World]:
    """Yield a world on an empty database; ``options`` are settings of the scheduler, its hook for nodes among them."""
    settings = SchedulerSettings(
        WATTSHIFT_SERVICE_TOKEN=TOKEN,
        DATABASE_URL=database_url,
        REDIS_URL=redis_url,
        **{
            "policy": "fifo",
            "round_interval_s": 3_600,
            "carbon_refresh_s": 1e9,
            "node_return_s": 0,
            "restart_pause_s": 0,
            "engine_new_jobs_s": 0,
            **options,
        },
    )
    database, redis = await Database.open(database_url), connect(redis_url)
    own = connect(as_service(redis_url, "scheduler"))
    async with new_session() as session:
        client = ServiceClient(session, "http://127.0.0.1:1", "carbon")
        grid = FixedGrid(Carbon(client), "Z", refresh_s=1e9, window_s=86_400, default_gco2_per_kwh=400)
        note = None if record_dir is None else recording_to(record_dir)
        scheduler = Scheduler(settings, database, own, grid, build_hook(settings), note=note)
        yield World(database, redis, scheduler, settings)
    await redis.flushdb()
    await redis.aclose()
    await own.aclose()
    await database.close()
