"""Telemetry in this process, an agent to be, and jobs as admission leaves them: what tests of both rooms build on."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
from fastapi import FastAPI

from services.contracts.identity import Identity, Role
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy, HeartbeatReply, RankState
from services.core.domain.mig import parent_of, placed, slice_index
from services.db.database import Database
from services.kit.ids import new_id
from services.telemetry.app import create_app
from services.telemetry.settings import TelemetrySettings
from tests.support.servers import as_service, pause_s
from tests.support.tokens import headers_for

SERVICE_TOKEN = "service-token-of-the-tests"
JOIN_TOKEN = "join-token-of-the-tests"
OPERATOR = Identity(tenant_id="ops", role=Role.OPERATOR, key_id="key-ops")
USER = Identity(tenant_id="t", role=Role.USER, key_id="key-t")

_boots = itertools.count(1)


async def eventually(condition: Callable[[], Awaitable[Any]], within_s: float = 60.0) -> Any:
    """Return the first true value of ``condition``; AssertionError if none comes in time."""
    began_s = time.monotonic()
    while not (found := await condition()):
        waited_s = time.monotonic() - began_s
        assert waited_s < within_s, f"not within {within_s} s: {condition}"
        await asyncio.sleep(pause_s(waited_s))
    return found


def telemetry_settings(database_url: str, redis_url: str, **values: Any) -> TelemetrySettings:
    """Return settings of a telemetry for tests."""
    return TelemetrySettings(
        database_url=database_url,
        redis_url=as_service(redis_url, "telemetry"),
        service_token=SERVICE_TOKEN,
        join_token=JOIN_TOKEN,
        **{"carbon_refresh_s": 0.001, "zone": "Z", **values},
    )


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Run an app in this process and yield a client of it."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        yield http


@asynccontextmanager
async def running_telemetry(settings: TelemetrySettings) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a telemetry that runs in this process."""
    async with client_of(create_app(settings)) as http:
        yield http


def service_headers(identity: Identity | None = None) -> dict[str, str]:
    """Return the headers of the gateway, on behalf of somebody."""
    return headers_for("telemetry", identity, issuer="gateway" if identity else "router", root=SERVICE_TOKEN)


async def accept_job(database: Database, *, state: str = "queued", tenant: str = "t", **spec: Any) -> str:
    """Put a job where admission puts it, and return its id."""
    wanted = JobSpec.model_validate({"name": "job", "command": ["true"], **spec})
    job_id = new_id("job")
    async with database.connection() as connection:
        await connection.execute(
            """INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at)
            VALUES ($1, $2, $3, $4, $5, $6, $7, CASE WHEN $7 = 'queued' THEN now() END)""",
            job_id,
            tenant,
            wanted.name,
            wanted.project,
            wanted.labels,
            wanted.model_dump(mode="json", exclude_none=True),
            state,
        )
    return job_id


class FakeAgent:
    """A node's agent as telemetry sees it; tests say what its ranks do."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        node_id: str = "n0",
        gpus: int = 4,
        model: str = "A100",
        base_url: str = "",
        **registration: Any,
    ) -> None:
        self.http = http
        self.node_id = node_id
        self.base_url = base_url
        self.token = ""
        self.boot_id = f"boot-{next(_boots)}"
        self.ranks: dict[str, dict[str, Any]] = {}
        self.reply = HeartbeatReply(lease_ttl_s=0, allocations=[])
        self.sequence = 0
        self.partitions: dict[int, dict[str, Any]] | None = None
        self.cuts = 0
        devices = [
            {
                "index": n,
                "uuid": f"{node_id}-{n}",
                "model": model,
                "memory_gib": 40,
                "power_limit_w": 400,
                "highest_limit_w": 1e12,  # tests report what no hardware can use
            }
            for n in range(gpus)
        ]
        self.registration: dict[str, Any] = {
            "node_id": node_id,
            "address": "127.0.0.1",
            "agent_url": "http://127.0.0.1:1",
            "devices": devices,
            "driver": "simulated",
            "host_power": "modelled",
            "most_host_w": 1e12,
            **registration,
        }

    async def register(self) -> None:
        """Join the cluster."""
        answer = await self.post("/v1/nodes/register", self.registration, token=JOIN_TOKEN)
        assert answer.status_code == 200, answer.text
        self.token = answer.json()["token"]

    async def post(self, path: str, body: Any, *, token: str | None = None) -> httpx.Response:
        """Send a request as this node."""
        headers = {"authorization": f"Bearer {self.token if token is None else token}"}
        return await self.http.post(self.base_url + path, json=body, headers=headers)

    def heartbeat(self, **more: Any) -> dict[str, Any]:
        """Return what this node has to say now, and more."""
        readings = [{"index": d["index"], "power_w": 50, "utilization": 0} for d in self.registration["devices"]]
        said = {} if self.partitions is None else {"partitions": list(self.partitions.values())}
        return {"boot_id": self.boot_id, "ranks": list(self.ranks.values()), "devices": readings, **said, **more}

    def can_partition(self) -> None:
        """Let its GPUs be ones that can be cut, by an agent that knows how."""
        self.partitions = {}
        for device in self.registration["devices"]:
            device["can_partition"] = True
            self.said_of(device["index"], 0, "applied", [])

    def said_of(self, gpu: int, revision: int, state: str, sizes: list[int], detail: str = "") -> None:
        """Say how far it is with a partition from the next heartbeat on."""
        assert self.partitions is not None
        said = {"gpu": gpu, "revision": revision, "state": state, "sizes": sizes, "detail": detail}
        self.partitions[gpu] = said

    def cut(self, gpu: int, sizes: Sequence[int]) -> None:
        """Have other slices on a GPU from the next registration on; none makes it whole."""
        self.cuts += 1
        devices = [each for each in self.registration["devices"] if each.get("parent") != gpu]
        whole = next(each for each in devices if each["index"] == gpu)
        whole["mig_enabled"] = bool(sizes)
        devices += [
            {
                "index": slice_index(gpu, place.start),
                "uuid": f"MIG-{self.node_id}-{gpu}-{place.start}-{self.cuts}",
                "model": whole["model"],
                "memory_gib": 5 * place.sevenths,
                "power_limit_w": 400,
                "parent": gpu,
                "profile": f"{place.sevenths}g.{5 * place.sevenths}gb",
                "sevenths": place.sevenths,
                "start": place.start,
            }
            for place in placed(sizes)
        ]
        self.registration["devices"] = devices

    async def beat(self, **more: Any) -> HeartbeatReply:
        """Send a heartbeat, with more in it, and take the reply in."""
        answer = await self.post(f"/v1/nodes/{self.node_id}/heartbeat", self.heartbeat(**more))
        assert answer.status_code == 200, answer.text
        self.reply = HeartbeatReply.model_validate_json(answer.text)
        return self.reply

    def say(self, allocation_id: str, state: RankState, *, code: int | None = None, **facts: Any) -> None:
        """Let a share be in a state from the next heartbeat on."""
        status: dict[str, Any] = {"allocation_id": allocation_id, "state": state, "exit_code": code, **facts}
        if state is RankState.EXITED:
            status.setdefault("ended_by", EndedBy.ITSELF)
        self.ranks[allocation_id] = status

    def interval(self, start_s: float, end_s: float, *usages: dict[str, Any], metered_j: float | None = None) -> dict:
        """Return an energy interval; usages are owner and amounts, see ``usage``."""
        self.sequence += 1
        return {
            "boot_id": self.boot_id,
            "sequence": self.sequence,
            "start_at": datetime.fromtimestamp(start_s, UTC).isoformat(),
            "end_at": datetime.fromtimestamp(end_s, UTC).isoformat(),
            "metered_gpu_energy_j": sum(u["gpu_energy_j"] for u in usages) if metered_j is None else metered_j,
            "usages": list(usages),
        }

    async def report(self, *intervals: dict[str, Any]) -> httpx.Response:
        """Send energy intervals."""
        return await self.post(f"/v1/nodes/{self.node_id}/energy", {"intervals": list(intervals)})


def usage(allocation_id: str | None, gpu_j: float, *, gpus: int = 1, done: float | None = None, **amounts: Any) -> dict:
    """Return one owner's energy; CPU and static energy are zero unless given."""
    return {
        "allocation_id": allocation_id,
        "devices": list(range(gpus)),
        "gpu_energy_j": gpu_j,
        "cpu_energy_j": 0,
        "static_energy_j": 0,
        "source": "counter",
        "progress_done": done,
        **amounts,
    }


async def allocate(database: Database, job_id: str, shares: dict[str, list[int]], *, generation: int = 1) -> str:
    """Give a job a running gang as the scheduler would have, and return the allocation's id."""
    allocation_id = f"{job_id}.{generation}"
    gpus = sum(map(len, shares.values()))
    async with database.transaction() as connection:
        await connection.execute(
            """INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port)
            VALUES ($1, $2, $3, 'running', $4, $5, 29500)""",
            *(allocation_id, job_id, generation, gpus),
            [{"node_id": node, "devices": devices} for node, devices in shares.items()],
        )
        await connection.executemany(
            "INSERT INTO device_claims (node_id, device, allocation_id, parent) VALUES ($1, $2, $3, $4)",
            [
                (node, device, allocation_id, parent_of(device))
                for node, devices in shares.items()
                for device in devices
            ],
        )
        await connection.execute("UPDATE jobs SET state = 'running', generation = $2 WHERE id = $1", job_id, generation)
    return allocation_id


async def end_allocation(database: Database, allocation_id: str) -> None:
    """End a gang as the scheduler would."""
    async with database.transaction() as connection:
        await connection.execute(
            "UPDATE allocations SET state = 'ended', ended_at = now() WHERE id = $1", allocation_id
        )
        await connection.execute("DELETE FROM device_claims WHERE allocation_id = $1", allocation_id)
        await connection.execute(
            "UPDATE jobs SET state = 'queued' WHERE id = (SELECT job_id FROM allocations WHERE id = $1)", allocation_id
        )
