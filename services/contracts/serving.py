"""Pools of model servers: what an operator asks for, and their state.

A *pool* serves one kind of request with instances in several *places*. Each instance has a *mode*: a number of GPUs of
one model, and the command to run on them. Every half hour, or more often, a *plan* says how many instances of which
mode run where, and for which class of requests (FREESH, equation 1). Instances are then started and drained as planned.
"""

import operator
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts import pools
from services.contracts.background import WorkFailure, WorkState
from services.contracts.clocks import ClockPolicy, PoolClocks
from services.contracts.clusters import Workload
from services.contracts.identity import Identity, Role
from services.contracts.jobs import Argument, LabelKey, LabelValue
from services.contracts.nodes import ClockMinute, Listener
from services.contracts.queries import PageQuery
from services.contracts.routing import AccuracyPct, ModelName
from services.contracts.schema import (
    LEAST,
    Flag,
    Instant,
    Int,
    Message,
    Name,
    Page,
    Real,
    Text,
    check_once,
    many,
    maybe,
    said,
)
from services.contracts.secrets import EnvironmentName
from services.contracts.solver import SolveOptions
from services.contracts.sources import AbsolutePath
from services.core.domain import serving
from services.core.domain.signal import Signal

PLANNER = Identity(tenant_id="installation", role=Role.USER, key_id="serving")
"""The identity with which serving asks the optimizer to solve plans. No tenant has a key with this id."""
MAX_WINDOW_REQUESTS = 200_000
UrlPath = Annotated[str, StringConstraints(pattern=r"^/[^\s\x00]{0,500}$")]
MetricName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,199}$")]
Tokens = Annotated[int, Field(strict=True, ge=0, le=10**9)]


class PlanMode(StrEnum):
    """What happens to a pool's plans."""

    AUTOMATIC = "automatic"  #: They are carried out
    FIXED = "fixed"  #: They are only proposed: nothing is started or stopped until an operator applies one


class GridNodes(Message):
    """Nodes of one grid zone."""

    zone: Name = said("Grid zone of the nodes and of the carbon intensity.")
    signal: Signal | None = maybe("Signal of the carbon intensity; null for the zone's default.")
    node_labels: dict[LabelKey, LabelValue] = said(
        "Only nodes that have all of these labels.", default_factory=dict[LabelKey, LabelValue], max_length=64
    )

    @property
    def grid(self) -> tuple[str, str | None]:
        """The zone, and the signal's name unless it is the zone's default."""
        return self.zone, self.signal and str(self.signal)


class PoolPlace(GridNodes):
    """Nodes of one grid zone where instances may run."""

    name: Name
    gpus: dict[Name, Annotated[Int, Field(ge=0, le=1_000_000)]] | None = maybe(
        "Maximum number of GPUs by model; null for all GPUs of the nodes that are up and not drained.", max_length=50
    )
    price_per_kwh: Real | None = maybe("Price of electricity, for the objective `cost`.")
    cluster: Name | None = maybe(
        "Kubernetes cluster whose workloads are scaled, by the name that its process has; null for nodes with agents. "
        "Its `gpus` are what the pool may have there.",
        exclude_if=operator.not_,
    )


class ServerProcess(Message):
    """How an instance is started."""

    command: list[Argument] = Field(default_factory=list[Argument], max_length=1_000)
    image: Text | None = Field(default=None, max_length=500)
    environment: dict[EnvironmentName, Argument] = Field(
        default_factory=dict[EnvironmentName, Argument], max_length=500
    )
    working_dir: AbsolutePath | None = Field(default=None, max_length=4_096)

    @model_validator(mode="after")
    def _has_something_to_run(self) -> Self:
        if not self._runs_something():
            raise ValueError("needs a command or a container image")
        return self

    def _runs_something(self) -> bool:
        return bool(self.image or (self.command and self.command[0]))


class ServerMode(ServerProcess):
    """The GPUs that an instance runs on, and how it is started.

    The process must listen on port `$WATTSHIFT_PORT` at the address of its node. It sees its own GPUs only.
    """

    name: Name
    gpu_model: Name = said("GPU model, as nodes report it.")
    gpus: Int = said("Number of GPUs, all on one node.", ge=1, le=1_024)
    accuracy_pct: AccuracyPct | None = maybe(
        "Accuracy of the variant of the model that it runs; null where all modes run the same."
    )
    idle_w: Real | None = maybe(
        "Power without requests. If it is stated, an instance is planned to draw between this and the "
        "power of its profile in proportion to its load; if not, its profile's power whatever its load.",
        ge=0,
        le=1e7,
    )
    start_s: Real = said("Time from the start of an instance until it serves requests.", default=120, ge=0, le=86_400)
    stop_s: Real = said("Time that stopping an instance takes.", default=10, ge=0, le=86_400)
    start_wh: Real | None = maybe(
        "Energy of starting an instance; by default the highest power in any of its profiles for `start_s`.",
        ge=0,
        le=1e6,
    )
    stop_wh: Real | None = maybe(
        "Energy of stopping an instance, including its drain; by default the highest power in any of its "
        "profiles for `stop_s`.",
        ge=0,
        le=1e6,
    )
    max_requests: Int = said(
        "Requests that the router gives an instance at once; others wait.", default=64, ge=1, le=100_000
    )
    workload: Workload | None = maybe(
        "In a Kubernetes cluster, in place of a command and an image: what is scaled.", exclude_if=operator.not_
    )

    def _runs_something(self) -> bool:
        if self.workload is not None and super()._runs_something():
            raise ValueError("its workload says what it runs: leave out command and image")
        return self.workload is not None or super()._runs_something()


class PoolThresholds(Message):
    """The numbers of tokens from which a request counts as long."""

    input_tokens: Int = Field(ge=1, le=10**9)
    output_tokens: Int = Field(ge=1, le=10**9)


class PoolPartition(Message):
    """A way to divide requests into classes: one class, or `SS`, `SL`, `LS` and `LL` (input first) by thresholds."""

    name: Name
    thresholds: PoolThresholds | None = maybe("Null for a single class, which may have any name.")
    classes: list[pools.ClassTerms] = Field(min_length=1, max_length=pools.MAX_CLASSES)
    assumed_qps: dict[Name, Annotated[Real, Field(ge=0, le=1e9)]] = said(
        "Demand by class, to plan for until enough requests have been reported to predict it.",
        default_factory=dict[str, float],
        max_length=pools.MAX_CLASSES,
    )

    @property
    def counted_as(self) -> str:
        """The key of its request counts: the thresholds (`184,444`) or the name of its only class."""
        if self.thresholds is None:
            return self.classes[0].name
        return f"{self.thresholds.input_tokens},{self.thresholds.output_tokens}"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [each.name for each in self.classes]
        if self.thresholds is None and len(names) != 1:
            raise ValueError("without thresholds there must be exactly one class")
        if self.thresholds is not None and sorted(names) != sorted(serving.CLASSES):
            raise ValueError(f"with thresholds the classes must be {', '.join(serving.CLASSES)}, each once")
        if unknown := sorted(set(self.assumed_qps) - set(names)):
            raise ValueError(f"assumed_qps names {unknown[0]}, which is not among the classes")
        for each in self.classes:
            check_once(
                (profile.mode for profile in each.profiles), f"the profiles of class {each.name} name a mode twice"
            )
        return self


class ServerProbes(Message):
    """How an instance's health and load are read, over HTTP at its own port."""

    health_path: UrlPath = said("Path that answers 2xx once the instance serves requests.", default="/health")
    load_path: UrlPath | None = said(
        "Path of Prometheus metrics with the number of requests; null if the instance drains by itself on SIGTERM.",
        default="/metrics",
    )
    load_metrics: list[MetricName] = said(
        "Metrics whose sum is the number of requests that the instance holds.",
        default=["vllm:num_requests_running", "vllm:num_requests_waiting"],
        min_length=1,
        max_length=20,
    )
    ready_timeout_s: Real = said(
        "Maximum time until an instance is ready; it covers loading the model.", default=600, ge=LEAST, le=86_400
    )
    unhealthy_timeout_s: Real = said(
        "An instance that has not answered for this long is replaced.", default=60, ge=LEAST, le=86_400
    )
    drain_min_s: Real = said("Minimum time that an instance drains, so that routers notice.", default=5, ge=0, le=3_600)
    drain_timeout_s: Real = said(
        "Maximum time that an instance drains; then it is stopped even if it holds requests.",
        default=300,
        ge=0,
        le=86_400,
    )
    grace_s: Real = said("Time between SIGTERM and SIGKILL.", default=30, ge=0, le=3_600)


class PoolSpec(SolveOptions):
    """A pool as specified by an operator."""

    mode: PlanMode = PlanMode.AUTOMATIC
    objective: pools.Objective = "carbon"
    negative_rates: serving.NegativeRates = serving.NegativeRates.FRUGAL
    gap: Real | None = Field(default=None, ge=0, le=1)
    head_room: Real = said(
        "Factor by which the planned capacity exceeds the demand (alpha in the paper).", default=1.1, ge=LEAST, le=100
    )
    plan_every_min: Annotated[Int, Field(ge=5, le=30, multiple_of=5)] | None = maybe(
        "How often the pool is planned, in minutes: 5, 10, 15, 20, 25 or 30; each plan is for the time "
        "until the next. Null for the installation's interval, half an hour by default."
    )
    demand_quantile: Real = said(
        "Share of the steps in which the planned capacity should suffice for each class's demand.",
        default=serving.SERVICE,
        ge=serving.LEAST_SERVICE,
        le=serving.MOST_SERVICE,
    )
    min_up_s: Real = said("Minimum time that an instance runs before it may be stopped.", default=0, ge=0, le=1e7)
    places: list[PoolPlace] = Field(min_length=1, max_length=pools.MAX_LOCATIONS)
    regions: list[pools.ClientRegion] = many(
        "Regions of clients. Requests are planned only for places where the limits of their class hold "
        "with the network's time on top; none if the network does not matter.",
        max_length=serving.MAX_REGIONS,
    )
    modes: list[ServerMode] = Field(min_length=1, max_length=pools.MAX_MODES)
    partitions: list[PoolPartition] = Field(min_length=1, max_length=pools.MAX_PARTITIONS)
    probes: ServerProbes = ServerProbes()
    clocks: PoolClocks = PoolClocks()
    accuracy_gco2_per_kwh: Real | None = maybe(
        "What a percentage point of its modes' accuracy is worth: the carbon intensity at which a request "
        "is given to a variant that is a point less accurate and needs no energy. Null: nothing, so that the cleanest "
        "variant that a request may have answers.",
        ge=0,
        le=1e6,
    )
    models: list[ModelName] = many("Names of the model that the router serves by this pool.", max_length=100)
    fallback: list[ModelName] = many(
        "Models that the router asks for instead, in this order, while no instance of the pool answers.", max_length=10
    )
    tenants: list[Name | Literal["*"]] = many(
        "Other tenants whose keys may use the models; `*` for all.", max_length=1_000
    )
    tokenizer: Text | None = maybe(
        "Path of the model's `tokenizer.json` on the router's machine; null to estimate tokens.", max_length=4_096
    )

    passes_priority: Flag = said(
        "Whether the router sends `priority` with each request, for servers that are started with "
        "`--scheduling-policy priority`; others refuse it.",
        default=False,
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_once(self.models, "models name {} twice")
        if own := sorted(set(self.models) & set(self.fallback)):
            raise ValueError(f"fallback names {own[0]}, which is a model of the pool itself")
        for what in ("places", "modes", "partitions", "regions"):
            check_once((each.name for each in getattr(self, what)), f"{what} name {{}} twice")
        self._fits_clusters()
        places = {place.name for place in self.places}
        for region in self.regions:
            if unknown := sorted(region.network_ms.keys() - places):
                raise ValueError(f"network_ms of region {region.name} names no place: {unknown[0]}")
        modes = {mode.name for mode in self.modes}
        for part in self.partitions:
            if len(self.places) * len(part.classes) * len(modes) > pools.MAX_COLUMNS:
                raise ValueError(f"partition {part.name} has more than {pools.MAX_COLUMNS} combinations")
            for each in part.classes:
                for profile in each.profiles:
                    if profile.mode not in modes:
                        raise ValueError(f"class {each.name} of partition {part.name} names no mode: {profile.mode}")
                if self.clocks.policy is not ClockPolicy.DEFAULT and each.latency_limits() == serving.LatencyLimits():
                    raise ValueError(
                        f"clocks follow the limits of each class, and class {each.name} of partition {part.name} has "
                        "none: give it max_ttft_ms, max_tbt_ms or max_latency_s, or set the clocks' policy to default"
                    )
        for place in self.places:
            if self.objective == "cost" and place.price_per_kwh is None:
                raise ValueError(f"the objective is cost, and place {place.name} has no price_per_kwh")
        return self

    def _fits_clusters(self) -> None:
        clusters = [place.cluster for place in self.places if place.cluster is not None]
        workloads = [str(mode.workload) for mode in self.modes if mode.workload is not None]
        if not clusters and not workloads:
            return
        if (len(clusters), len(workloads)) != (len(self.places), len(self.modes)):
            raise ValueError("either all places have a cluster and all modes a workload, or none has")
        check_once(clusters, "places name the cluster {} twice")
        check_once(workloads, "modes name the workload {} twice")
        if unknown := [place.name for place in self.places if place.gpus is None]:
            raise ValueError(f"place {unknown[0]} is a cluster: say by `gpus` how many the pool may have there")
        if self.clocks.policy is not ClockPolicy.DEFAULT:
            raise ValueError("nobody sets the clocks of a cluster's GPUs: set the clocks' policy to default")

    @property
    def plan_steps(self) -> int:
        """How many steps of five minutes a plan covers."""
        return serving.STEPS_AHEAD if self.plan_every_min is None else self.plan_every_min * 60 // int(serving.STEP_S)

    def switching_wh(self, mode: ServerMode) -> tuple[float, float]:
        """Return the energy to start and to stop an instance, Wh: as stated, or full power for the time it takes."""
        classes = (each for part in self.partitions for each in part.classes)
        powers_w = [profile.power_w for each in classes for profile in each.profiles if profile.mode == mode.name]
        full_w = max(powers_w, default=0.0)
        start_wh = full_w * mode.start_s / 3_600 if mode.start_wh is None else mode.start_wh
        return start_wh, full_w * mode.stop_s / 3_600 if mode.stop_wh is None else mode.stop_wh


class PoolChange(Message):
    """What can be changed without sending the whole spec."""

    mode: PlanMode


class InstanceState(StrEnum):
    """State of an instance."""

    WANTED = "wanted"  #: It is planned, but its job has not been submitted yet
    STARTING = "starting"  #: It waits for GPUs or loads its model
    READY = "ready"  #: Requests can be sent to it
    DRAINING = "draining"  #: It finishes the requests it holds; no more may be sent to it
    STOPPING = "stopping"  #: Its process is being stopped
    ENDED = "ended"


LIVE_STATES = tuple(state for state in InstanceState if state is not InstanceState.ENDED)


class InstanceClock(Message):
    """The clock of an instance's GPUs now."""

    policy: ClockPolicy = said(
        "By which it is decided; `default` where no router's reports ask for a clock at the moment."
    )
    dry_run: bool = said("Whether `wanted_mhz` is only said, and not set.", default=False)
    clock_mhz: int | None = maybe("As measured, the lowest of its GPUs; null where they do not report it.")
    wanted_mhz: int | None = maybe("The clock that the latency of its requests asks for.")
    exceeded_share: float | None = maybe(
        "Share of the seconds of the newest minute whose reports exceeded a limit, 0 to 1."
    )
    unobserved_share: float | None = maybe(
        "Share of the seconds of the newest minute in which requests were in service and nothing was seen "
        "of them, so that the clock was kept, 0 to 1."
    )
    model_error: float | None = maybe("Mean relative error of the learned model; null while there is none.")
    unused: str | None = maybe("Why MIAD decides in place of the learned model.")


class InstancePod(Message):
    """The pod that an instance is, or waits for."""

    uid: str | None = None
    name: str | None = maybe("Null while it has none.")
    ordinal: int = said("Of a group of a LeaderWorkerSet: its number.", default=0)
    url: str | None = maybe("Where it takes requests; null while it takes none.")
    since: Instant = said("Since when it takes requests, or waits, or has been gone.")
    reason: str | None = maybe("Why it takes none.")
    detail: str | None = None
    is_gone: bool = said("Whether the instance that was stopped has no pod any more.", default=False)


class InstanceClockMinute(ClockMinute):
    """The clocks of one instance in one minute."""

    instance: str
    job_id: str


class ClockHistory(Page[InstanceClockMinute]):
    """Minutes of clocks, newest first."""


class ClockHistoryQuery(PageQuery):
    """Which minutes of which clocks."""

    instance: Name | None = maybe("Only those of this instance.")
    since: Instant | None = maybe("Only minutes that begin at or after this time.")
    until: Instant | None = maybe("Only minutes that begin before this time.")


class AnyInstance(Message):
    """What there is to say of an instance, whatever it runs."""

    id: str
    state: InstanceState
    url: str | None = maybe("Address at which it serves, once it runs.")
    job_id: str | None = maybe("The job that it runs as, which has its output, energy and emissions.")
    reason: str | None = maybe("Stable code of why it waits, drains or ended.")
    detail: str | None = None
    created_at: Instant
    ready_at: Instant | None = None
    draining_at: Instant | None = None
    ended_at: Instant | None = None


class PoolInstance(AnyInstance):
    """A model server."""

    pool: str
    place: str
    mode: str
    partition: str | None = maybe("The partition that the class belongs to.")
    request_class: str | None = maybe(
        "Class of requests that it serves; null if it is kept without requests because it may not be stopped yet."
    )
    plan_id: str | None = maybe("The plan that asked for it.")
    listener: Listener | None = maybe(
        "Who listens on its port, as its node sees it: `own`, `none`, `foreign`, or `unchecked` where the "
        "agent may not look; null where the node does not say."
    )
    checks_key: bool | None = maybe(
        "Whether its server refuses requests without the key that it was given; null while that is not "
        "known, and for instances without a key."
    )
    clock: InstanceClock | None = maybe("Null unless it runs on a node that is up.")
    pod: InstancePod | None = maybe("In a Kubernetes cluster: its pod, as the cluster last said.")


class InstanceList(Page[PoolInstance]):
    """Instances, newest first."""


class Pool(Message):
    """A pool and its current state."""

    name: str
    tenant_id: str
    revision: int = said("Counts the changes of the spec.")
    spec: PoolSpec
    is_deleted: bool = said("Whether the pool is being deleted: it is removed when its instances have been drained.")
    created_at: Instant
    updated_at: Instant
    plan_id: str | None = said("The current plan.")
    planned_at: Instant | None = said("When the current plan was applied.")
    is_plan_stale: bool = said("Whether the current plan was made for an earlier interval.")
    instances: dict[InstanceState, int] = said("Number of instances by state, without those that have ended.")


class PoolList(Page[Pool]):
    """Pools, by name."""


class PlanOutcome(StrEnum):
    """What happened to a plan."""

    APPLIED = "applied"
    PROPOSED = "proposed"  #: It waits for an operator to apply it, as the pool's mode is `fixed`
    LATE = "late"  #: It was not ready in time; the previous plan remains
    FAILED = "failed"  #: It could not be made; the previous plan remains
    SUPERSEDED = "superseded"  #: The pool was changed or a newer plan was applied first


class PlanTrigger(StrEnum):
    """Why a plan was made."""

    CLOCK = "clock"  #: It was due
    REQUEST = "request"  #: An operator asked for it
    NODE_LOST = "node_lost"  #: A place has fewer GPUs than the plan before knew
    NODE_BACK = "node_back"  #: A place has more GPUs than the plan before knew
    SHORTFALL = "shortfall"  #: The instances that were planned do not fit any more: others have taken the GPUs
    GPUS_FREED = "gpus_freed"  #: The plan before lacked GPUs, and others have released some
    DEMAND = "demand"  #: More requests arrive than the plan before has capacity for
    INTENSITY = "intensity"  #: The carbon intensity is far from what the plan before was made for
    GRID_ORDER = "grid_order"  #: An order of the grid has begun or ended in one of its places


EVENTS = frozenset(PlanTrigger) - {PlanTrigger.CLOCK, PlanTrigger.REQUEST}
RESCUES = frozenset({PlanTrigger.NODE_LOST, PlanTrigger.SHORTFALL, PlanTrigger.GRID_ORDER})
"""Events after which planned instances have nowhere to run."""


class DemandForecast(Message):
    """The predicted peak rates of one partition."""

    method: str
    is_assumed: bool = said(
        "Whether they are the `assumed_qps` of the spec, because too little traffic has been reported."
    )
    history_s: float = said("Length of the traffic history that was known.")
    peaks_qps: dict[str, list[float]] = said("Peak rates of each step, by class.")
    mean_shares: dict[str, float] = said(
        "Mean rates of the last day as a share of the peaks of its steps, by class, from which the power "
        "of modes with `idle_w` follows; 1 where they are unknown.",
        default_factory=dict[str, float],
    )
    left_out: dict[str, str] = said("Forecasting methods that were not used, and why.", default_factory=dict[str, str])


class PlaceIntensity(Message):
    """The predicted carbon intensity of one place."""

    zone: str
    signal: Signal
    provider: str
    method: str
    generated_at: Instant
    is_stale: bool
    gco2_per_kwh: list[float] = said("Intensity in each step.")


class PlanForecasts(Message):
    """The predictions that a plan was made from."""

    step_s: float
    demand: dict[str, DemandForecast] = said("Demand by partition.")
    intensity: dict[str, PlaceIntensity] = said("Carbon intensity by place.")
    gpus: dict[str, dict[str, int]] = said("Number of GPUs that the pool could have, by place and model.")
    installed: dict[str, dict[str, int]] = said(
        "Number of GPUs of nodes that accept work, whoever holds them, by place and model; also of models "
        "that no mode takes.",
        default_factory=dict[str, dict[str, int]],
    )
    ordered: list[str] = many(
        "Places in which an order of the grid was in force, so that as little power as may be was planned there.",
        exclude_if=operator.not_,  # releases before 0.2 do not know it
    )


class PoolPlanSummary(Message):
    """A plan for the interval from `from_at` on."""

    id: str
    pool: str
    revision: int = said("Revision of the spec that it was made for.")
    trigger: PlanTrigger
    from_at: Instant
    deadline_at: Instant = said("A plan that is not ready by then is late.")
    state: WorkState
    submitted_at: Instant
    ended_at: Instant | None = None
    plan_s: float | None = maybe("Time for predictions and solving together.")
    outcome: PlanOutcome | None = maybe("Null until it is known what happens to the plan.")
    decided_at: Instant | None = None
    failure: WorkFailure | None = None


class PoolPlanList(Page[PoolPlanSummary]):
    """Plans, newest first."""


class PoolPlanResult(Message):
    """A plan with the predictions it was made from."""

    forecasts: PlanForecasts
    plan: pools.PoolsResult = said("The plan; `starts` and `stops` are relative to the instances at the time.")


class PoolPlanDetail(PoolPlanSummary):
    """A plan with its result."""

    result: PoolPlanResult | None = None


class PoolPlanQuery(PageQuery):
    """Which plans to list."""

    outcome: list[PlanOutcome] = many("Plans with any of these outcomes; repeatable.")


class InstanceQuery(PageQuery):
    """Which instances to list."""

    state: list[InstanceState] = said(
        "Instances in any of these states; repeatable. By default, all but those that have ended.",
        default_factory=lambda: list(LIVE_STATES),
    )


class TrafficWindow(Message):
    """All requests that arrived at one source within 5 seconds."""

    start_at: Instant = said("Start of the window, a multiple of 5 seconds in UTC.")
    requests: list[tuple[Tokens, Tokens]] = said(
        "Input and output tokens of each request.", max_length=MAX_WINDOW_REQUESTS
    )

    @field_validator("start_at")
    @classmethod
    def _aligned(cls, value: datetime) -> datetime:
        if value.timestamp() % serving.WINDOW_S:
            raise ValueError(f"must be a whole multiple of {serving.WINDOW_S:g} seconds of UTC")
        return value


class TrafficReport(Message):
    """Requests as seen by a router. A window that is reported again replaces the earlier report and is counted once."""

    source: Name = said("Name of the reporting router; the requests of all sources are added up.")
    windows: list[TrafficWindow] = Field(min_length=1, max_length=1_440)

    @field_validator("windows")
    @classmethod
    def _once(cls, windows: Sequence[TrafficWindow]) -> Sequence[TrafficWindow]:
        check_once((window.start_at for window in windows), "has a window twice")
        if sum(len(window.requests) for window in windows) > MAX_WINDOW_REQUESTS:
            raise ValueError(f"has more than {MAX_WINDOW_REQUESTS} requests in all")
        return windows


class TrafficReceipt(Message):
    """The answer to a traffic report; the windows are on disk by then."""

    windows: int
    requests: int
