"""Commands from the scheduler to a node, sent through a Redis stream at least once; agents are idempotent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls
from services.contracts.schema import Message


class StartGang(Message):
    """Start this node's ranks of a gang, as soon as a heartbeat reply names the allocation."""

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
    gpus_per_node: list[int] = Field(
        default_factory=list[int], description="Devices of each node, by node rank. Empty: as many on each."
    )
    master_addr: str
    master_port: int


class StopGang(Message):
    """Stop this node's ranks of a gang: SIGTERM, a grace period, SIGKILL."""

    type: Literal["stop_gang"] = "stop_gang"
    allocation_id: str
    grace_s: float
    reason: str


class SetDevices(Message):
    """Set the controls of this node's devices of a gang, before it starts or while it runs.

    When the gang ends, the defaults are restored.
    """

    type: Literal["set_devices"] = "set_devices"
    allocation_id: str
    settings: DeviceControls


AnyCommand = StartGang | StopGang | SetDevices
Command = Annotated[AnyCommand, Field(discriminator="type")]
command_adapter: TypeAdapter[AnyCommand] = TypeAdapter(Command)
