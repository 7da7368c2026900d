"""The live queue and cluster as the scheduler hands them to the what-if service."""

from typing import Any, Literal

from pydantic import Field

from services.contracts.jobs import Share
from services.contracts.schema import Message, many, maybe, said
from services.core.domain.signal import Signal


class LiveKind(Message):
    """A kind of node: its GPU model and the draw of an idle device with its share of the host."""

    gpu_model: str
    idle_w: float


class LiveNode(Message):
    """A node without the devices of service instances, which policies cannot give away."""

    kind: int = said("Index into the kinds.", ge=0)
    gpus: int = said("GPUs that are not cut.", ge=0)
    takes_work: bool = said("False while it is drained.")
    domains: list[int] = many("Its domain at each level of the network.")


class LiveSlice(Message):
    """A MIG slice; those of service instances, and of GPUs kept for a fleet, are left out."""

    node: int = said("Index into the nodes.", ge=0)
    gpu: int = said("Which of the node's GPUs that are cut.", ge=0)
    sevenths: int
    start: int = said("Its first memory slot.", ge=0)
    memory_gib: float


class LiveWindow(Message):
    """A reservation or a maintenance. Times are UTC seconds."""

    id: str
    start_s: float
    end_s: float
    gpus: dict[int, int] = said("How many GPUs of each node, by its index.")
    holder: str | None = said("The tenant whose jobs get them; null for maintenance.")


class LiveRates(Message):
    """Speed, relative to the smallest gang's, and draw of each GPU, by the sizes of the profile."""

    speed: list[float]
    power_w: list[float]


class LiveProfile(Message):
    """How some jobs run, on the kinds of nodes that they may use."""

    gpus: list[int] = said("Gang sizes, ascending.")
    rates: dict[int, LiveRates] = said("By index of the kind of node.")


class LiveJob(Message):
    """A job that waits or holds GPUs. Times are UTC seconds."""

    id: str
    tenant: str
    submitted_s: float
    since_s: float = said("Since when it waits, or has held its GPUs.")
    profile: int = said("Index into the profiles.", ge=0)
    min_gpus: int
    max_gpus: int
    step_gpus: int
    asked_gpus: int | None = maybe("What its user would ask for; null: `min_gpus`.")
    priority: int
    preemptible: bool
    may_share_gpu: bool = False
    deadline_s: float | None
    within: int | None = maybe("Index of the level in one domain of which it must lie; -1: there is no such level.")
    near: int | None = maybe("Index of the level in one domain of which it should lie.")
    work_s: float = said("All its work, in seconds on its smallest gang.", gt=0)
    progress: float = said("Share of it that is done.", ge=0, le=1)
    length_from: Literal["progress", "prediction", "time_limit", "assumed"]
    attained_gpu_s: float
    energy_j: float
    carbon_gco2: float
    gang: list[Share] | None = said("Its devices; a node is named by its index. Null while it waits.")
    sevenths: int | None = maybe("Size of the MIG slice that it asks for instead of GPUs.")
    memory_gib: float | None = maybe("Memory that the slice must have.")
    on_slice: int | None = maybe("Index of the slice that it holds.")


class LiveState(Message):
    """What a simulation of the present queue starts from."""

    at_s: float = said("Time of the snapshot, UTC seconds.")
    next_active_s: float = said("When the next active round is due.")
    round_interval_s: float
    policy: str = said("The policy in force.")
    parameters: dict[str, Any]
    zone: str
    signal: Signal
    stale: bool
    times_s: list[float] = said("When each step of the intensity begins.")
    intensity_gco2_per_kwh: list[float]
    end_s: float
    kinds: list[LiveKind]
    nodes: list[LiveNode]
    levels: list[str] = many("The levels of the network, narrowest first; none without a topology.")
    tenant_gpu_quota: dict[str, int] = said("The most that tenants may hold.", default_factory=dict)
    tenant_guarantees: dict[str, int] = said("GPUs that tenants are guaranteed.", default_factory=dict)
    windows: list[LiveWindow] = many("Reservations and maintenance that are not over.")
    slices: list[LiveSlice] = Field(default_factory=list[LiveSlice])
    profiles: list[LiveProfile]
    jobs: list[LiveJob]
    notes: list[str] = said("What was assumed or left out, in sentences.")


class EarlierRequest(Message):
    """Which of some jobs, each submitted in place of one that waits, would start earlier than that one."""

    state: LiveState
    job_id: str
    instead: list[LiveJob | None] = said("The job as it is, then with each change; null: it could run nowhere.")
    planned_s: float | None = maybe("When the policy plans to start the one that waits, if it can tell.")


class Earlier(Message):
    """The first that starts earlier, by the simulation that tells when jobs start."""

    change: int | None = maybe("Index into `instead`; null: none does.")
    starts_s: float | None = maybe("When it starts.")
    planned_s: float | None = maybe("When the one that waits starts; null: not within the horizon.")
