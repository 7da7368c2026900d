"""What agents and the control plane exchange about nodes, ranks and energy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AliasChoices, ConfigDict, Field

from services.contracts.jobs import LabelKey, LabelValue
from services.contracts.schema import Instant, Message, Name, Text
from services.core.domain.controls import ControlKind

LOG_OFFSET_HEADER = "x-wattshift-log-offset"
"""Offset at which the returned bytes begin; later than requested when older output was discarded."""
LOG_NEXT_OFFSET_HEADER = "x-wattshift-log-next-offset"
LOG_SIZE_HEADER = "x-wattshift-log-size"
LOG_EOF_HEADER = "x-wattshift-log-eof"
"""`true` once the rank has exited and the answer contains the end of its output."""
LOG_GENERATION_HEADER = "x-wattshift-log-generation"
LOG_NODE_HEADER = "x-wattshift-log-node"
"""Which gang and which node the output comes from; in the public API only."""


Joules = Annotated[float, Field(ge=0, le=1e12)]
Amount = Annotated[float, Field(ge=-1e15, le=1e15)]
"""An amount of work, in the job's own unit. Bounds keep sums over a year finite."""


class EnergySource(StrEnum):
    """How an energy figure was obtained; only the first two are measurements."""

    COUNTER = "counter"
    SAMPLED = "sampled"
    SIMULATED = "simulated"
    MODELLED = "modelled"


class DeviceInfo(Message):
    """One GPU and its capabilities."""

    index: int = Field(ge=0, le=1_023)
    uuid: Text = Field(max_length=100)
    model: Name
    memory_gib: float = Field(gt=0)
    power_limit_w: float = Field(gt=0)
    lowest_limit_w: float | None = Field(default=None, gt=0, description="Null where the device does not report it.")
    can_set_clock: bool = False
    can_set_power_limit: bool = False
    can_partition: bool = False
    clocks_mhz: list[int] = Field(default_factory=list[int], max_length=1_000)


class NodeRegistration(Message):
    """Sent by an agent every time it starts."""

    node_id: Name
    address: Text = Field(
        max_length=255, description="Host name or address at which other nodes and the control plane reach the node."
    )
    agent_url: Text = Field(max_length=255)
    zone: Name | None = Field(default=None, description="Grid zone; null for the cluster's default zone.")
    devices: list[DeviceInfo] = Field(max_length=1_024)
    driver: Literal["nvml", "simulated"]
    containers: bool = Field(default=False, description="Whether the node can run jobs that have an image.")
    host_power: EnergySource = Field(description="How the host's CPU power is obtained.")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict[LabelKey, LabelValue], max_length=64)


class NodeCredentials(Message):
    """A registered node's token, which is valid for this node only."""

    node_id: str
    token: str
    heartbeat_interval_s: float
    lease_ttl_s: float
    pue: float


class DeviceControls(Message):
    """Power limit and clock of a gang's devices; null means the default. The highest revision applies."""

    # `interval_s` and `interval` are read by either name, but still written as `slice_s` and `slice`, which is all that
    # agents and control planes of the previous release know.
    model_config = ConfigDict(serialize_by_alias=True)

    revision: int = Field(ge=0, lt=2**31)
    power_limit_w: float | None = Field(default=None, gt=0, le=100_000)
    clock_mhz: int | None = Field(default=None, gt=0, le=100_000)
    measure: bool = Field(default=False, description="Whether to measure the gang's work and energy under them.")
    interval_s: float = Field(
        default=0,
        ge=0,
        le=1e6,
        validation_alias=AliasChoices("interval_s", "slice_s"),
        serialization_alias="slice_s",
        description="A measurement ends with the first progress report at least this long after its first.",
    )


class MeasuredInterval(Message):
    """Work and energy of this node's part of a gang under given controls, between its first and last progress report.

    If it reports no progress: from the time the controls took effect until now, with no work.
    """

    elapsed_s: float = Field(ge=0, le=1e9)
    work: Amount = Field(ge=0, description="In the job's own unit of work.")
    gpu_energy_j: Joules
    marks: int = Field(ge=0, description="Number of progress reports, including the first.")
    over: bool = Field(
        default=False, description="Whether the last report ended the measurement, which does not change any more."
    )
    local_batch: float | None = Field(
        default=None, gt=0, description="Samples per GPU and step, if the job reports it."
    )


class ControlsStatus(DeviceControls):
    """The controls in effect on a node's devices of a gang, and those that the devices refused."""

    refused: dict[ControlKind, Text] = Field(
        default_factory=dict[ControlKind, str], description="Why a control was refused; it then keeps its default."
    )
    since: Instant | None = Field(
        default=None, description="When they took effect; null if they have not on all devices."
    )
    enforced_w: list[float] = Field(
        default_factory=list[float], max_length=1_024, description="The power limits as read back from the devices."
    )
    interval: MeasuredInterval | None = Field(
        default=None,
        validation_alias=AliasChoices("interval", "slice"),
        serialization_alias="slice",
        description="The measurement, if one was requested and the controls are in effect.",
    )


class DeviceReading(Message):
    """The current readings of a device."""

    index: int
    power_w: float
    utilization: float = Field(ge=0, le=1)
    clock_mhz: int | None = None
    memory_used_gib: float | None = None
    power_limit_w: float | None = Field(
        default=None, description="The power limit set for a gang; null for the default."
    )
    locked_clock_mhz: int | None = Field(
        default=None, description="The clock that the device is locked to; null if it is not locked."
    )
    latency_clock_mhz: int | None = Field(
        default=None,
        description="The clock that the latency of a pool's requests asks for; in a dry run it is not set. Null where "
        "clocks do not follow latency.",
    )
    enforced_limit_w: float | None = Field(default=None, description="The power limit that the device itself reports.")


class RankState(StrEnum):
    """State of one node's part of a gang."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class EndedBy(StrEnum):
    """Who ended a rank. Only with `itself` is the exit code the job's own."""

    ITSELF = "itself"
    STOP = "stop"
    """A StopGang, or a reply that no longer named the allocation. Exit code 0 need not mean that the work is done."""
    LEASE = "lease"
    """The node could not renew its lease in time."""
    AGENT = "agent"
    """The agent was shut down together with its ranks."""
    HOST = "host"
    """The host restarted, or the process that supervises the rank was killed."""
    REFUSED = "refused"
    """It was never started: the command does not fit this node."""
    TIME_LIMIT = "time_limit"
    """It ran for as long as its job may run at a time."""


class RankStatus(Message):
    """One node's part of a gang; one entry covers all its ranks there."""

    allocation_id: Text = Field(max_length=200)
    state: RankState
    exit_code: int | None = Field(
        default=None,
        ge=-(2**31),
        lt=2**31,
        description="Largest exit status of the node's ranks; -N for signal N.",
    )
    detail: Text | None = Field(default=None, max_length=2_000)
    ended_by: EndedBy | None = Field(default=None, description="Who ended the rank, once it has exited.")
    started_at: Instant | None = None
    ended_at: Instant | None = None
    progress_done: Amount | None = None
    progress_total: Amount | None = None
    settings: ControlsStatus | None = Field(default=None, description="Null if none were ever requested.")


class Heartbeat(Message):
    """Sent every `heartbeat_interval_s`, and at once when a rank changes state."""

    boot_id: Text = Field(max_length=64, description="Identifies this start of the agent.")
    ranks: list[RankStatus] = Field(max_length=10_000)
    devices: list[DeviceReading] = Field(max_length=1_024)


class HeartbeatReply(Message):
    """Which gangs the node may run, and for how long without another reply."""

    lease_ttl_s: float
    allocations: list[str] = Field(
        description="Live allocations with a share on this node; every other gang must stop."
    )


class Usage(Message):
    """Energy of one interval that one gang used, or that was idle."""

    allocation_id: Annotated[Text, Field(max_length=200)] | None
    devices: list[int] = Field(max_length=1_024)
    gpu_energy_j: Joules
    cpu_energy_j: Joules
    static_energy_j: Joules
    source: EnergySource = Field(description="How the GPU energy was obtained.")
    progress_done: Amount | None = Field(default=None, description="Progress at the end of the interval, if known.")


class EnergyInterval(Message):
    """A node's energy over one interval, split by gang.

    It is sent until it is acknowledged; `sequence` makes repeats harmless.
    """

    boot_id: Text = Field(max_length=64)
    sequence: int = Field(ge=0, lt=2**63)
    start_at: Instant
    end_at: Instant
    metered_gpu_energy_j: Joules = Field(description="Total by the devices' own counters over the interval.")
    usages: list[Usage] = Field(max_length=1_024)


class EnergyReport(Message):
    """Intervals that are not acknowledged yet, oldest first."""

    intervals: list[EnergyInterval] = Field(max_length=1_000)


class EnergyReceipt(Message):
    """The answer to an energy report: everything in it is stored."""

    accepted: int
    duplicates: int


class NodeState(StrEnum):
    """Whether the control plane receives heartbeats from a node."""

    UP = "up"
    LOST = "lost"
    ASLEEP = "asleep"
    """Powered down or waking, so that no heartbeats are expected."""


class PowerState(StrEnum):
    """Whether a node is powered, if Wattshift controls its power."""

    ON = "on"
    GOING_DOWN = "going_down"
    """It is being powered down and gets no more work."""
    OFF = "off"
    """A gang that is planned on the node wakes it."""
    WAKING = "waking"
    FAILED = "failed"
    """It did not wake, or sent no heartbeats while it was to go down. Plans leave it out until it sends one."""


class NodePower(Message):
    """A node's power state and its history."""

    state: PowerState = PowerState.ON
    since: Instant | None = Field(default=None, description="When the state last changed; null if it never has.")
    pinned_awake: bool = Field(default=False, description="Whether an operator keeps the node from being powered down.")
    reason: str | None = Field(default=None, description="Stable code of why the state last changed.")
    detail: str | None = None
    attempts: int = Field(default=0, description="How often the power hook was called for the current change.")
    wakes: int = Field(
        default=0, description="How often the node was woken. The durations below count up to the last change of state."
    )
    off_s: float = 0.0
    waking_s: float = 0.0
    estimated_energy_j: float = Field(
        default=0.0, description="Configured watts times these durations, as in the ledger."
    )


class Node(Message):
    """A node as shown to operators."""

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
