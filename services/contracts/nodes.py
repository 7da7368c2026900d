"""What agents and the control plane exchange about nodes, ranks and energy."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, StringConstraints, model_validator

from services.contracts.clocks import ClockPolicy
from services.contracts.jobs import LabelKey, LabelValue
from services.contracts.schema import (
    LEAST,
    Instant,
    Int,
    Message,
    Name,
    NodeMessage,
    NodeValue,
    Page,
    Real,
    Text,
    is_empty,
    is_none,
    many,
    maybe,
    said,
)
from services.contracts.sources import Sha256
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.mig import MAX_SLICES, WHOLE, parent_of, placed, slice_index

LOG_OFFSET_HEADER = "x-wattshift-log-offset"
"""Offset at which the returned bytes begin; later than requested when older output was discarded."""
LOG_NEXT_OFFSET_HEADER = "x-wattshift-log-next-offset"
LOG_SIZE_HEADER = "x-wattshift-log-size"
LOG_EOF_HEADER = "x-wattshift-log-eof"
"""`true` once the rank has exited and the answer contains the end of its output."""
LOG_SINCE_HEADER = "x-wattshift-log-since"
"""Where the output begins that was written from the requested time on; missing if the node does not know. Of agents."""
LOG_GENERATION_HEADER = "x-wattshift-log-generation"
LOG_NODE_HEADER = "x-wattshift-log-node"
"""Which gang and which node the output comes from; in the public API only."""
SLICE_GONE = "Its MIG slice is gone"
"""How the detail begins of a rank that was refused because a device is no longer the slice that the gang was given."""
OUT_OF_MEMORY = "used more memory than its limit"
"""What the detail has of a rank of which the kernel killed a process for that; no value of ``EndedBy``, because a
control plane of an earlier release would refuse it together with the heartbeat."""
PORT_TAKEN = "Another process listens on its port"
"""How the sentence begins that the detail has of a server that failed while another process held its port."""
NOT_COPIED = "Its checkpoint was not copied"
"""How the sentence begins by which a node says that what a gang has kept last is on that node alone."""
RUNS_AS = "runs-as.json"
"""In the folder of a node's state: as which accounts jobs run, for ``wattshift submit`` on the same host."""


Joules = Annotated[float, Field(ge=0, le=1e12)]
Amount = Annotated[float, Field(ge=-1e15, le=1e15)]
"""An amount of work, in the job's own unit. Bounds keep sums over a year finite."""
Reading = Annotated[float, Field(ge=-1e15, le=1e15)]
"""What a device is said to show, in its unit, whatever that is: sums over nodes stay finite."""
Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]
BootId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][ -~]{0,63}$")]
DeviceIndex = Annotated[int, Field(ge=0, le=16_383)]


class EnergySource(NodeValue, unknown="modelled"):
    """How an energy figure was obtained; only the first two are measurements."""

    COUNTER = "counter"
    SAMPLED = "sampled"
    SIMULATED = "simulated"
    ESTIMATED = "estimated"  #: A slice's share of what its GPU used
    MODELLED = "modelled"


class Basis(NodeValue, unknown="meter"):
    """Why a line of the ledger is not booked as it was reported."""

    METER = "meter"  #: A meter showed what its hardware cannot have used, or nothing: its agent modelled it instead
    HARDWARE = "hardware"  #: More was reported than the node's hardware can use: it is booked at that bound
    LIFE = "life"  #: A part was reported as of a gang that was not there: it is idle
    RETURNED = "returned"
    """It gives energy back to idle that an earlier line charged a job outside the life of its gang, or it takes it."""


def _in_order_of_places(sizes: list[int]) -> list[int]:
    try:
        return [place.sevenths for place in placed(sizes)]
    except DomainError as error:
        raise ValueError(str(error)) from None


SliceSizes = Annotated[list[Int], Field(max_length=MAX_SLICES), AfterValidator(_in_order_of_places)]
"""Slices of one GPU by their sizes in sevenths, read in any order and kept in that of their places; empty: uncut."""


class DeviceInfo(NodeMessage):
    """One GPU, or one MIG slice of a GPU, and its capabilities."""

    # Fields that only slices and cut GPUs need are left out at their defaults: a control plane of the previous release
    # refuses what it does not know.
    index: int = said(
        "Number of the device on its node: GPUs from 0 in the driver's order; the slice of GPU `parent` "
        "that begins at memory slot `start` is 1024 + 8 * parent + start.",
        ge=0,
        le=16_383,
    )
    uuid: Text = said("`GPU-...`, or `MIG-...` of a slice.", max_length=100)
    parent: int | None = maybe("The GPU that a slice is part of.", ge=0, le=1_023, exclude_if=is_none)
    profile: Text | None = maybe("The driver's name of a slice, as `2g.20gb`.", max_length=63, exclude_if=is_none)
    sevenths: int = Field(
        default=WHOLE,
        ge=1,
        le=WHOLE,
        exclude_if=lambda sevenths: sevenths == WHOLE,
        description="Its compute, in sevenths of a GPU.",
    )

    start: int | None = maybe("First memory slot of a slice on its GPU.", ge=0, le=7, exclude_if=is_none)
    mig_enabled: bool = said(
        "Whether the GPU is cut. Then jobs run on its slices, and not on the GPU itself.",
        default=False,
        exclude_if=is_empty,
    )
    model: Name
    memory_gib: Reading = Field(gt=0)
    power_limit_w: Reading = Field(gt=0)
    lowest_limit_w: Reading | None = maybe("Null where the device does not report it.", gt=0)
    highest_limit_w: Reading | None = maybe("Null where the device does not report it.", gt=0, exclude_if=is_none)
    can_set_clock: bool = False
    can_set_power_limit: bool = False
    can_partition: bool = False
    clocks_mhz: list[Count] = Field(default_factory=list[int], max_length=1_000)

    @model_validator(mode="after")
    def _is_numbered_by_its_place(self) -> Self:
        if self.parent != parent_of(self.index) or (self.parent is None) != (self.start is None):
            raise ValueError("a slice, and nothing else, has a parent and a start, and its index is from 1024 on")
        if self.parent is not None and self.start is not None and self.index != slice_index(self.parent, self.start):
            raise ValueError(f"the slice of GPU {self.parent} at {self.start} is not device {self.index}")
        return self


CheckpointPlace = Literal["shared", "store", "local"]
ProtectionName = Literal[
    "accounts",
    "folders",
    "temporary_space",
    "processes",
    "privileges",
    "system_calls",
    "memory",
    "process_count",
    "cpu_weight",
    "io_weight",
    "devices",
    "network",
]


class Protection(NodeMessage):
    """One of the things that keep jobs apart on a node, and away from the agent."""

    name: ProtectionName
    holds: bool
    how: Text = said("What does it; where it does not hold, why not.", max_length=200)


class NodeRegistration(NodeMessage):
    """Sent by an agent every time it starts."""

    node_id: Name
    address: Text = said(
        "Host name or address at which other nodes and the control plane reach the node.", max_length=255
    )
    agent_url: Annotated[Text, StringConstraints(pattern=r"^(https?://[^\s/?#@]+/?)?$", max_length=255)] = said(
        "Where the control plane asks the agent, by host and port alone; empty: it cannot be asked."
    )
    zone: Name | None = maybe("Grid zone; null for the cluster's default zone.")
    devices: list[DeviceInfo] = Field(max_length=1_024)
    driver: Literal["nvml", "simulated", "engine"] = said("`engine`: the bridge to an engine, without GPUs.")
    containers: bool = said("Whether the node can run jobs that have an image.", default=False)
    host_power: EnergySource = said("How the host's CPU power is obtained.")
    most_host_w: Reading | None = maybe(
        "What all but the GPUs can draw, watts: more is not booked. Null: an agent of an earlier release.",
        ge=0,
        exclude_if=is_none,
    )
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict[LabelKey, LabelValue], max_length=64)
    protections: list[Protection] = Field(default_factory=list[Protection], max_length=32)
    checkpoints: CheckpointPlace | None = maybe(
        "Where jobs that name no folder keep checkpoints: `shared` by all nodes, copied to a `store`, or "
        "`local` to the node. Null: an agent of an earlier release.",
        exclude_if=is_none,
    )
    measures_only: bool = said(
        "Whether the agent starts no jobs and sets nothing: no job of ours may be placed on its node.",
        default=False,
        exclude_if=is_empty,
    )
    engine_node: Name | None = maybe(
        "By which name an engine's bridge reports this host, `ENGINE.NODE` with this node's id as NODE; "
        "what its GPUs use belongs to the engine's jobs that hold them. Of a node that only measures.",
        exclude_if=is_none,
    )

    @model_validator(mode="after")
    def _speaks_for_its_own_host(self) -> Self:
        if self.engine_node is not None:
            if not self.measures_only:
                raise ValueError("engine_node is of a node that only measures")
            if not re.fullmatch(rf".+\.{re.escape(self.node_id)}", self.engine_node):
                raise ValueError(f"engine_node must be ENGINE.{self.node_id}: an agent speaks for its own host")
        return self

    @property
    def role(self) -> NodeRole:
        return NodeRole.ENGINE if self.driver == "engine" else NodeRole.AGENT


class NodeRole(StrEnum):
    """What may register under a node's name."""

    AGENT = "agent"  #: Of a host, whose devices it reports and whose gangs it runs
    ENGINE = "engine"  #: The bridge to an engine such as Slurm, which reports the nodes and jobs of that


class NodeEnrolmentSpec(Message):
    """How a host is let in as a node."""

    role: NodeRole = said("What the token lets in.", default=NodeRole.AGENT)
    lifetime_s: Real = said("How long the token may be used.", default=3_600, ge=LEAST, le=30 * 86_400)


class NodeEnrolment(Message):
    """The token with which one host becomes the node, once."""

    node_id: str
    role: NodeRole
    token: str = said("Shown here and never again.")
    expires_at: Instant


class NodeInvitationSpec(Message):
    """Who is to join: a host under a name that no node has, or under this one."""

    node_id: Name | None = maybe("Whoever has this name is the node no more then.")
    lifetime_s: Real = said("How long the token may be used.", default=600, ge=LEAST, le=86_400)


class NodeInvitation(Message):
    """What `wattshift join` needs on the host that is to be a node."""

    url: str = said("Where telemetry answers nodes over TLS.")
    token: str = said("For one host, once; with the fingerprint of telemetry's certificate. Shown once.")
    expires_at: Instant


class NodeKeys(NodeMessage):
    """The hashes of the secrets that a node made for itself, which never leave it."""

    credential_sha256: Sha256 = said("Of the secret with which it registers.")
    redis_sha256: Sha256 = said("Of its password in Valkey or Redis.")


class NodeEnroller(NodeKeys):
    """The program that enrols: its keys and its role."""

    role: NodeRole | None = maybe("Null: an agent or a bridge of the release before.")


class NodeCredential(NodeMessage):
    """What a node is told when it has enrolled, or replaced its secrets."""

    node_id: str
    call_secrets: list[str] = said("By which it knows the services that ask it, in hexadecimal digits.")
    redis_user: str | None = said("Its user in Valkey or Redis; null where nodes share one.")
    redis_url: str | None = said("Where its commands are, without a user; null: as its settings say.")
    rotate_after_s: float = said("When it is to replace its secrets.")


class NodeCertificate(NodeMessage):
    """The certificate by which the control plane knows a node's agent from now on."""

    pem: str = said("The certificate and its key.")


class CredentialState(StrEnum):
    """How a node proves who it is."""

    OWN = "own"
    SHARED = "shared"  #: By the join token that nodes of the release before share: it has not enrolled yet
    REVOKED = "revoked"


class NodeCredentials(NodeMessage):
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
    measure: bool = said("Whether to measure the gang's work and energy under them.", default=False)
    interval_s: float = said(
        "A measurement ends with the first progress report at least this long after its first.",
        default=0,
        ge=0,
        le=1e6,
        validation_alias=AliasChoices("interval_s", "slice_s"),
        serialization_alias="slice_s",
    )


class MeasuredInterval(NodeMessage):
    """Work and energy of this node's part of a gang under given controls, between its first and last progress report.

    If it reports no progress: from the time the controls took effect until now, with no work.
    """

    elapsed_s: float = Field(ge=0, le=1e9)
    work: float = said("In the job's own unit of work.", ge=0, le=1e15)
    gpu_energy_j: Joules
    marks: int = said("Number of progress reports, including the first.", ge=0, lt=2**31)
    over: bool = said("Whether the last report ended the measurement, which does not change any more.", default=False)
    local_batch: Amount | None = maybe("Samples per GPU and step, if the job reports it.", gt=0)


class ControlsStatus(DeviceControls, NodeMessage):
    """The controls in effect on a node's devices of a gang, and those that the devices refused."""

    refused: dict[ControlKind, Text] = said(
        "Why a control was refused; it then keeps its default.", default_factory=dict[ControlKind, str]
    )
    since: Instant | None = maybe("When they took effect; null if they have not on all devices.")
    enforced_w: list[Reading] = many("The power limits as read back from the devices.", max_length=1_024)
    interval: MeasuredInterval | None = maybe(
        "The measurement, if one was requested and the controls are in effect.",
        validation_alias=AliasChoices("interval", "slice"),
        serialization_alias="slice",
    )


class DeviceReading(NodeMessage):
    """The current readings of a device."""

    index: DeviceIndex
    power_w: Reading = said("Of a slice: its estimated share of its GPU's power, which contains it.")
    utilization: float = Field(ge=0, le=1)
    clock_mhz: Count | None = None
    memory_used_gib: Reading | None = None
    power_limit_w: Reading | None = maybe("The power limit set for a gang; null for the default.")
    locked_clock_mhz: Count | None = maybe("The clock that the device is locked to; null if it is not locked.")
    latency_clock_mhz: Count | None = maybe(
        "The clock that the latency of a pool's requests asks for; in a dry run it is not set. Null where "
        "clocks do not follow latency."
    )
    enforced_limit_w: Reading | None = maybe("The power limit that the device itself reports.")
    energy_j: Reading | None = maybe(
        "The device's energy counter, which counts from an arbitrary start; null if it has none, and of slices.",
        exclude_if=is_none,
    )
    read_at: Instant | None = maybe("When it was read, by the clock of the node.", exclude_if=is_none)
    counter_ratio: Reading | None = maybe(
        "Energy by the device's counter over that by its sampled power, in the first seconds of its agent. "
        "The counter is used if the two differ by less than a factor of 2, and else the power. Null while it is not "
        "known.",
        exclude_if=is_none,
    )
    temperature_c: Reading | None = maybe(
        "Degrees Celsius at the last look at its health; null of slices.", exclude_if=is_none
    )
    meter_faults: Count = said(
        "How many of the device's readings since its agent began were rejected, because it cannot have "
        "used that much; its energy was modelled instead.",
        default=0,
        exclude_if=is_empty,
    )


class RankState(StrEnum):
    """State of one node's part of a gang."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class EndedBy(NodeValue, unknown="other"):
    """Who ended a rank. Only with `itself` is the exit code the job's own."""

    ITSELF = "itself"
    STOP = "stop"
    """A StopGang, or a reply that no longer named the allocation. Exit code 0 need not mean that the work is done."""
    LEASE = "lease"  #: The node could not renew its lease in time
    AGENT = "agent"  #: The agent was shut down together with its ranks
    HOST = "host"  #: The host restarted, or the process that supervises the rank was killed
    REFUSED = "refused"  #: It was never started: the command does not fit this node
    CANNOT_START = "cannot_start"
    """It was never started, and trying again is of no use: its account, folder or program cannot be had."""
    TIME_LIMIT = "time_limit"  #: It ran for as long as its job may run at a time
    OTHER = "other"  #: As only a later release knows


class Listener(NodeValue, unknown="unchecked"):
    """Who listens on the port of a service instance."""

    OWN = "own"  #: A process of its own
    NONE = "none"  #: Nobody
    FOREIGN = "foreign"  #: Another process, which would be taken for it
    UNCHECKED = "unchecked"  #: Somebody; the agent may not look at the instance's processes


class ClockMinute(NodeMessage):
    """The clocks that the latency of a server's requests asked for in one UTC minute, decided about every second."""

    start_at: Instant
    policy: ClockPolicy = said("By which the last of them was decided.")
    dry_run: bool = said("Whether the last of them was only said, and not set.")
    decisions: int = Field(ge=1, le=1_000)
    exceeded: int = said("How many of them followed reports that exceeded a limit.", ge=0, le=1_000)
    unobserved: int = said(
        "How many of them kept the clock, because requests were in service and nothing was seen of them.",
        default=0,
        ge=0,
        le=1_000,
    )
    mean_mhz: float = Field(gt=0, le=100_000)
    lowest_mhz: float = Field(gt=0, le=100_000)
    highest_mhz: float = Field(gt=0, le=100_000)
    last_mhz: float = Field(gt=0, le=100_000)
    model_error: float | None = maybe("Mean relative error of the learned model; null while there is none.", ge=0)
    unused: Text | None = maybe("Why the last was not decided by the learned model but by MIAD.", max_length=50)


class RankStatus(NodeMessage):
    """One node's part of a gang; one entry covers all its ranks there."""

    allocation_id: Text = Field(max_length=200)
    state: RankState
    exit_code: int | None = maybe("Largest exit status of the node's ranks; -N for signal N.", ge=-(2**31), lt=2**31)
    detail: Text | None = Field(default=None, max_length=2_000)
    ended_by: EndedBy | None = maybe("Who ended the rank, once it has exited.")
    started_at: Instant | None = None
    ended_at: Instant | None = None
    progress_done: Amount | None = None
    progress_total: Amount | None = None
    noise_scale: float | None = maybe("The job's gradient noise scale, samples, if it reports it.", gt=0, le=1e15)
    saved_at: Instant | None = maybe("When the job last said that it has saved its work.", exclude_if=is_none)
    save_s: float | None = maybe("How long it said that took, seconds.", ge=0, le=1e9, exclude_if=is_none)
    holds_checkpoint: bool | None = maybe(
        "Whether the job's folder of checkpoints on this node, which no other node has, has anything in "
        "it, once the rank has exited; null where others have it, too, and while that is not known.",
        exclude_if=is_none,
    )
    listener: Listener | None = maybe(
        "Who listens on its port; null for jobs that are no service instances, and from older agents.",
        exclude_if=is_none,
    )
    settings: ControlsStatus | None = maybe("Null if none were ever requested.")
    clocks: list[ClockMinute] = many("The minute of now and the one before, where clocks follow latency.", max_length=2)


class PartitionState(NodeValue, unknown="pending"):
    """How far a node has got with a partition that it was asked for."""

    PENDING = "pending"  #: The node has not begun: work still runs on the GPU, or it has not heard of it yet
    BUSY = "busy"  #: The driver says that the GPU is in use, by a process that is not a job; the node tries again
    APPLIED = "applied"
    FAILED = "failed"  #: The GPU is cut as before


class WantedPartition(NodeMessage):
    """How one GPU is to be cut."""

    gpu: int = said("Its index.", ge=0, le=1_023)
    revision: int = said("Grows with every change of what is wanted.", ge=1, lt=2**63)
    sizes: SliceSizes


class PartitionStatus(NodeMessage):
    """How one GPU is cut now, and how far the node has got with what is wanted of it."""

    gpu: int = Field(ge=0, le=1_023)
    revision: int = said("Of the wanted partition that `state` is about; 0 for none.", ge=0, lt=2**63)
    state: PartitionState
    detail: Text = Field(default="", max_length=2_000)
    sizes: list[Annotated[Int, Field(ge=1, le=WHOLE)]] = said(
        "In sevenths, in the order of their places; empty: uncut.", max_length=MAX_SLICES
    )


class GpuPartitionSpec(Message):
    """How an operator wants a GPU cut."""

    sizes: SliceSizes = said(
        "Slices by their sizes in sevenths of the GPU, such as `[3, 2, 2]`; empty for the whole GPU.",
        examples=[[3, 2, 2]],
    )


class GpuPartition(Message):
    """How a GPU is to be cut, and how far its node has got with that."""

    gpu: int
    revision: int
    sizes: list[int] = said("In sevenths of the GPU, in the order of their places; empty: uncut.")
    owner: str | None = maybe("The fleet that the GPU is reserved for; null if an operator cut it.")
    state: PartitionState
    detail: str = ""
    wanted_at: Instant
    applied_at: Instant | None = None


class GpuFaultCause(NodeValue, unknown="other"):
    """What is wrong with a GPU."""

    LOST = "lost"  #: It has fallen off the bus, or does not answer
    XID = "xid"  #: The driver reported a critical error of the device
    ECC = "ecc"  #: Its memory has errors that cannot be corrected
    TEMPERATURE = "temperature"
    FOREIGN_PROCESS = "foreign_process"  #: A process computes on it that belongs to no job
    OTHER = "other"  #: As only a later release knows


class GpuFault(NodeMessage):
    """Why a node takes one of its GPUs out of service."""

    id: Text = said("Of this occurrence.", max_length=64)
    gpu: int = said("Its index.", ge=0, le=1_023)
    uuid: Text = Field(max_length=100)
    cause: GpuFaultCause
    detail: Text = Field(max_length=500)
    since: Instant
    ends_gangs: bool = said("Whether gangs that hold the GPU cannot go on.")
    lasts: bool = said("Whether it still holds.")


class Heartbeat(NodeMessage):
    """Sent every `heartbeat_interval_s`, and at once when a rank changes state."""

    boot_id: BootId = said("Identifies this start of the agent.")
    ranks: list[RankStatus] = Field(max_length=10_000)
    devices: list[DeviceReading] = Field(max_length=1_024)
    partitions: list[PartitionStatus] | None = maybe(
        "Its GPUs that can be cut. Null from an agent that cuts none; it is asked for no partition.",
        max_length=1_024,
        exclude_if=is_none,
    )
    closed: Text | None = maybe(
        "Why the node takes no new work, such as a disk that is nearly full; null while it does.",
        max_length=500,
        exclude_if=is_none,
    )
    gpu_faults: list[GpuFault] | None = maybe(
        "What is wrong with its GPUs, the worst of each. Null from an agent that does not look.",
        max_length=1_024,
        exclude_if=is_none,
    )


class HeartbeatReply(NodeMessage):
    """Which gangs the node may run, and for how long without another reply."""

    lease_ttl_s: float
    allocations: list[str] = said("Live allocations with a share on this node; every other gang must stop.")
    partitions: list[WantedPartition] = many(
        "How the node's GPUs are to be cut, each as soon as no gang runs on it. GPUs that are not named "
        "stay as they are.",
        exclude_if=is_empty,
    )
    returned_faults: list[str] = many(
        "Faults after which an operator has returned the GPU to service; they are not reported again.",
        exclude_if=is_empty,
    )


class Usage(NodeMessage):
    """Energy of one interval that one gang used, or that was idle."""

    allocation_id: Annotated[Text, Field(max_length=200)] | None
    devices: list[DeviceIndex] = Field(max_length=1_024)
    gpu_energy_j: Joules
    cpu_energy_j: Joules
    static_energy_j: Joules
    source: EnergySource = said("How the GPU energy was obtained.")
    progress_done: Amount | None = maybe("Progress at the end of the interval, if known.")
    basis: Basis | None = maybe("Why this is not what the meters show; null: it is.", exclude_if=is_none)
    until: Instant | None = maybe(
        "When the gang ended, if the interval goes on after that; the energy is that until then.", exclude_if=is_none
    )


class EnergyInterval(NodeMessage):
    """A node's energy over one interval, split by gang.

    It is sent until it is acknowledged; `sequence` makes repeats harmless.
    """

    boot_id: BootId
    sequence: int = Field(ge=0, lt=2**63)
    start_at: Instant
    end_at: Instant
    metered_gpu_energy_j: Joules = said("Total by the devices' own counters over the interval.")
    usages: list[Usage] = Field(max_length=1_024)
    cpu_source: EnergySource | None = maybe(
        "How the CPU energy was obtained, where that is not as the node has registered.", exclude_if=is_none
    )


class EnergyReport(NodeMessage):
    """Intervals that are not yet acknowledged, oldest first."""

    intervals: list[EnergyInterval] = Field(max_length=1_000)


class EnergyReceipt(NodeMessage):
    """The answer to an energy report: everything in it is stored."""

    accepted: int
    duplicates: int


class NodeState(StrEnum):
    """Whether the control plane receives heartbeats from a node."""

    UP = "up"
    LOST = "lost"
    ASLEEP = "asleep"  #: Powered down or waking, so that no heartbeats are expected


class PowerState(StrEnum):
    """Whether a node is powered, if Wattshift controls its power."""

    ON = "on"
    GOING_DOWN = "going_down"
    """It is being powered down and gets no more work."""
    OFF = "off"  #: A gang that is planned on the node wakes it
    WAKING = "waking"
    FAILED = "failed"
    """It did not wake, or sent no heartbeats while it was to go down. Plans leave it out until it sends one."""


class NodePower(Message):
    """A node's power state and its history."""

    state: PowerState = PowerState.ON
    since: Instant | None = maybe("When the state last changed; null if it never has.")
    pinned_awake: bool = said("Whether an operator keeps the node from being powered down.", default=False)
    reason: str | None = maybe("Stable code of why the state last changed.")
    detail: str | None = None
    attempts: int = said("How often the power hook was called for the current change.", default=0)
    wakes: int = said(
        "How often the node was woken. The durations below count up to the last change of state.", default=0
    )
    off_s: float = 0.0
    waking_s: float = 0.0
    estimated_energy_j: float = said("Configured watts times these durations, as in the ledger.", default=0.0)


class GpuHealth(Message):
    """A GPU that gets no new work though its node does."""

    gpu: int = said("Its index.")
    uuid: str
    drained: bool = said("Whether an operator has taken it out of service.")
    cause: GpuFaultCause | None = maybe("What is wrong with it; null for nothing.")
    detail: str = ""
    since: Instant | None = None
    ends_gangs: bool = said("Whether gangs that held it were ended, and queued again.", default=False)
    lasts: bool = said("Whether this still holds; then it cannot return to service.", default=False)


class GpuTrend(Message):
    """What a GPU's temperature was, step by step."""

    gpu: int
    temperature_c: list[int | None] = said("Degrees Celsius; null where nothing was reported.")


class NodeTrend(Message):
    """Temperatures of a node's GPUs over at most a day, up to now."""

    start_at: Instant
    step_s: int
    gpus: list[GpuTrend]


class Node(Message):
    """A node as shown to operators."""

    id: str
    state: NodeState
    draining: bool
    closed: str | None = maybe("Why the node itself takes no new work, such as a full disk; null while it does.")
    address: str
    agent_url: str
    zone: str
    driver: str
    measures_only: bool = said("Whether its agent only measures: no job of ours is placed on it.", default=False)
    engine_node: str | None = maybe("The engine's node whose energy it measures; null for none.")
    containers: bool
    checkpoints: CheckpointPlace | None = maybe(
        "Where jobs that name no folder keep checkpoints: `shared` by all nodes, copied to a `store`, or "
        "`local` to the node, to which jobs are then bound; null where the agent is of an earlier release."
    )
    devices: list[DeviceInfo]
    readings: list[DeviceReading]
    partitions: list[GpuPartition] = many("How its GPUs are to be cut, for those that ever were.")
    gpu_health: list[GpuHealth] = many("Its GPUs that get no new work; none while all of them do.")
    gpus: int = said("Slices are not counted, only the GPUs they are part of.")
    gpus_in_use: int = said("GPUs that a gang holds, whole or in slices.")
    power_w: float
    marked_intervals: int = said(
        "How many of the node's intervals are not booked as metered or reported, because its hardware "
        "cannot have used that much. The `basis` of their lines in the ledger says which.",
        default=0,
    )
    heartbeat_at: Instant | None
    lease_until: Instant | None
    power: NodePower = Field(default_factory=NodePower)
    credential: CredentialState = said("How the node proves who it is.", default=CredentialState.SHARED)
    credential_since: Instant | None = maybe("Since when it has its credential, or has had it revoked.")
    protections: list[Protection] = many("What keeps jobs apart there; none where the agent is of an earlier release.")
    trend: NodeTrend | None = maybe(
        "Of a list with `trend`: temperatures of its GPUs in the past day. Missing where none is known.",
        exclude_if=is_none,
    )


class NodeList(Page[Node]):
    """The cluster's nodes, or one page of them, by name."""


class TopologyLevel(Message):
    """A level of the network between nodes. A gang has GPUs of one model, in one zone."""

    level: str = said("Its name: `node` first, `cluster`, for all nodes together, last.")
    domains: int = said("How many racks, or other domains of it, there are.")
    gpus: int = said("The largest gang that one of them could ever hold.")
    free: int = said("The largest gang that could start now within one of them.")


class TopologyFile(Message):
    """An operator's file of the network's levels."""

    file: str = said(
        "One line for each domain, as `rack r1: node-[01-08]` and `block a: r1, r2`, or Slurm's `topology.conf`. "
        "Empty: nodes' labels `nvlink`, `rack` and `block` alone say where they are.",
        max_length=4_000_000,
    )


class Topology(TopologyFile):
    """The levels of the network, and how much of each is free for one gang."""

    free_gpus: int = said("Free GPUs of nodes that take work, for training.", default=0)
    levels: list[TopologyLevel] = many("Narrowest first; none where the scheduler has not held a round yet.")
