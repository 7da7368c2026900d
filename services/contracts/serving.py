"""Pools of model servers that are kept running: what an operator asks for, and how it stands.

A *pool* is one service: its requests may be served by instances in several *places*, each of a *mode* (so many GPUs of
one model, and the command that serves on them). Every half hour a *plan* says how many instances of which mode run
where and for which class of requests (FREESH, equation 1); instances are started and drained until they are as planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.background import WorkFailure, WorkState
from services.contracts.identity import Identity, Role
from services.contracts.jobs import Argument, EnvironmentName, LabelKey, LabelValue
from services.contracts.pools import (
    MAX_CLASSES,
    MAX_COLUMNS,
    MAX_LOCATIONS,
    MAX_MODES,
    MAX_PARTITIONS,
    ClassTerms,
    Objective,
    PoolsResult,
)
from services.contracts.queries import PageQuery
from services.contracts.schema import Instant, Int, Message, Name, Real, Text
from services.contracts.solver import SolveOptions
from services.core.domain.signal import Signal
from services.core.policies.freesh.classes import CLASSES
from services.core.policies.freesh.pools import NegativeRates
from services.core.profiles.traffic import WINDOW_S

PLANNER = Identity(tenant_id="installation", role=Role.USER, key_id="serving")
"""As whom serving asks the optimizer for the solves of plans. No tenant's key has this id."""
MAX_WINDOW_REQUESTS = 200_000
UrlPath = Annotated[str, StringConstraints(pattern=r"^/[^\s\x00]{0,500}$")]
MetricName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,199}$")]
Tokens = Annotated[int, Field(strict=True, ge=0, le=10**9)]


class PlanMode(StrEnum):
    """What becomes of plans."""

    AUTOMATIC = "automatic"
    """They are carried out."""
    FIXED = "fixed"
    """They are proposals: nothing is started or stopped until an operator applies one."""


class PoolPlace(Message):
    """Where instances may run: nodes of one grid zone."""

    name: Name
    zone: Name = Field(description="Grid zone of its nodes, and of its carbon intensity.")
    signal: Signal | None = Field(default=None, description="Of the intensity; null: the zone's own.")
    node_labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict[LabelKey, LabelValue], max_length=64, description="Only nodes that carry all of these."
    )
    gpus: dict[Name, Annotated[Int, Field(ge=0, le=1_000_000)]] | None = Field(
        default=None,
        max_length=50,
        description="The most it may take, by GPU model; null: all of its nodes that are up and take work.",
    )
    price_per_kwh: Real | None = Field(default=None, description="For the objective `cost`.")


class ServerMode(Message):
    """On what an instance runs, and how it is started.

    The process finds its port in `$WATTSHIFT_PORT` and sees its GPUs alone; it serves at the address of its node.
    """

    name: Name
    gpu_model: Name = Field(description="As nodes report it.")
    gpus: Int = Field(ge=1, le=1_024, description="Of one node.")
    command: list[Argument] = Field(default_factory=list[Argument], max_length=1_000)
    image: Text | None = Field(default=None, max_length=500)
    environment: dict[EnvironmentName, Argument] = Field(
        default_factory=dict[EnvironmentName, Argument], max_length=500
    )
    working_dir: Text | None = Field(default=None, max_length=4_096)
    idle_w: Real | None = Field(default=None, ge=0, le=1e7, description="As for `POST /v1/optimize/pools`.")
    start_wh: Real = Field(default=0, ge=0, le=1e6, description="Energy that a start costs.")
    stop_wh: Real = Field(default=0, ge=0, le=1e6, description="Energy that a stop costs, such as its drain.")

    @field_validator("working_dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("must be an absolute path")
        return value

    @model_validator(mode="after")
    def _has_something_to_run(self) -> Self:
        if not self.image and not (self.command and self.command[0]):
            raise ValueError("needs a command or a container image")
        return self


class PoolThresholds(Message):
    """Where long begins: a length equal to the threshold is long."""

    input_tokens: Int = Field(ge=1, le=10**9)
    output_tokens: Int = Field(ge=1, le=10**9)


class PoolPartition(Message):
    """A way to tell requests apart: by two thresholds into `SS`, `SL`, `LS` and `LL` (input first), or not at all."""

    name: Name
    thresholds: PoolThresholds | None = Field(default=None, description="Null: one class, of any name, for all.")
    classes: list[ClassTerms] = Field(min_length=1, max_length=MAX_CLASSES)
    assumed_qps: dict[Name, Annotated[Real, Field(ge=0, le=1e9)]] = Field(
        default_factory=dict[str, float],
        max_length=MAX_CLASSES,
        description="Demand by class, planned for until requests were reported for long enough to foretell it.",
    )

    @property
    def counted_as(self) -> str:
        """What its counts of requests stand under, `184,444` or the name of its one class: all that they depend on."""
        if self.thresholds is None:
            return self.classes[0].name
        return f"{self.thresholds.input_tokens},{self.thresholds.output_tokens}"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [each.name for each in self.classes]
        if self.thresholds is None and len(names) != 1:
            raise ValueError("without thresholds there is one class")
        if self.thresholds is not None and sorted(names) != sorted(CLASSES):
            raise ValueError(f"with thresholds the classes are {', '.join(CLASSES)}, each once")
        if unknown := sorted(set(self.assumed_qps) - set(names)):
            raise ValueError(f"assumed_qps names {unknown[0]}, which is not among the classes")
        for each in self.classes:
            if len({profile.mode for profile in each.profiles}) < len(each.profiles):
                raise ValueError(f"the profiles of class {each.name} name a mode twice")
        return self


class ServerProbes(Message):
    """How an instance is asked how it does, over HTTP at its own port."""

    health_path: UrlPath = Field(default="/health", description="Answers 2xx once it serves.")
    load_path: UrlPath | None = Field(
        default="/metrics",
        description="Prometheus text with the requests it holds; null: it drains by itself on SIGTERM.",
    )
    load_metrics: list[MetricName] = Field(
        default=["vllm:num_requests_running", "vllm:num_requests_waiting"],
        min_length=1,
        max_length=20,
        description="Their sum is the requests it holds.",
    )
    ready_timeout_s: Real = Field(default=600, gt=0, le=86_400, description="For loading a model.")
    unhealthy_timeout_s: Real = Field(default=60, gt=0, le=86_400, description="Silent so long, it is replaced.")
    drain_min_s: Real = Field(default=5, ge=0, le=3_600, description="For routers to hear that it is left.")
    drain_timeout_s: Real = Field(default=300, ge=0, le=86_400, description="Then it is stopped whatever it holds.")
    grace_s: Real = Field(default=30, ge=0, le=3_600, description="Between SIGTERM and SIGKILL.")


class PoolSpec(SolveOptions):
    """A pool as an operator wants it."""

    mode: PlanMode = PlanMode.AUTOMATIC
    objective: Objective = "carbon"
    negative_rates: NegativeRates = NegativeRates.FRUGAL
    gap: Real | None = Field(default=None, ge=0, le=1)
    head_room: Real = Field(default=1.1, gt=0, le=100, description="Alpha: serve so many times the demand.")
    min_up_s: Real = Field(default=0, ge=0, le=1e7, description="No instance is stopped before.")
    places: list[PoolPlace] = Field(min_length=1, max_length=MAX_LOCATIONS)
    modes: list[ServerMode] = Field(min_length=1, max_length=MAX_MODES)
    partitions: list[PoolPartition] = Field(min_length=1, max_length=MAX_PARTITIONS)
    probes: ServerProbes = ServerProbes()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for what in ("places", "modes", "partitions"):
            names = [each.name for each in getattr(self, what)]
            if len(set(names)) < len(names):
                raise ValueError(f"{what} name {next(name for name in names if names.count(name) > 1)} twice")
        modes = {mode.name for mode in self.modes}
        for part in self.partitions:
            if len(self.places) * len(part.classes) * len(modes) > MAX_COLUMNS:
                raise ValueError(f"partition {part.name} has more than {MAX_COLUMNS} combinations")
            for each in part.classes:
                for profile in each.profiles:
                    if profile.mode not in modes:
                        raise ValueError(f"class {each.name} of partition {part.name} names no mode: {profile.mode}")
        for place in self.places:
            if self.objective == "cost" and place.price_per_kwh is None:
                raise ValueError(f"the objective is cost, and place {place.name} has no price_per_kwh")
        return self


class PoolChange(Message):
    """What may be changed without saying the rest again."""

    mode: PlanMode


class InstanceState(StrEnum):
    """Where an instance stands."""

    WANTED = "wanted"
    """Planned; not with the scheduler yet."""
    STARTING = "starting"
    """It waits for GPUs, or loads its model."""
    READY = "ready"
    """It answers: requests may be sent to it."""
    DRAINING = "draining"
    """It ends what it holds; no more requests may be sent to it."""
    STOPPING = "stopping"
    """Its process is being ended."""
    ENDED = "ended"


LIVE_STATES = tuple(state for state in InstanceState if state is not InstanceState.ENDED)


class PoolInstance(Message):
    """A model server."""

    id: str
    pool: str
    state: InstanceState
    place: str
    mode: str
    partition: str | None = Field(default=None, description="Whose classes are meant.")
    request_class: str | None = Field(
        default=None, description="Which requests it is for; null: kept without, as it may not be stopped yet."
    )
    url: str | None = Field(default=None, description="Where it serves, once it runs.")
    job_id: str | None = Field(default=None, description="The job it runs as: its output, energy and emissions.")
    plan_id: str | None = Field(default=None, description="The plan that wanted it.")
    reason: str | None = Field(default=None, description="Why it waits, leaves or ended: a stable code.")
    detail: str | None = None
    created_at: Instant
    ready_at: Instant | None = None
    draining_at: Instant | None = None
    ended_at: Instant | None = None


class InstanceList(Message):
    """Instances, newest first."""

    items: list[PoolInstance]
    next_cursor: str | None = None


class Pool(Message):
    """A pool as it stands."""

    name: str
    tenant_id: str
    revision: int = Field(description="Counts changes of the spec.")
    spec: PoolSpec
    is_deleted: bool = Field(description="Its instances are being drained; then it is gone.")
    created_at: Instant
    updated_at: Instant
    plan_id: str | None = Field(description="The plan in force.")
    planned_at: Instant | None = Field(description="Since when it is.")
    is_plan_stale: bool = Field(description="Whether the plan in force was made for an earlier half hour.")
    instances: dict[InstanceState, int] = Field(description="How many there are, by state; those ended left out.")


class PoolList(Message):
    """Pools, by name."""

    items: list[Pool]
    next_cursor: str | None = None


class PlanOutcome(StrEnum):
    """What became of a plan."""

    APPLIED = "applied"
    PROPOSED = "proposed"
    """The pool is fixed: an operator may apply it."""
    LATE = "late"
    """There was no answer in time: the plan before it stays in force."""
    FAILED = "failed"
    """There was none at all: the plan before it stays in force."""
    SUPERSEDED = "superseded"
    """The pool was changed, or a newer plan applied, before it."""


class DemandForecast(Message):
    """The peak rates that were planned for, of one partition."""

    method: str
    is_assumed: bool = Field(description="Whether they are the spec's, for too little is known.")
    history_s: float = Field(description="How much of the past was known.")
    peaks_qps: dict[str, list[float]] = Field(description="By class, of each step.")
    left_out: dict[str, str] = Field(default_factory=dict[str, str], description="Forecasters, and why not they.")


class PlaceIntensity(Message):
    """The grid that was planned for, in one place."""

    zone: str
    signal: Signal
    provider: str
    method: str
    generated_at: Instant
    is_stale: bool
    gco2_per_kwh: list[float] = Field(description="Of each step.")


class PlanForecasts(Message):
    """What a plan was made from."""

    step_s: float
    demand: dict[str, DemandForecast] = Field(description="By partition.")
    intensity: dict[str, PlaceIntensity] = Field(description="By place.")
    gpus: dict[str, dict[str, int]] = Field(description="By place and model.")


class PoolPlanSummary(Message):
    """A plan for the half hour from `from_at` on."""

    id: str
    pool: str
    revision: int = Field(description="Of the spec it was made for.")
    trigger: Literal["clock", "request"]
    from_at: Instant
    deadline_at: Instant = Field(description="An answer after that is late.")
    state: WorkState
    submitted_at: Instant
    ended_at: Instant | None = None
    plan_s: float | None = Field(default=None, description="Forecasts and solving together.")
    outcome: PlanOutcome | None = Field(default=None, description="Null until it is decided.")
    decided_at: Instant | None = None
    failure: WorkFailure | None = None


class PoolPlanList(Message):
    """Plans, newest first."""

    items: list[PoolPlanSummary]
    next_cursor: str | None = None


class PoolPlanResult(Message):
    """What a worker answers."""

    forecasts: PlanForecasts
    plan: PoolsResult = Field(description="`starts` and `stops` are those against the instances of that moment.")


class PoolPlanDetail(PoolPlanSummary):
    """A plan whole."""

    result: PoolPlanResult | None = None


class PlanQuery(PageQuery):
    """Which plans to list."""

    outcome: list[PlanOutcome] = Field(default_factory=list[PlanOutcome], description="Any of these; repeatable.")


class InstanceQuery(PageQuery):
    """Which instances to list."""

    state: list[InstanceState] = Field(
        default_factory=lambda: list(LIVE_STATES), description="Any of these; repeatable. Those ended only if asked."
    )


class TrafficWindow(Message):
    """All requests that one source saw arrive within 5 seconds."""

    start_at: Instant = Field(description="A whole multiple of 5 seconds of UTC.")
    requests: list[tuple[Tokens, Tokens]] = Field(
        max_length=MAX_WINDOW_REQUESTS, description="Input and output tokens of each."
    )

    @field_validator("start_at")
    @classmethod
    def _aligned(cls, value: datetime) -> datetime:
        if value.timestamp() % WINDOW_S:
            raise ValueError(f"must be a whole multiple of {WINDOW_S:g} seconds of UTC")
        return value


class TrafficReport(Message):
    """Requests as a router saw them. A window said again replaces what was said of it, so that nothing counts twice."""

    source: Name = Field(description="Who saw them: of two sources both count.")
    windows: list[TrafficWindow] = Field(min_length=1, max_length=1_440)

    @field_validator("windows")
    @classmethod
    def _once(cls, windows: Sequence[TrafficWindow]) -> Sequence[TrafficWindow]:
        if len({window.start_at for window in windows}) < len(windows):
            raise ValueError("name a window twice")
        if sum(len(window.requests) for window in windows) > MAX_WINDOW_REQUESTS:
            raise ValueError(f"have more than {MAX_WINDOW_REQUESTS} requests in all")
        return windows


class TrafficReceipt(Message):
    """The windows are in the database, flushed to disk."""

    windows: int
    requests: int
