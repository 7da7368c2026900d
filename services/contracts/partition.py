"""Variants on slices: the input and output of ``POST /v1/optimize/partition`` and ``wattshift lab partition``."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.contracts.jobs import SliceName
from services.contracts.schema import LEAST, Flag, Int, Message, Name, Real, check_once, many, maybe, said
from services.contracts.solver import SolveOutcome
from services.core.domain.solving import MAX_LEADING

SLICE_NAMES: tuple[SliceName, ...] = ("1g", "2g", "3g", "4g", "7g")
MAX_GPUS, MAX_APPLICATIONS, MAX_VARIANTS = 64, 8, 12


class SliceProfile(Message):
    """How one instance of a variant behaves on slices of one type, with neighbours at work."""

    slice: SliceName
    service_ms: Real = said("Mean service time of a request.", ge=LEAST, le=1e6)
    p95_ms: Real | None = maybe("Its 95th percentile; null for no spread.", ge=LEAST, le=1e7)
    busy_w: Real = said("Power of the GPU above idle while the instance works.", ge=0, le=1e4)


class ModelVariant(Message):
    """A model of a family."""

    name: Name
    accuracy_pct: Real = Field(ge=LEAST, le=100)
    profiles: list[SliceProfile] = said(
        "A type of slices without a profile cannot run the variant.", min_length=1, max_length=5
    )

    @model_validator(mode="after")
    def _profiles_differ(self) -> Self:
        problem = f"variant {self.name} has two profiles of one type of slices"
        check_once((profile.slice for profile in self.profiles), problem)
        return self


def check_floor(max_accuracy_loss_pct: float | None, best: str, accuracy_pct: float) -> None:
    """Refuse an accuracy floor that no variant reaches.

    Args:
        max_accuracy_loss_pct: The limit that implies the floor.

    Raises:
        ValueError: The floor is above the accuracy of the best variant.
    """
    if max_accuracy_loss_pct is None or max_accuracy_loss_pct >= 0:
        return
    floor_pct = accuracy_pct * (1 - max_accuracy_loss_pct / 100)
    raise ValueError(
        f"max_accuracy_loss_pct is {max_accuracy_loss_pct:g}: that is an accuracy floor of {floor_pct:.2f} %, and the "
        f"best accuracy is {accuracy_pct:g} %, of variant {best}; give a loss of at least 0"
    )


class VariantInstances(Message):
    """Instances of a variant on slices of one type."""

    variant: Name
    slice: SliceName
    count: Int = Field(ge=1, le=7 * MAX_GPUS)


class PartitionApplication(Message):
    """An application: its variants, its load and its limits."""

    name: Name
    variants: list[ModelVariant] = Field(min_length=1, max_length=MAX_VARIANTS)
    requests_per_s: Real = Field(ge=LEAST, le=1e6)
    sla_p95_ms: Real | None = maybe(
        "95th percentile of latency that must be kept; by default that of the most accurate variant on "
        "whole GPUs, if this is the only application.",
        ge=LEAST,
        le=1e7,
    )
    carbon_weight: Real = said("Weight of carbon against accuracy (lambda).", default=0.5, ge=0, le=1)
    max_accuracy_loss_pct: Real | None = maybe("Accuracy floor.", le=100, json_schema_extra={"minimum": 0})
    running: list[VariantInstances] = many("Where the search begins.", max_length=60)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        check_once((variant.name for variant in self.variants), "variant {} is there twice")
        known = {(variant.name, profile.slice) for variant in self.variants for profile in variant.profiles}
        for each in self.running:
            if (each.variant, each.slice) not in known:
                raise ValueError(f"running: variant {each.variant} has no profile on {each.slice}")
        best = max(self.variants, key=lambda variant: variant.accuracy_pct)
        if (best.name, "7g") not in known:
            raise ValueError(f"the most accurate variant, {best.name}, needs a profile on 7g: it is the baseline")
        check_floor(self.max_accuracy_loss_pct, best.name, best.accuracy_pct)
        return self


class PartitionRequest(Message):
    """Asks which model variants run on which MIG slices of some GPUs (Clover, equations 1 to 7).

    Several applications share the GPUs by marginal benefit. Configurations are evaluated by a queue model.
    """

    gpus: Int = Field(ge=1, le=MAX_GPUS)
    idle_w: Real = said("Power of an idle GPU.", ge=0, le=1e4)
    layouts: list[Annotated[Int, Field(ge=1, le=19)]] | None = maybe(
        "Present layout of each GPU, 1 to 19; by default uncut (1)."
    )
    intensity_gco2_per_kwh: Real = Field(ge=LEAST, le=1e5)
    baseline_gco2_per_kwh: Real | None = maybe(
        "Intensity that savings are compared with; by default the present one.", ge=LEAST, le=1e5
    )
    applications: list[PartitionApplication] = Field(min_length=1, max_length=MAX_APPLICATIONS)
    seed: Int = Field(default=1, ge=0, le=2**31)
    max_evaluations: Int = Field(default=30, ge=1, le=1_000)
    screen: Flag = said("Predict configurations before measuring; false searches as printed.", default=True)
    candidates: Int = said(
        "How many of the best configurations of each application to name beside the chosen one.",
        default=0,
        ge=0,
        le=MAX_LEADING,
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.layouts is not None and len(self.layouts) != self.gpus:
            raise ValueError(f"layouts has {len(self.layouts)} entries for {self.gpus} GPUs")
        check_once((each.name for each in self.applications), "application {} is there twice")
        return self


class PartitionProblem(PartitionRequest):
    """A partition problem."""

    kind: Literal["partition"] = "partition"


class PartitionCandidate(Message):
    """A configuration of an application that keeps its limits, and how it performs according to the queue model."""

    instances: list[VariantInstances]
    objective_pct: float
    accuracy_pct: float
    energy_j_per_request: float
    p95_ms: float


class ApplicationPlan(Message):
    """What of an application runs, and how it performs according to the queue model."""

    name: str
    gpus: int = said("Its share of the GPUs.")
    instances: list[VariantInstances]
    keeps_limits: bool = said("Whether SLA and accuracy floor are kept.")
    objective_pct: float = said("lambda * dCarbon + (1 - lambda) * dAccuracy.")
    bound_pct: float | None = said("No configuration has a higher objective; null if none keeps the limits.")
    accuracy_pct: float
    accuracy_loss_pct: float
    carbon_gco2_per_request: float
    energy_j_per_request: float
    p95_ms: float
    sla_p95_ms: float
    evaluations: int
    candidates: list[PartitionCandidate] = many(
        "The best configurations that were found, the best first; as many as were asked for, at most."
    )


class PartitionResult(SolveOutcome):
    """A partition. `infeasible` if what was found does not keep an application's limits."""

    kind: Literal["partition"] = "partition"
    applications: list[ApplicationPlan]
    layouts: list[int] = said("Layout of each GPU, 1 to 19, with the fewest GPUs cut anew.")
    recut: list[int] = said("GPUs whose layout changes, from 0.")
