"""Applications on fleets of sliced GPUs: what operators and tenants ask for, and what came of it.

A *fleet* is a number of GPUs of one model in one grid zone, set aside by an operator. An *application* answers requests
with model *variants* of different accuracy; each instance runs one variant on a whole GPU or on a MIG slice. As the
grid's carbon intensity changes, a *plan* of the fleet chooses again which variants run on which slices (Clover), within
each application's limits on latency and accuracy. GPUs are then recut, one at a time.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from services.contracts import partition
from services.contracts.queries import Plain
from services.contracts.schema import LEAST, Instant, Int, Message, Name, Page, Real, check_once, many, maybe, said
from services.contracts.serving import AnyInstance, GridNodes, InstanceState, PlanMode, ServerProbes, ServerProcess

VariantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,58}$")]
"""The name of a variant; with its slice it is the name of what an instance runs, such as `b7.3g`."""

LATENCY_BOUNDS_MS: tuple[float, ...] = tuple(round(1.1**step, 4) for step in range(128))
"""Upper bounds of the buckets of latency histograms, 1 ms to 180 s, each 10 % above the one before."""


class Evaluation(StrEnum):
    """How configurations of a fleet are evaluated."""

    MODEL = "model"  #: By a queue model with the variants' profiles
    MEASURED = "measured"
    """What the model proposes is run and measured, one configuration after the other, while the SLAs have room."""


class FleetSpec(GridNodes):
    """GPUs that an operator sets aside for applications. While it has them, nothing else is placed on them."""

    gpus: Int = said("Number of GPUs.", ge=1, le=partition.MAX_GPUS)
    gpu_model: Name = said("GPU model, as nodes report it.")
    idle_w: Real | None = maybe("Power of an idle GPU; by default that of the catalogue of GPU models.", ge=0, le=1e4)
    baseline_gco2_per_kwh: Real | None = maybe(
        "Intensity that savings are compared with; by default the mean of the zone's last seven days.", ge=LEAST, le=1e5
    )
    tenants: list[Name | Literal["*"]] = said(
        "Tenants whose applications may use it; `*` for all.", default=["*"], max_length=1_000
    )
    evaluation: Evaluation = Evaluation.MODEL
    evaluation_s: Real = said(
        "Seconds of traffic that a measured evaluation takes, in steps of 5.", default=10, ge=5, le=600
    )
    evaluation_sla_share: Real = said(
        "A configuration is only tried while the measured p95 of every application is at most this share of its SLA.",
        default=0.9,
        ge=LEAST,
        le=1,
    )
    search_s: Real = said(
        "Time after which a measured search tries no further configuration.", default=300, ge=10, le=86_400
    )


class AppVariant(partition.ModelVariant, ServerProcess):
    """A model variant: its accuracy, how fast it is on which slices, and how it is started.

    The process must listen on port `$WATTSHIFT_PORT` at the address of its node. It sees its own GPU or slice only.
    """

    name: VariantName


class Repartition(StrEnum):
    """When a GPU with an application's instances may be recut."""

    WITHIN_SLA = "within_sla"
    """Only while the application's other instances keep the SLA, by the queue model, or the SLA is broken anyway."""
    ANY_TIME = "any_time"
    """At any time: requests may wait in the meantime. An application with a single GPU needs this."""


class AppSpec(Message):
    """An application as specified by a tenant."""

    fleet: Name
    variants: list[AppVariant] = Field(min_length=1, max_length=partition.MAX_VARIANTS)
    sla_p95_ms: Real = said("95th percentile of latency that must be kept, waits included.", ge=LEAST, le=1e7)
    carbon_weight: Real = said(
        "Weight of carbon against accuracy (lambda); 1 while an order of the grid is in force, if there is a floor.",
        default=0.5,
        ge=0,
        le=1,
    )
    max_accuracy_loss_pct: Real | None = maybe(
        "Accuracy floor: how much of the most accurate variant's accuracy may be lost, per cent of it.",
        le=100,
        json_schema_extra={"minimum": 0},
    )
    requests_per_s: Real = said("Estimate of the arrivals, until enough requests have been seen.", ge=LEAST, le=1e6)
    mode: PlanMode = said("`fixed`: the fleet's plans are only proposed, not carried out.", default=PlanMode.AUTOMATIC)
    repartition: Repartition = Repartition.WITHIN_SLA
    concurrency: Int = said("Requests that the router gives an instance at once.", default=1, ge=1, le=1_000)
    min_interval_s: Real = said("Minimum time between two plans.", default=60, ge=1, le=86_400)
    probes: ServerProbes = ServerProbes(
        health_path="/v2/health/ready",
        load_path=None,
        ready_timeout_s=180,
        unhealthy_timeout_s=30,
        drain_min_s=3,
        drain_timeout_s=60,
        grace_s=10,
    )
    tenants: list[Name | Literal["*"]] = many(
        "Other tenants whose keys may use the application; `*` for all.", max_length=1_000
    )

    @property
    def most_accurate(self) -> AppVariant:
        """The variant of the highest accuracy."""
        return max(self.variants, key=lambda variant: variant.accuracy_pct)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_once((variant.name for variant in self.variants), "variant {} is there twice")
        best = self.most_accurate
        if all(profile.slice != "7g" for profile in best.profiles):
            raise ValueError(f"the most accurate variant, {best.name}, needs a profile on 7g: it is the baseline")
        partition.check_floor(self.max_accuracy_loss_pct, best.name, best.accuracy_pct)
        loss_pct = 100 if self.max_accuracy_loss_pct is None else self.max_accuracy_loss_pct
        floor_pct = best.accuracy_pct * (1 - loss_pct / 100)
        late = min(
            profile.service_ms if profile.p95_ms is None else profile.p95_ms
            for variant in self.variants
            if variant.accuracy_pct >= floor_pct
            for profile in variant.profiles
        )
        if late > self.sla_p95_ms:
            raise ValueError(
                f"sla_p95_ms is {self.sla_p95_ms:g}, but the fastest variant above the accuracy floor takes "
                f"{late:g} ms without any wait"
            )
        return self


class FleetPlanState(StrEnum):
    """State of a fleet's plan."""

    SOLVING = "solving"  #: The optimizer searches for it
    PROPOSED = "proposed"  #: It is only shown: an application's mode is `fixed`, or the fleet's GPUs cannot be cut
    MEASURING = "measuring"  #: Traffic to the configuration that runs is measured, to decide which one is tried next
    CARRYING_OUT = "carrying_out"  #: GPUs are being cut anew and instances replaced, one GPU at a time
    APPLIED = "applied"
    FAILED = "failed"  #: It could not be made or carried out; `detail` says why. Instances run on as the GPUs are cut.
    SUPERSEDED = "superseded"  #: Applications, the fleet or its GPUs changed before it was carried out


class FleetPlanTrigger(StrEnum):
    """Why a plan was made."""

    FIRST = "first"  #: There was none
    PARAMETER = "parameter"  #: The fleet or one of its applications was changed
    GPUS = "gpus"  #: GPUs of the fleet were lost or came back
    SLA = "sla"  #: An application's latency was above its SLA
    ACCURACY = "accuracy"  #: An application's accuracy was below its floor
    INTENSITY = "intensity"  #: The carbon intensity was more than 5 % off that of the plan before
    GRID_ORDER = "grid_order"  #: An order of the grid has begun or ended in the fleet's zone


class EvaluationFigures(Message):
    """What a configuration does for an application."""

    objective_pct: float = said("lambda * dCarbon + (1 - lambda) * dAccuracy.")
    accuracy_pct: float
    p95_ms: float
    energy_j_per_request: float = said(
        "Of the GPUs: that of its instances, and the idle power of the rest of its share of the fleet."
    )


class AppEvaluation(Message):
    """One application in an evaluation."""

    name: str
    instances: list[partition.VariantInstances]
    is_tried: bool = said("Whether the search asked for this configuration; otherwise it stayed, or was gone back to.")
    predicted: EvaluationFigures | None = maybe(
        "By the queue model in closed form; null if that cannot serve the requests."
    )
    measured: EvaluationFigures | None = maybe("Null while it is not, or could not be.")
    answered: int = 0
    late: int = said("Answers beyond the SLA, up to a tenth of it too few.", default=0)
    failed: int = 0


class FleetEvaluation(Message):
    """One configuration of a fleet that was run and measured."""

    begun_at: Instant = said("When its instances began to be brought up.")
    measured_from: Instant | None = maybe("When all were ready; null before.")
    measured_to: Instant | None = None
    recut: int = said("Number of GPUs that were cut anew for it.", default=0)
    detail: str | None = maybe("Why it could not be measured.")
    applications: list[AppEvaluation]


class FleetSearch(Message):
    """A search by measurement."""

    begun_at: Instant
    ended_at: Instant | None = None
    detail: str | None = maybe("Why it ended; null while it goes on.")
    evaluations: list[FleetEvaluation] = said("In order; the first is of what ran already.")
    present: FleetEvaluation = said("The configuration that is brought up or measured, or was at last.")


class FleetPlan(Message):
    """A plan of a fleet: which variants of its applications run on which slices."""

    id: str
    fleet: str
    trigger: FleetPlanTrigger
    state: FleetPlanState
    detail: str | None = maybe("Why it failed, waits or is only proposed.")
    gco2_per_kwh: float = said("Carbon intensity that it was made for.")
    made_at: Instant
    ended_at: Instant | None = None
    gpu: str | None = maybe("The GPU that is being changed now: node and index.")
    layouts: list[list[int]] = many(
        "Sizes of each GPU's slices in sevenths, in the order of the fleet's GPUs; empty for a whole GPU."
    )
    recut: int = said("Number of GPUs that are cut anew.", default=0)
    applications: list[partition.ApplicationPlan] = many(
        "What is to run, and what it does: by the model, or as measured where a search by measurement chose it."
    )
    search: FleetSearch | None = maybe("What was measured; null where plans are found by the model alone.")


class FleetPlanList(Page[FleetPlan]):
    """Plans, newest first."""


class FleetGpu(Message):
    """A GPU of a fleet."""

    node_id: str
    gpu: int
    sizes: list[int] = said("Slices that it has, in sevenths; empty for a whole GPU.")
    wanted: list[int] = said("Slices that it is to have.")
    state: str = said("`pending`, `applied`, `busy` or `failed`.")
    detail: str | None = None
    is_up: bool = said("Whether its node is up and not drained.")


class Fleet(Message):
    """A fleet and its current state."""

    name: str
    tenant_id: str
    revision: int
    spec: FleetSpec
    is_deleted: bool = said("Whether it is being deleted: its GPUs are made whole and given back.")
    created_at: Instant
    updated_at: Instant
    apps: list[str] = said("Applications that use it.")
    gpus: list[FleetGpu]
    missing_gpus: int = said("GPUs that it should have and that are not there, or that jobs still use.")
    detail: str | None = maybe("Why its applications cannot run at all; null if they can.")
    only_proposes: str | None = maybe("Why plans are only proposed; null if they are not.")
    plan: FleetPlan | None = maybe("The newest plan.")


class FleetList(Page[Fleet]):
    """Fleets, by name."""


class AppInstance(AnyInstance):
    """An instance of an application: one variant on one GPU or slice."""

    variant: str
    slice: partition.SliceName
    node_id: str | None = None
    gpu: int | None = maybe("The GPU that the instance runs on, whole or a slice of it.")


class AppInstanceList(Page[AppInstance]):
    """Instances, newest first."""


class AppTraffic(Message):
    """What routers saw of an application's requests in the last minute."""

    window_s: float
    requests_per_s: float
    answered: int
    failed: int
    p50_ms: float | None = said("Null without answers, as are the other figures.")
    p95_ms: float | None
    accuracy_pct: float | None = said("Mean over the requests of the accuracy of the variant that answered.")


class App(Message):
    """An application and its current state."""

    name: str
    tenant_id: str
    revision: int
    spec: AppSpec
    is_deleted: bool = said("Whether it is being deleted: it is removed when its instances have been drained.")
    created_at: Instant
    updated_at: Instant
    only_proposes: str | None = maybe("Why plans are only proposed; null if they are not.")
    plan: FleetPlan | None = maybe("The fleet's newest plan, with this application alone.")
    running: list[partition.VariantInstances] = said("Its instances that are ready.")
    instances: dict[InstanceState, int] = said("Number of instances by state, without those that have ended.")
    traffic: AppTraffic


class AppList(Page[App]):
    """Applications, by name."""


class AppReportQuery(Message):
    """The period that a report covers."""

    hours: Annotated[float, Plain] = said(
        "Hours before now, as far as requests and instances are kept.", default=24, ge=LEAST, le=24 * 31
    )
    step_s: Annotated[float, Plain] = said("Length of each step of the mix.", default=3_600, ge=5, le=86_400)


class AppMix(Message):
    """The requests of one step of a report, and the variants that answered them."""

    start_at: Instant
    gco2_per_kwh: float | None = said("Mean carbon intensity; null without a ledger line.")
    requests: int
    failed: int
    by_variant: dict[str, int] = said("Requests answered, by variant.")
    accuracy_pct: float | None
    p95_ms: float | None
    energy_j: float = said("Energy of its instances by the ledger.")
    carbon_gco2: float


class AppEvaluations(Message):
    """What searches by measurement did to an application over a period."""

    evaluations: int = said("Measured configurations, also of what ran already.")
    unmeasured: int = said("Configurations that could not be brought up or measured.")
    bringing_up_s: float = said("Seconds in which their instances were brought up.")
    measuring_s: float
    answered: int
    late: int = said("Of the answers while it was measured, those beyond the SLA.")
    failed: int
    p95_error_pct: float | None = said(
        "Mean difference of the model's prediction to what was measured, of that; null without any."
    )
    energy_error_pct: float | None
    accuracy_error_pct: float | None


class AppReport(Message):
    """What an application did, compared with BASE: the most accurate variant on whole GPUs, for the same requests."""

    app: str
    start_at: Instant
    end_at: Instant
    requests: int
    failed: int
    accuracy_pct: float | None
    accuracy_loss_pct: float | None = said("Against the most accurate variant.")
    p95_ms: float | None
    sla_p95_ms: float
    sla_ok_share: float | None = said("Share of the answers that came within the SLA's time.")
    energy_j: float = said("Energy of its instances by the ledger, the idle power of their slices included.")
    carbon_gco2: float
    gco2_per_1000: float | None = said("Grams of CO2 per 1,000 requests, by the ledger.")
    base_gco2_per_1000: float | None = said(
        "The same of BASE, modelled: what the same requests would have drawn on as many GPU seconds, idle "
        "power and hosts included, at the grid's intensities of the time."
    )
    carbon_saving_pct: float | None
    evaluations: AppEvaluations | None = maybe("Searches by measurement; null where there was none.")
    mix: list[AppMix]


class AppServerObservation(Message):
    """What one router process saw of an instance."""

    server: str
    answered: Int = Field(ge=0)
    mean_service_ms: Real | None = maybe("Without waits. Null without answers.", ge=0)
    p95_service_ms: Real | None = Field(default=None, ge=0)


class AppObservation(Message):
    """What one router process saw of an application in one window."""

    app: Name
    arrivals: Int = Field(ge=0)
    answered: Int = Field(ge=0)
    failed: Int = said("Requests that got no answer of an instance.", default=0, ge=0)
    waiting: Int = said("Requests in its queue when this was sent.", default=0, ge=0)
    p50_ms: Real | None = maybe("Of answers, from arrival to the end, waits included.", ge=0)
    p95_ms: Real | None = Field(default=None, ge=0)
    latency: list[Annotated[Int, Field(ge=0)]] = many(
        "Answers by latency: those within each of `LATENCY_BOUNDS_MS`, then those beyond the last; "
        "trailing zeros may be left out.",
        max_length=len(LATENCY_BOUNDS_MS) + 1,
    )
    servers: list[AppServerObservation] = Field(default_factory=list[AppServerObservation], max_length=1_000)


class AppObservations(Message):
    """What one router process saw in a 5-second window. Sending it again replaces it."""

    router: Name
    start_at: Instant = said("Start of the window, a whole multiple of 5 seconds.")
    apps: list[AppObservation] = Field(max_length=1_000)
