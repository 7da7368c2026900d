"""What a bridge would report, said here, and what it would be told."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from services.contracts.engines import EngineJob, EngineMode, EngineNode, EngineReply, EngineReport
from services.telemetry.repository.credentials import sha256
from services.telemetry.repository.engines import mirror
from tests.scheduler.world import World

ENGINE = "slurm"
SUBMITTED = datetime(2026, 11, 1, tzinfo=UTC)


class Bridge:
    """An engine, by default named ``slurm``."""

    def __init__(
        self, world: World, mode: EngineMode = EngineMode.CONTROL, kind: str = "slurm", name: str = ENGINE
    ) -> None:
        self.world, self.mode, self.kind, self.name = world, mode, kind, name

    async def enrol(self, nodes: int = 2, gpus: int = 4) -> None:
        """Become known, with so many nodes, named g1 and so on."""
        await self.world.fetch(
            "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices) "
            "VALUES ($1, $2, '', '', 'Z', 'engine', false, 'modelled', '[]')",
            self.name,
            sha256("token"),
        )
        await self.say(nodes=[node(f"g{number}", gpus) for number in range(1, nodes + 1)])

    async def say(self, *jobs: EngineJob, **fields: Any) -> EngineReply:
        """Report, and let the scheduler turn."""
        report = EngineReport.model_validate(
            {"boot_id": "b", "kind": self.kind, "mode": self.mode, "jobs": list(jobs), **fields}
        )
        found = await mirror(self.world.database, self.name, "token", report, 60, "Z")
        assert found is not None
        await self.world.scheduler.turn()
        return found[0]

    async def decision(self, external_id: str) -> dict[str, Any]:
        """Return what was last decided of a job."""
        (row,) = await self.world.fetch("SELECT decision FROM engine_jobs WHERE external_id = $1", external_id)
        return row["decision"] or {}

    async def job(self, external_id: str) -> dict[str, Any]:
        """Return our job for one of the engine's."""
        (row,) = await self.world.fetch(
            "SELECT j.* FROM jobs j JOIN engine_jobs e ON e.job_id = j.id WHERE e.external_id = $1", external_id
        )
        return dict(row)

    async def sent(self) -> list[tuple[str, str]]:
        """Return the decisions in the outbox: which job, and what."""
        rows = await self.world.fetch("SELECT payload FROM outbox WHERE payload ->> 'type' = 'direct' ORDER BY id")
        return [(each["external_id"], each["action"]) for row in rows for each in row["payload"]["decisions"]]

    async def claims(self) -> dict[str, set[tuple[str, int]]]:
        """Return who holds what."""
        rows = await self.world.fetch(
            "SELECT j.external_id, c.node_id, c.device FROM device_claims c "
            "JOIN allocations a ON a.id = c.allocation_id JOIN jobs j ON j.id = a.job_id"
        )
        found: dict[str, set[tuple[str, int]]] = {}
        for row in rows:
            found.setdefault(row["external_id"], set()).add((row["node_id"], row["device"]))
        return found


def node(name: str, gpus: int = 4, **fields: Any) -> EngineNode:
    """Return a node of the engine."""
    return EngineNode(name=name, gpus=gpus, gpu_model="A100", memory_gib=80, queues=["batch"], **fields)


def a_job(external_id: str, state: str = "pending", **fields: Any) -> EngineJob:
    """Return a job of the engine."""
    document: dict[str, Any] = {
        **{"external_id": external_id, "number": external_id, "name": "train", "user": "ann", "queue": "batch"},
        **{"state": state, "steered": True, "stoppable": True, "gpus": 1, "submitted_at": SUBMITTED, **fields},
    }
    return EngineJob.model_validate(document)


def on(name: str, *devices: int) -> dict[str, Any]:
    """Return a share of a job."""
    return {"node": name, "devices": list(devices)}
