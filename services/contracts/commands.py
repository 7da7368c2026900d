"""Commands from the scheduler to a node, sent through a Redis stream at least once; agents are idempotent.

Scheduler and agents may be of different releases. A command therefore has only the fields that are set, so that an
older agent can read every command that does not use what it does not know; and an agent ignores an unknown
field where that is harmless. A gang to start is different: without the field it might run in another way than was
asked, so the agent refuses it and names the field.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls
from services.contracts.schema import Account, Message, many, maybe, said

MASTER_PORTS = (29_501, 32_000)
"""Of which each gang gets one; without 29500, which programs take that do not look at ``MASTER_PORT``."""


class StartGang(Message):
    """Start this node's ranks of a gang, as soon as a heartbeat reply names the allocation."""

    type: Literal["start_gang"] = "start_gang"
    allocation_id: str
    job_id: str
    generation: int
    tenant_id: str
    spec: JobSpec
    devices: list[int]
    uuids: list[str] = many(
        "The devices' UUIDs, in their order; only where one is a MIG slice. The agent starts nothing if a "
        "device is another one by now."
    )
    shares: bool = said(
        "Start beside the one gang that may run on the device by then, and not after it.", default=False
    )
    node_rank: int
    nnodes: int
    world_size: int
    rank_offset: int = said("Global rank of this node's first device.")
    gpus_per_node: list[int] = many("Devices of each node, by node rank. Empty: as many on each.")
    master_addr: str
    master_port: int
    batch_size: int | None = maybe("Total batch that was chosen for the gang, where the job's user permits that.")
    base_batch: int | None = maybe("Total batch that the job's learning rate is for.")
    account: Account | None = maybe("Account of the operating system to run as; null: the agent's choice.")


class StopGang(Message):
    """Stop this node's ranks of a gang: SIGTERM, a grace period, SIGKILL.

    With ``wait_s``, ranks that do not save their work when they are asked to stop go on until they next say that they
    have, for so long at most.
    """

    type: Literal["stop_gang"] = "stop_gang"
    allocation_id: str
    grace_s: float
    reason: str
    wait_s: float = 0.0


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


class UnknownFieldsError(Exception):
    """A gang is to be started with fields that this release does not know."""

    def __init__(self, allocation_id: str, fields: list[str]) -> None:
        super().__init__(", ".join(fields))
        self.allocation_id = allocation_id  #: The gang's
        self.fields = fields  #: Their names, such as ``spec.image``, in order


def command_document(command: AnyCommand) -> dict[str, Any]:
    """Return a command as it is sent: without fields that have their default value."""
    return {"type": command.type, **command.model_dump(mode="json", exclude_defaults=True)}


def read_command(document: Any) -> AnyCommand:
    """Read a command that a scheduler of this release or another one sent.

    Raises:
        UnknownFieldsError: A gang is to be started with fields that this release does not know.
        ValidationError: It is not a command that this release knows.
    """
    try:
        return command_adapter.validate_python(document)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if any(each["type"] != "extra_forbidden" for each in found):
            raise
        if document["type"] == "start_gang":
            fields = sorted(".".join(map(str, each["loc"][1:])) for each in found)  # behind the type of the command
            raise UnknownFieldsError(str(document.get("allocation_id", "")), fields) from None
        return command_adapter.validate_python(document, extra="ignore")
