"""What agents and the control plane tell each other about nodes, ranks and energy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from services.contracts.jobs import LabelKey, LabelValue
from services.contracts.schema import Instant, Message, Name, Text
from services.core.domain.controls import ControlKind

LOG_OFFSET_HEADER = "x-wattshift-log-offset"
"""Where the returned bytes begin; later than asked for when older output was given up."""
LOG_NEXT_OFFSET_HEADER = "x-wattshift-log-next-offset"
LOG_SIZE_HEADER = "x-wattshift-log-size"
LOG_EOF_HEADER = "x-wattshift-log-eof"
"""`true` once the rank has exited and the answer reaches the end."""
LOG_GENERATION_HEADER = "x-wattshift-log-generation"
LOG_NODE_HEADER = "x-wattshift-log-node"
"""Which of a job's gangs, and which of its nodes, the output comes from; in the public API only."""


Joules = Annotated[float, Field(ge=0, le=1e12)]
Amount = Annotated[float, Field(ge=-1e15, le=1e15)]
"""An amount of work, in the job's own unit. Bounds keep sums over a year finite."""


class EnergySource(StrEnum):
    """How an energy figure came about; only the first two are measurements."""

    COUNTER = "counter"
    SAMPLED = "sampled"
    SIMULATED = "simulated"
    MODELLED = "modelled"


class DeviceInfo(Message):
    """One GPU and what can be done with it."""

    index: int = Field(ge=0, le=1_023)
    uuid: Text = Field(max_length=100)
    model: Name
    memory_gib: float = Field(gt=0)
    power_limit_w: float = Field(gt=0)
    lowest_limit_w: float | None = Field(default=None, gt=0, description="Null where the device does not say.")
    can_set_clock: bool = False
    can_set_power_limit: bool = False
    can_partition: bool = False
    clocks_mhz: list[int] = Field(default_factory=list[int], max_length=1_000)


class NodeRegistration(Message):
    """An agent's first word; repeated at every start of the agent."""

    node_id: Name
    address: Text = Field(max_length=255, description="Host that other nodes and the control plane reach the node by.")
    agent_url: Text = Field(max_length=255)
    zone: Name | None = Field(default=None, description="Grid zone; null for the cluster's own.")
    devices: list[DeviceInfo] = Field(max_length=1_024)
    driver: Literal["nvml", "simulated"]
    containers: bool = Field(default=False, description="Whether jobs with an image can run here.")
    host_power: EnergySource = Field(description="How the host's CPU power is known.")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict[LabelKey, LabelValue], max_length=64)


class NodeCredentials(Message):
    """A registered node's token; it acts for this node alone."""

    node_id: str
    token: str
    heartbeat_interval_s: float
    lease_ttl_s: float
    pue: float


class DeviceControls(Message):
    """What a gang's devices are set to; null is the default. Of two the one of the higher revision is in force."""

    revision: int = Field(ge=0, lt=2**31)
    power_limit_w: float | None = Field(default=None, gt=0, le=100_000)
    clock_mhz: int | None = Field(default=None, gt=0, le=100_000)
    measure: bool = Field(default=False, description="Whether to report what the gang does at them.")
    slice_s: float = Field(
        default=0,
        ge=0,
        le=1e6,
        description="Of what is measured: the slice ends at the first report so long after its first.",
    )


class MeasuredInterval(Message):
    """What this node's part of a gang did under its settings: from its first report of progress there to its last.

    Of a part that reports no progress: from when the settings were in force until now, and no work.
    """

    elapsed_s: float = Field(ge=0, le=1e9)
    work: Amount = Field(ge=0, description="In the job's own unit.")
    gpu_energy_j: Joules
    marks: int = Field(ge=0, description="Reports of progress, the first included.")
    over: bool = Field(default=False, description="Whether the last of them ended the slice: it stays as it is.")
    local_batch: float | None = Field(default=None, gt=0, description="Samples per GPU and step, where the job says.")


class ControlsStatus(DeviceControls):
    """What a node made of a gang's settings: what is in force there, and what its devices refused."""

    refused: dict[ControlKind, Text] = Field(
        default_factory=dict[ControlKind, str], description="Why a setting was refused; it is then at the default."
    )
    since: Instant | None = Field(default=None, description="When it came into force; null: it has not on all devices.")
    enforced_w: list[float] = Field(
        default_factory=list[float], max_length=1_024, description="The limits its devices say they have, read back."
    )
    slice: MeasuredInterval | None = Field(default=None, description="Where it was asked to measure, once in force.")


class DeviceReading(Message):
    """A device at this moment."""

    index: int
    power_w: float
    utilization: float = Field(ge=0, le=1)
    clock_mhz: int | None = None
    memory_used_gib: float | None = None
    power_limit_w: float | None = Field(default=None, description="The limit a gang has it set to; null: the default.")
    locked_clock_mhz: int | None = Field(default=None, description="The clock it is locked to; null: it is not.")
    enforced_limit_w: float | None = Field(
        default=None, description="The limit that the device itself says is in force."
    )


class RankState(StrEnum):
    """What became of one node's part of a gang."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class EndedBy(StrEnum):
    """Who ended a rank. Only with `itself` is its exit code the job's own doing."""

    ITSELF = "itself"
    STOP = "stop"
    """A StopGang, or a reply that no longer named the allocation. A code of 0 need not mean that the work is done."""
    LEASE = "lease"
    """The node could not renew its lease in time."""
    AGENT = "agent"
    """The agent was shut down together with its ranks."""
    HOST = "host"
    """The host restarted, or somebody killed the process that supervises the rank."""
    REFUSED = "refused"
    """It was never started: the command does not fit this node."""


class RankStatus(Message):
    """One node's part of a gang: all its ranks there run under one entry."""

    allocation_id: Text = Field(max_length=200)
    state: RankState
    exit_code: int | None = Field(
        default=None,
        ge=-(2**31),
        lt=2**31,
        description="Largest exit status of the node's ranks; -N for a signal N.",
    )
    detail: Text | None = Field(default=None, max_length=2_000)
    ended_by: EndedBy | None = Field(default=None, description="Of an exited rank: who ended it.")
    started_at: Instant | None = None
    ended_at: Instant | None = None
    progress_done: Amount | None = None
    progress_total: Amount | None = None
    settings: ControlsStatus | None = Field(default=None, description="Null where none was ever asked for.")


class Heartbeat(Message):
    """Sent every `heartbeat_interval_s`, and at once when a rank changes state."""

    boot_id: Text = Field(max_length=64, description="Names this start of the agent.")
    ranks: list[RankStatus] = Field(max_length=10_000)
    devices: list[DeviceReading] = Field(max_length=1_024)


class HeartbeatReply(Message):
    """Which gangs this node may run, and for how long without another word."""

    lease_ttl_s: float
    allocations: list[str] = Field(
        description="Live allocations with a share on this node; every other gang must stop."
    )


class Usage(Message):
    """Energy of one interval that belongs to one owner: a gang, or nobody (idle)."""

    allocation_id: Annotated[Text, Field(max_length=200)] | None
    devices: list[int] = Field(max_length=1_024)
    gpu_energy_j: Joules
    cpu_energy_j: Joules
    static_energy_j: Joules
    source: EnergySource = Field(description="Of the GPU energy.")
    progress_done: Amount | None = Field(
        default=None, description="Progress at the end of the interval, where it is known."
    )


class EnergyInterval(Message):
    """A node's energy over one interval, split by owner. Sent until it is acknowledged; `sequence` makes that
    harmless."""

    boot_id: Text = Field(max_length=64)
    sequence: int = Field(ge=0, lt=2**63)
    start_at: Instant
    end_at: Instant
    metered_gpu_energy_j: Joules = Field(
        description="The devices' own counters over the interval, all owners together."
    )
    usages: list[Usage] = Field(max_length=1_024)


class EnergyReport(Message):
    """Intervals not yet acknowledged, oldest first."""

    intervals: list[EnergyInterval] = Field(max_length=1_000)


class EnergyReceipt(Message):
    """Everything up to here is stored."""

    accepted: int
    duplicates: int


class NodeState(StrEnum):
    """Whether the control plane hears from a node."""

    UP = "up"
    LOST = "lost"
    ASLEEP = "asleep"
    """Powered down, or waking: nothing is to be heard from it."""


class PowerState(StrEnum):
    """Whether a node is powered, as far as its power is controlled from here."""

    ON = "on"
    GOING_DOWN = "going_down"
    """It gets no work any more and is being powered down."""
    OFF = "off"
    """A gang that is planned on it wakes it."""
    WAKING = "waking"
    FAILED = "failed"
    """It did not wake, or went silent while it was to be powered down; plans leave it out until it is heard again."""


class NodePower(Message):
    """A node's power, and what was made of it so far."""

    state: PowerState = PowerState.ON
    since: Instant | None = Field(default=None, description="Null where it was never changed.")
    pinned_awake: bool = Field(default=False, description="Whether an operator forbids to power it down.")
    reason: str | None = Field(default=None, description="Code of why its state was last changed.")
    detail: str | None = None
    attempts: int = Field(default=0, description="How often the node was told so, of the change under way.")
    wakes: int = Field(default=0, description="How often it was woken; the times below end with the last change.")
    off_s: float = 0.0
    waking_s: float = 0.0
    estimated_energy_j: float = Field(default=0.0, description="Configured watts times these times, as in the ledger.")


class Node(Message):
    """A node as operators see it."""

    id: str
    state: NodeState
    draining: bool
    address: str
    agent_url: str
    zone: str
    driver: str
    containers: bool
    devices: list[DeviceInfo]
    readings: list[DeviceReading]
    gpus: int
    gpus_in_use: int
    power_w: float
    heartbeat_at: Instant | None
    lease_until: Instant | None
    power: NodePower = Field(default_factory=NodePower)


class NodeList(Message):
    """The cluster's nodes."""

    items: list[Node]
