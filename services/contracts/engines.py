"""What the bridge to an engine, such as Slurm, and the control plane exchange.

An engine is whatever a site uses to run jobs. Its bridge is a node of its own, with a node's credential and stream of
commands, but without GPUs: it reports the engine's nodes and jobs, and carries out decisions on those jobs that it may
steer. Both are levels, not edges: a report says what state a job is in, a decision what state it should be in, so that
either may be repeated, and the newest counts. ``revision`` says which decision a report follows.
"""

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from services.contracts.nodes import Count, DeviceIndex, EnergyInterval, Reading
from services.contracts.schema import Instant, Message, Name, NodeMessage, Text, is_empty, is_none, many, maybe, said
from services.core.domain.signal import Signal

OURS = "wattshift"  #: The engine of jobs and nodes that agents of this control plane look after

ENGINE_LABEL = "engine"  #: The label of a job that says which engine runs it

QUEUEING = frozenset({"slurm", "kueue"})
"""Engines with a queue of their own: who starts first when GPUs are free is theirs to say, by their users' priorities,
quotas and limits. A plan holds and stops their jobs for greener hours, and sets sizes, and no more."""

MAX_JOBS_OF_A_REPORT = 1_000
Comment = Annotated[Text, Field(max_length=500)]
_ODD = re.compile(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]")


def _model_name(given: str) -> str:
    return _ODD.sub("-", given).lstrip("-") or "GPU"


GpuModelName = Annotated[Text, Field(max_length=63), AfterValidator(_model_name)]
"""As the engine's site calls a model; what a name of ours cannot have is a dash, as everybody reads it among nodes."""
ExternalId = Annotated[Text, Field(min_length=1, max_length=200)]


class Places(StrEnum):
    """Who chooses the nodes of a job."""

    OURS = "ours"  #: The plan: exact devices
    THEIRS = "theirs"  #: The engine: a plan is sizes and moments, and what the engine did is compared with it


class EngineMode(StrEnum):
    """Whether decisions are carried out."""

    DRY_RUN = "dry_run"  #: Nothing of the engine is changed; what would have been done is counted
    CONTROL = "control"


class EngineJobState(StrEnum):
    """State of a job, as its engine has it."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    MISSING = "missing"
    """The engine knows it no more, and its accounting does not say how it ended."""

    @property
    def is_over(self) -> bool:
        """Whether it neither waits nor runs."""
        return self not in (EngineJobState.PENDING, EngineJobState.RUNNING)


class EngineShare(NodeMessage):
    """What a job holds on one node of the engine."""

    node: Name
    devices: list[DeviceIndex] = Field(max_length=1_024)


class EngineJob(NodeMessage):
    """A job that asks for GPUs."""

    external_id: ExternalId = said("Of no other job of this engine, ever.")
    number: Text = said("As the engine's users know it.", max_length=100)
    name: Text = Field(max_length=200)
    user: Text = Field(max_length=100)
    account: Text = Field(default="", max_length=200)
    queue: Text = Field(default="", max_length=200)
    state: EngineJobState
    steered: bool = said("Whether decisions on it are carried out; if not, it is only accounted for.")
    why_not: Text = said("Why it is left alone.", default="", max_length=200)
    blocked: Text = said(
        "Of one that waits: what else than GPUs its engine does not start it for; it takes none in plans.",
        default="",
        max_length=200,
    )
    stoppable: bool = said("Whether it may be stopped, to run again later.", default=False)
    shrinkable: bool = said("Whether, as it runs, it may lose GPUs without being stopped.", default=False)
    gpus: int = Field(ge=1, le=65_536)
    max_gpus: int | None = maybe("By default `gpus`: it has one size.", ge=1, le=65_536)
    step_gpus: int = Field(default=1, ge=1, le=65_536)
    asked_gpus: int | None = maybe("What its user asked for, one of those sizes. By default `gpus`.", ge=1, le=65_536)
    gpu_model: GpuModelName | None = None
    time_limit_s: float | None = Field(default=None, gt=0, le=1e9)
    deadline: Instant | None = maybe("By when its user wants it to be done.")
    submitted_at: Instant
    started_at: Instant | None = None
    ended_at: Instant | None = None
    requeues: Count | None = maybe("How often it has begun to wait again; null where its engine does not count.", ge=0)
    rolled_back: bool = said(
        "Set here: since then its engine has shown an older state, in which that run is not over.", default=False
    )
    exit_code: Count | None = None
    shares: list[EngineShare] = Field(default_factory=list[EngineShare], max_length=16_384)
    detail: Text = Field(default="", max_length=500)
    revision: int = said("Of the last decision that was carried out; 0: of none.", default=0, ge=0, lt=2**63)
    refused: Text = said("Why that decision could not be carried out.", default="", max_length=500)


class EngineNode(NodeMessage):
    """A node of the engine that has GPUs."""

    name: Name
    gpus: int = Field(ge=1, le=1_024)
    gpu_model: GpuModelName
    memory_gib: Reading = Field(gt=0)
    queues: list[Text] = Field(max_length=1_000)
    closed: Text | None = maybe("Why it takes no new work; null while it does.", max_length=500)
    zone: Name | None = maybe("Its grid zone; by default the report's.")


class ZoneStep(NodeMessage):
    """A grid's carbon intensity from one moment until the next step."""

    start_at: Instant
    gco2_per_kwh: float


class ZoneOutlook(NodeMessage):
    """A grid zone's expected carbon intensity: steps in order of time, the last of which continues."""

    zone: Name
    signal: Signal
    steps: list[ZoneStep] = Field(min_length=1, max_length=1_000)

    def mean(self, start_s: float, end_s: float) -> float:
        """Return the mean intensity, gCO2/kWh, between two moments, UTC seconds; the first step applies earlier too."""
        import numpy as np  # here: the agents that read these contracts are installed without NumPy

        from services.core.domain.carbon import CarbonCurve

        times_s = np.array([each.start_at.timestamp() for each in self.steps])
        values = np.array([each.gco2_per_kwh for each in self.steps])
        return CarbonCurve(times_s, values, float(times_s[-1]) + 1.0).mean(start_s, end_s)


class EngineReport(NodeMessage):
    """The state of an engine, sent at every look, with the jobs that have changed since the last report."""

    boot_id: Text = Field(max_length=64)
    kind: Literal["slurm", "kueue", "ray"]
    version: Text = Field(default="", max_length=100)
    places: Places = Places.THEIRS
    mode: EngineMode
    queues: list[Text] = many("Those that are steered.", max_length=1_000)
    orders: bool = said("Whether its site lets plans say in which order released jobs start.", default=False)
    problem: Text | None = maybe("Why the engine could not be read; then nothing else is said of it.", max_length=500)
    zone: Name | None = None
    nodes: list[EngineNode] | None = maybe("All of them; null: as before, which keeps their leases.", max_length=16_384)
    jobs: list[EngineJob] = Field(default_factory=list[EngineJob], max_length=MAX_JOBS_OF_A_REPORT)
    present: list[ExternalId] | None = maybe(
        "All jobs that wait or run; the answer names those not among them.", max_length=1_000_000
    )
    wants_decisions: bool = said("Whether the answer is to repeat what is decided.", default=False)
    wants_outlooks: list[Name] = many(
        "Grid zones of which the answer is to say what they will emit.",
        max_length=100,
        exclude_if=is_empty,
    )


class EngineAction(StrEnum):
    """What should happen to a job."""

    HOLD = "hold"  #: It waits, until it is released or the hold expires
    RELEASE = "release"
    REQUEUE = "requeue"
    """It is stopped, and waits on hold; one that has not started is put on hold."""
    SHRINK = "shrink"  #: It runs on, on fewer GPUs; only of a job that is reported to be shrinkable
    CANCEL = "cancel"


class EngineDecision(NodeMessage):
    """What is decided about a job."""

    external_id: ExternalId
    revision: int = Field(ge=1)
    action: EngineAction
    gpus: int | None = maybe("The size to start it at, null: as it was submitted; or to shrink it to.", ge=1)
    zone: Name | None = maybe("The grid zone that it was planned in, if it is one.")
    until: Instant | None = maybe("When it is expected to start.")
    grace_s: float = said("Between the job's own signal and its stop.", default=0.0, ge=0, le=86_400)
    note: Comment = said("For the engine's users, in the job's comment.", default="")
    gco2: float | None = maybe(
        "What its run is expected to emit, grams; null where that cannot be told.", exclude_if=is_none
    )


class EngineReply(NodeMessage):
    """The answer to a report, which is on disk by then."""

    unreported: list[str] = many("Jobs not over that `present` did not name.")
    ended: list[str] = many("Jobs of the report that wait or run, of which that very run has ended already.")
    stopped: list[str] = many("Jobs of the report that run, of which that run was stopped: they have waited since.")
    decisions: list[EngineDecision] = Field(default_factory=list[EngineDecision])
    outlooks: list[ZoneOutlook] = many("Those that are known of the zones that it was asked for.", exclude_if=is_empty)
    order: list[str] = many(
        "Where the engine `orders`, and has reported its nodes: released jobs that wait, first those to start first.",
        exclude_if=is_empty,
    )


class Direct(NodeMessage):
    """The command to a bridge: decisions; for each job, the newest revision is in force."""

    type: Literal["direct"] = "direct"
    decisions: list[EngineDecision]


direct_adapter: TypeAdapter[Direct] = TypeAdapter(Direct)


class EngineEnergyReport(NodeMessage):
    """Energy of one of the engine's nodes; `allocation_id` of a usage is the external id of a job, null when idle."""

    node: Name
    intervals: list[EnergyInterval] = Field(max_length=1_000)


class EngineSavings(Message):
    """What a dry run would have saved on the jobs that ended on one UTC day.

    A job that the last plan before its start held back would have run as it did, only that much later; every other one
    exactly as it did.
    """

    jobs: int = said("Jobs that ran, and ended on this day.")
    unplanned: int = said("Of these, that began before any plan knew them; taken as they ran.")
    later: int = said("That would have begun later.")
    later_h: float | None = said("How much later in all, hours; null: no job was planned.")
    unmeasured: int = said("Without energy in the ledger: they are in neither sum of emissions.")
    unpriced: int = said(
        "With energy, but without intensities of the hours in which they would have run, as these are not "
        "over yet or unknown: they are in neither sum of emissions."
    )
    carbon_gco2: float | None = said("What the others emitted, by the ledger; null: there are none.")
    would_carbon_gco2: float | None = said(
        "What these would have emitted, with the same energy in the hours in which they would have run."
    )
    settled: bool = said("Whether it is final; until then it is recomputed as energy and hours come in.")


class EngineDay(Message):
    """How often each thing happened on one UTC day."""

    day: str
    counts: dict[str, int]
    savings: EngineSavings | None = maybe("Of a dry run, computed when the day is over; null: no job ended on it.")


class EngineDays(Message):
    """The days of an engine on which anything happened, newest first."""

    items: list[EngineDay]


class EngineWaiting(Message):
    """A job that waits in its engine."""

    number: str = said("As the engine's users know it.")
    name: str
    user: str
    queue: str
    gpus: int
    steered: bool
    waits_for: str = said("What else than GPUs or its hour it waits for, or why it is left alone.")
    held_until: Instant | None = said(
        "Until when it is held for a greener hour, or would be if this were no dry run; null: it is not."
    )
    saves_gco2: float | None = said(
        "How much less its run is expected to emit then than if it began now; null where that is unknown."
    )


class EngineHours(Message):
    """GPU hours of jobs that were alike in whether they were steered."""

    why_not: str = said('Why their jobs were left alone; "": they were steered.')
    gpu_h: float


class EngineJobList(Message):
    """The jobs of an engine that wait, and what of its work can be steered."""

    items: list[EngineWaiting] = said("At most 1,000; those that are held back longest come first.")
    hours: list[EngineHours] = said("Of the last seven days, most first.")


class Engine(Message):
    """An engine and how it is steered, as operators see it."""

    name: str
    kind: str
    version: str
    places: Places
    mode: EngineMode
    queues: list[str] = said("Those that are steered; none: all.")
    problem: str | None = maybe("Why its bridge cannot read it; null while it can.")
    reported_at: Instant
    heard: bool = said("Whether its bridge's lease holds.")
    nodes: int
    gpus: int
    gpus_in_use: int
    jobs: dict[str, int] = said("Jobs that are not over, by state.")
    unfollowed: int = said("Decisions that the bridge has not carried out yet.")
    days: list[EngineDay] = said("The last seven days with anything to tell, newest first.")


class EngineList(Message):
    """The engines that the site has."""

    items: list[Engine]


Json = dict[str, Any]


def node_name(engine: str, node: str) -> str:
    """Return the id under which an engine's node is known, which is never that of a host with an agent."""
    return closest_name(f"{engine}.{node}")


def closest_name(given: str) -> str:
    """Return the name that is closest to how others call a node, with dashes for what names cannot have.

    One that is longer than names are ends in a hash of the whole in place of what is beyond.
    """
    name = _ODD.sub("-", given).lstrip("-") or "node"
    return name if len(name) <= 63 else f"{name[:54]}-{hashlib.sha256(given.encode(errors='replace')).hexdigest()[:8]}"
