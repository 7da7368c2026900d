"""What the scheduler tells a node, over its Redis stream. Delivered at least once; agents are idempotent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls
from services.contracts.schema import Message


class StartGang(Message):
    """Start this node's ranks of a gang, once the lease names the allocation."""

    type: Literal["start_gang"] = "start_gang"
    allocation_id: str
    job_id: str
    generation: int
    tenant_id: str
    spec: JobSpec
    devices: list[int]
    node_rank: int
    nnodes: int
    world_size: int
    rank_offset: int = Field(description="Global rank of this node's first device.")
    master_addr: str
    master_port: int


class StopGang(Message):
    """SIGTERM, the grace, SIGKILL."""

    type: Literal["stop_gang"] = "stop_gang"
    allocation_id: str
    grace_s: float
    reason: str


class SetDevices(Message):
    """Set this node's devices of a gang, from its start on or while it runs; its end restores the defaults."""

    type: Literal["set_devices"] = "set_devices"
    allocation_id: str
    settings: DeviceControls


AnyCommand = StartGang | StopGang | SetDevices
Command = Annotated[AnyCommand, Field(discriminator="type")]
command_adapter: TypeAdapter[AnyCommand] = TypeAdapter(Command)
