"""Commands to nodes, as rows of the outbox."""

import zlib
from collections.abc import Iterable, Mapping, Sequence

from services.contracts.commands import SetDevices, StartGang, StopGang, command_document
from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls
from services.contracts.streams import command_stream
from services.core.domain.mig import is_gpu
from services.scheduler.repository.documents import Json, StoredShare
from services.scheduler.repository.outbox import Outgoing

NOT_FOR_NODES = {"array", "after", "batch", "may_share_gpu"}
"""Fields of a spec that only the control plane reads; agents of an earlier release would refuse them."""


def start_commands(
    *,
    allocation_id: str,
    job_id: str,
    generation: int,
    tenant_id: str,
    spec: Json,
    shares: Sequence[StoredShare],
    master_addr: str,
    master_port: int,
    account: str | None = None,
    uuids: Mapping[tuple[str, int], str] | None = None,
    batch_size: int | None = None,
    packed: bool = False,
    traceparent: str | None = None,
) -> list[Outgoing]:
    """Return one start command per share of a gang; the order of the shares is the order of the node ranks.

    Only a share with a slice names UUIDs, taken from ``uuids`` by node and device: agents of the previous release do
    not know the field, and have no slices. The same goes for ``batch_size``, the total batch of a job whose user lets
    policies choose it, and for ``packed``, set for a gang that is put beside the holder of its device.
    """
    runs = JobSpec.as_stored({name: value for name, value in spec.items() if name not in NOT_FOR_NODES})
    world_size = sum(len(share["devices"]) for share in shares)
    offset = 0
    commands: list[Outgoing] = []
    for node_rank, share in enumerate(shares):
        command = StartGang(
            allocation_id=allocation_id,
            job_id=job_id,
            generation=generation,
            tenant_id=tenant_id,
            spec=runs,
            devices=share["devices"],
            uuids=[]
            if all(map(is_gpu, share["devices"]))
            else [(uuids or {}).get((share["node_id"], device), "") for device in share["devices"]],
            shares=packed,
            node_rank=node_rank,
            nnodes=len(shares),
            world_size=world_size,
            rank_offset=offset,
            gpus_per_node=[len(share["devices"]) for share in shares],
            master_addr=master_addr,
            master_port=master_port,
            account=account,
            batch_size=batch_size,
            base_batch=None if batch_size is None else base_batch(spec),
        )
        offset += len(share["devices"])
        commands.append(Outgoing(command_stream(share["node_id"]), command_document(command), traceparent))
    return commands


def base_batch(spec: Json) -> int | None:
    """Return the total batch that a job's learning rate is meant for; None where policies may not choose another.

    Like ``JobSpec.base_batch``, but of a stored spec.
    """
    batch = spec.get("batch")
    return None if batch is None else spec.get("global_batch") or batch["min"]


def stop_commands(
    allocation_id: str, shares: Iterable[StoredShare], grace_s: float, reason: str, wait_s: float = 0.0
) -> list[Outgoing]:
    """Return one stop command per share of a gang."""
    command = command_document(StopGang(allocation_id=allocation_id, grace_s=grace_s, reason=reason, wait_s=wait_s))
    return [Outgoing(command_stream(share["node_id"]), command) for share in shares]


def set_commands(
    allocation_id: str,
    shares: Iterable[StoredShare],
    revision: int,
    values: Mapping[str, float | None],
    interval_s: float | None = None,
) -> list[Outgoing]:
    """Return one command per share of a gang, which says what to set its devices to.

    Args:
        shares: The gang's shares, one per node.
        revision: Of two commands, the one with the higher revision is in force.
        values: By name of the control; None for the default.
        interval_s: If the gang is being measured, the time after which a report ends the interval.
    """
    measured = {} if interval_s is None else {"measure": True, "interval_s": interval_s}
    wanted = DeviceControls.model_validate({"revision": revision, **values, **measured})
    command = command_document(SetDevices(allocation_id=allocation_id, settings=wanted))
    return [Outgoing(command_stream(share["node_id"]), command) for share in shares]


def free_port(allocation_id: str, taken: set[int], ports: tuple[int, int]) -> int:
    """Return a port for rank 0 that no live gang at the same address has.

    Where the search begins depends on the gang, so that a restart does not run into the closing sockets of the last
    one.
    """
    first, last = ports
    count = last - first + 1
    start = zlib.crc32(allocation_id.encode()) % count
    for step in range(count):
        port = first + (start + step) % count
        if port not in taken:
            return port
    return first + start
