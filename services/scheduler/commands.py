"""Commands to nodes, as rows of the outbox; only ever written in the transaction they belong to."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from services.contracts.commands import SetDevices, StartGang, StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls
from services.contracts.streams import command_stream

Outgoing = tuple[str, dict[str, Any]]
"""A stream and the command to put on it."""


def start_commands(
    *,
    allocation_id: str,
    job_id: str,
    generation: int,
    tenant_id: str,
    spec: dict[str, Any],
    shares: list[dict[str, Any]],
    master_addr: str,
    master_port: int,
) -> list[Outgoing]:
    """Return one start command per share of a gang; the order of the shares is the order of the node ranks."""
    world_size = sum(len(share["devices"]) for share in shares)
    offset = 0
    commands: list[Outgoing] = []
    for node_rank, share in enumerate(shares):
        command = StartGang(
            allocation_id=allocation_id,
            job_id=job_id,
            generation=generation,
            tenant_id=tenant_id,
            spec=JobSpec.model_validate(spec),
            devices=share["devices"],
            node_rank=node_rank,
            nnodes=len(shares),
            world_size=world_size,
            rank_offset=offset,
            master_addr=master_addr,
            master_port=master_port,
        )
        offset += len(share["devices"])
        commands.append((command_stream(share["node_id"]), command.model_dump(mode="json")))
    return commands


def stop_commands(allocation_id: str, shares: Iterable[dict[str, Any]], grace_s: float, reason: str) -> list[Outgoing]:
    """Return one stop command per share of a gang."""
    command = StopGang(allocation_id=allocation_id, grace_s=grace_s, reason=reason).model_dump(mode="json")
    return [(command_stream(share["node_id"]), command) for share in shares]


def set_commands(
    allocation_id: str,
    shares: Iterable[dict[str, Any]],
    revision: int,
    settings: dict[str, Any],
    slice_s: float | None = None,
) -> list[Outgoing]:
    """Return one command per share of a gang that says what its devices are set to.

    ``slice_s``, where the gang is to be measured, is after how long its slice ends with a report.
    """
    measured = {} if slice_s is None else {"measure": True, "slice_s": slice_s}
    wanted = DeviceControls.model_validate({"revision": revision, **settings, **measured})
    command = SetDevices(allocation_id=allocation_id, settings=wanted).model_dump(mode="json")
    return [(command_stream(share["node_id"]), command) for share in shares]


async def send(connection: Any, commands: list[Outgoing]) -> None:
    """Put commands into the outbox; they go out if this transaction commits."""
    if commands:
        await connection.execute(
            "INSERT INTO outbox (stream, payload) SELECT * FROM unnest($1::text[], $2::jsonb[])",
            [stream for stream, _ in commands],
            [command for _, command in commands],
        )


def free_port(allocation_id: str, taken: set[int], ports: tuple[int, int]) -> int:
    """Return a port for rank 0 that no live gang at the same address has.

    Where to begin to look depends on the gang, so that a restart does not meet the closing sockets of the one before.
    """
    first, last = ports
    count = last - first + 1
    start = zlib.crc32(allocation_id.encode()) % count
    for step in range(count):
        port = first + (start + step) % count
        if port not in taken:
            return port
    return first + start
