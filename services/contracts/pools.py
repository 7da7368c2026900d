"""Planning pools of LLM instances: the input and output of ``POST /v1/optimize/pools`` and ``wattshift plan pools``."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.contracts.routing import AccuracyPct
from services.contracts.schema import LEAST, Int, Message, Name, Real, check_once, many, maybe, said
from services.contracts.solver import SolveOptions, SolveOutcome
from services.core.domain.serving import MAX_REGIONS, TABLE_7, LatencyLimits, NegativeRates

MAX_LOCATIONS, MAX_MODES, MAX_PARTITIONS, MAX_CLASSES, MAX_STEPS = 1_000, 100, 20, 100, 2_016
MAX_COLUMNS = 500_000
"""Maximum number of combinations of location, class and mode in one partition."""
MAX_NODE_GPUS = 32  #: Beyond, there are too many ways to fill a node
GCO2_PER_KWH_OF_LB_PER_MWH = 0.45359237

TIE_SHARE = 1e-4
"""Of plans whose energy differs by less than about this share, the objective energy takes the cleanest."""

Objective = Literal["carbon", "energy", "cost"]
Gpus = Annotated[dict[Name, Annotated[Int, Field(ge=0, le=1_000_000)]], Field(max_length=50)]
Rates = Annotated[list[Annotated[Real, Field(ge=-1e7, le=1e7)]], Field(min_length=1, max_length=MAX_STEPS)]
Demand = Annotated[list[Annotated[Real, Field(ge=0, le=1e9)]], Field(min_length=1, max_length=MAX_STEPS)]
NetworkMs = Annotated[dict[Name, Annotated[Real, Field(ge=0, le=60_000)]], Field(max_length=MAX_LOCATIONS)]


class ClientRegion(Message):
    """Where requests come from, and how far every location is from there."""

    name: Name
    share: Real = said(
        "Its part of the requests of every class, in proportion to the others'.", default=1, ge=LEAST, le=1e9
    )
    least_accuracy_pct: AccuracyPct | None = maybe(
        "Only modes that are as accurate, or state no accuracy, serve its requests."
    )
    network_ms: NetworkMs = said(
        "Milliseconds there and back to each location, in addition to the times in profiles; 0 for "
        "locations that are not named.",
        default_factory=dict[str, float],
    )


class LocationNodes(Message):
    """Nodes that are alike."""

    gpu_type: Name
    nodes: Int = said("How many.", ge=1, le=1_000_000)
    gpus: Int = said("Number of GPUs of each.", ge=1, le=MAX_NODE_GPUS)


class PoolLocation(Message):
    """A place with GPUs and the carbon intensity of its grid."""

    name: Name
    gpus: Gpus = said("Number of GPUs by type.")
    intensity: Rates = said("Intensity in each step, in `intensity_unit`; marginal intensities may be negative.")
    price_per_kwh: Rates | None = maybe("Price in each step, for the objective `cost`.")
    nodes: list[LocationNodes] = many(
        "The location's nodes, where every instance must fit on one; if none are given for a type, only "
        "the number in `gpus` counts.",
        max_length=1_000,
    )


class PoolMode(Message):
    """The GPUs that an instance runs on."""

    name: Name
    gpus: Gpus = said("Number of GPUs of one instance, by type.")
    accuracy_pct: AccuracyPct | None = maybe("Accuracy of what it runs, where modes differ.")
    idle_w: Real | None = maybe(
        "Power without requests. If it is stated, an instance draws between this and the power of its "
        "profile in proportion to its load; if not, it draws its profile's power whatever its load, and the lowest of "
        "any of its profiles where it is kept without requests.",
        ge=0,
        le=1e7,
    )
    start_wh: Real = said("Energy of starting an instance.", default=0, ge=0, le=1e6)
    stop_wh: Real = said("Energy of stopping an instance, including its drain.", default=0, ge=0, le=1e6)


class ModeProfile(Message):
    """How one mode serves one class of requests at its highest clock."""

    mode: Name
    max_qps: Real = said("Requests per second that one instance serves; 0 if it cannot serve them.", ge=0, le=1e7)
    power_w: Real = said("Power of the whole instance at that load.", ge=0, le=1e7)
    latency_s: Real | None = Field(default=None, ge=0)
    ttft_ms: Real | None = Field(default=None, ge=0)
    tbt_ms: Real | None = Field(default=None, ge=0)


class ClassTerms(Message):
    """A class of requests: its latency limits, and the modes that can serve it."""

    name: Name
    max_latency_s: Real | None = Field(default=None, ge=LEAST)
    max_ttft_ms: Real | None = Field(default=None, ge=LEAST)
    max_tbt_ms: Real | None = Field(default=None, ge=LEAST)
    profiles: list[ModeProfile] = said(
        "How modes serve the class; a mode without a profile cannot serve it.", max_length=MAX_MODES
    )

    def admits(self, profile: ModeProfile, network_ms: float = 0.0) -> bool:
        """Return whether a profile keeps the limits; a limit without a measured value is not kept.

        Args:
            profile: How a mode serves the class.
            network_ms: Round trip between client and instance; part of the time to the first token and of the whole
                time.
        """
        pairs = (
            (self.max_latency_s, profile.latency_s, 1e-3 * network_ms),
            (self.max_ttft_ms, profile.ttft_ms, network_ms),
            (self.max_tbt_ms, profile.tbt_ms, 0.0),
        )
        return all(limit is None or (found is not None and found + more <= limit) for limit, found, more in pairs)

    def latency_limits(self) -> LatencyLimits:
        """Return the thresholds for clocks: the stated limits, or those of FREESH's Table 7 where none is stated."""
        paper = TABLE_7.get(self.name, LatencyLimits())
        return LatencyLimits(
            ttft_s=paper.ttft_s if self.max_ttft_ms is None else 1e-3 * self.max_ttft_ms,
            tbt_s=paper.tbt_s if self.max_tbt_ms is None else 1e-3 * self.max_tbt_ms,
            e2e_s=paper.e2e_s if self.max_latency_s is None else self.max_latency_s,
        )


class RequestClass(ClassTerms):
    """A class of requests with the demand to plan for."""

    demand_qps: Demand = said("Peak rate in each step, for which there must be capacity.")
    mean_qps: Demand | None = maybe(
        "Mean rate in each step, from which the power of modes with `idle_w` follows; by default the peaks."
    )


class RequestPartition(Message):
    """One way to divide requests into classes."""

    name: Name
    classes: list[RequestClass] = Field(min_length=1, max_length=MAX_CLASSES)


class RunningInstances(Message):
    """Instances that are already running."""

    location: Name
    mode: Name
    instances: Int = Field(ge=0, le=1_000_000)
    up_s: Real | None = maybe("How long they have been running; null means longer than `min_up_s`.", ge=0)


class PlannedInstances(Message):
    """Instances of one mode, in one place, for one class of requests."""

    location: Name
    request_class: Name | None = said("Null for instances that are kept running without requests.")
    mode: Name
    count: Int = Field(ge=0, le=1_000_000)
    power_w: Real = said("Power of each instance, on average.")


class Incumbent(Message):
    """A plan to start the search from, such as the current one."""

    partition: Name
    instances: list[PlannedInstances] = Field(max_length=MAX_COLUMNS)


class PoolsRequest(SolveOptions):
    """Asks for the pools with the least carbon, energy or cost over the next steps (FREESH, equation 1).

    Every instance runs during all steps, and the peak demand of every class is met with head-room.
    """

    objective: Objective = said(
        "`energy` takes the cleanest of the plans that are within about 0.01 % of the least energy.", default="carbon"
    )
    step_s: Real = Field(default=300, ge=LEAST, le=86_400)
    head_room: Real = said(
        "Factor by which the planned capacity exceeds the demand (alpha in the paper).", default=1.1, ge=LEAST, le=100
    )
    intensity_unit: Literal["gco2_per_kwh", "lb_per_mwh"] = "gco2_per_kwh"
    negative_rates: NegativeRates = said(
        "How negative intensities or prices count. `frugal`: no more instances than the demand needs; "
        "`paper`: they are taken literally, so that more instances may be planned.",
        default=NegativeRates.FRUGAL,
    )
    gap: Real | None = maybe(
        "Stop at a plan this close to the bound, as a fraction; null for the optimum if it is found quickly.",
        ge=0,
        le=1,
    )
    partition: Name | None = maybe("Plan for this partition only; null to choose the best.")
    locations: list[PoolLocation] = Field(min_length=1, max_length=MAX_LOCATIONS)
    regions: list[ClientRegion] = many(
        "Regions of clients. Requests are planned only for locations where the limits of their class hold "
        "with the network's time on top.",
        max_length=MAX_REGIONS,
    )
    modes: list[PoolMode] = Field(min_length=1, max_length=MAX_MODES)
    partitions: list[RequestPartition] = Field(min_length=1, max_length=MAX_PARTITIONS)
    running: list[RunningInstances] = Field(default_factory=list[RunningInstances], max_length=MAX_COLUMNS)
    min_up_s: Real = said("Minimum time that an instance runs before it may be stopped.", default=0, ge=0, le=1e7)
    incumbent: Incumbent | None = maybe(
        "A plan to start the search from; it is ignored if it does not fit the problem."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for what in ("locations", "modes", "partitions", "regions"):
            check_once((each.name for each in getattr(self, what)), f"{what} have {{}} twice")
        modes = {mode.name for mode in self.modes}
        steps = len(self.locations[0].intensity)
        for location in self.locations:
            if len(location.intensity) != steps or len(location.price_per_kwh or location.intensity) != steps:
                raise ValueError(f"location {location.name} does not have {steps} steps as the first one has")
            if self.objective == "cost" and location.price_per_kwh is None:
                raise ValueError(f"the objective is cost, and location {location.name} has no price_per_kwh")
        locations = {each.name for each in self.locations}
        for region in self.regions:
            _known(f"network_ms of region {region.name}", region.network_ms, locations, "location")
        for mode in self.modes:
            if not any(mode.gpus.values()):
                raise ValueError(f"mode {mode.name} takes no GPU")
        for part in self.partitions:
            check_once((each.name for each in part.classes), f"the classes of partition {part.name} have {{}} twice")
            for each in part.classes:
                where = f"class {each.name} of partition {part.name}"
                if len(each.demand_qps) != steps:
                    raise ValueError(f"{where} has {len(each.demand_qps)} steps of demand, not {steps}")
                if each.mean_qps is not None and len(each.mean_qps) != steps:
                    raise ValueError(f"{where} has {len(each.mean_qps)} steps of mean_qps, not {steps}")
                check_once((profile.mode for profile in each.profiles), f"the profiles of {where} have {{}} twice")
                _known(where, (profile.mode for profile in each.profiles), modes, "mode")
            if len(self.locations) * len(part.classes) * len(modes) > MAX_COLUMNS:
                raise ValueError(f"partition {part.name} has more than {MAX_COLUMNS} combinations")
        _known("running", (each.mode for each in self.running), modes, "mode")
        _known("running", (each.location for each in self.running), locations, "location")
        if self.partition is not None:
            _known("the choice", [self.partition], {each.name for each in self.partitions}, "partition")
        return self

    @property
    def chosen(self) -> list[RequestPartition]:
        """The partitions to choose from."""
        return [part for part in self.partitions if self.partition in (None, part.name)]


class PoolsProblem(PoolsRequest):
    """The problem that is solved."""

    kind: Literal["pools"] = "pools"


class InstanceChange(Message):
    """Instances to start or stop."""

    location: str
    mode: str
    count: int


class UnservedDemand(Message):
    """Demand of a class that no plan can serve."""

    request_class: str
    qps: float = said("Requests per second that are not served, of the peak demand with head-room.")
    reason: Literal["no_mode", "gpus", "gpus_shared", "gpus_held", "no_gpus"] = said(
        "`no_mode`: no mode keeps the latency limits, or none for the clients of some region; `gpus`: all "
        "GPUs together could not serve it; "
        "`gpus_shared`: the GPUs do not suffice for it and the other classes. For pools that run also `gpus_held`: "
        "other pools, or jobs that may not be preempted, hold GPUs that it could use; `no_gpus`: no node in the pool's "
        "places has GPUs of a model that it may use, or they are cut or kept for fleets."
    )


class FullGpus(Message):
    """GPUs that the plan of least shortfall uses up."""

    location: str
    gpu_type: str


class PoolsResult(SolveOutcome):
    """A plan. If `infeasible`, the demand that cannot be served, and the plan with the least shortfall."""

    kind: Literal["pools"] = "pools"
    partition: str | None = None
    instances: list[PlannedInstances] = Field(default_factory=list[PlannedInstances])
    emissions_kg: float | None = maybe("Emissions by the given intensities, including starts and stops.")
    energy_kwh: float | None = None
    cost: float | None = maybe("Cost, if all locations have a price.")
    starts: list[InstanceChange] = Field(default_factory=list[InstanceChange])
    stops: list[InstanceChange] = Field(default_factory=list[InstanceChange])
    shortfall: list[UnservedDemand] = Field(default_factory=list[UnservedDemand])
    full: list[FullGpus] = Field(default_factory=list[FullGpus])


def _known(where: str, names: Iterable[str], known: set[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {what} {name}")
