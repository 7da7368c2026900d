"""Long solves: requests to the optimizer, their state and their results."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.contracts.allocation import AllocationProblem, AllocationResult
from services.contracts.background import WorkFailure, WorkState
from services.contracts.carbon import Clock, IntensityPoint
from services.contracts.partition import PartitionProblem, PartitionResult
from services.contracts.pools import PoolsProblem, PoolsResult
from services.contracts.queries import PageQuery
from services.contracts.schema import Instant, Message, Name, Page, Real, many, maybe, said
from services.contracts.solver import SolveOptions, SolveOutcome, SolveProgress
from services.core.domain.signal import Signal

MAX_STEPS = 20_000
MAX_WORK = 20_000
MAX_CELLS = 500_000
"""Maximum number of pairs of a class of work and a step of its window: the variables of a carbon bound."""


class WorkClass(Message):
    """Work of jobs that draw the same power and may run in the same window."""

    name: Name = "work"
    gpu_hours: Real = Field(gt=0, le=1e9)
    power_w: Real = said("Power of one busy GPU, including its share of the host.", ge=0, le=1e6)
    release_at: Instant | None = maybe("Earliest start; null for the beginning of the horizon.")
    deadline_at: Instant | None = maybe("Latest end; null for the end of the horizon.")
    max_gpus: Real | None = maybe("Maximum number of GPUs at once.", gt=0, le=1e7)

    @model_validator(mode="after")
    def _window_is_open(self) -> Self:
        if self.release_at and self.deadline_at and self.release_at >= self.deadline_at:
            raise ValueError("deadline_at is not after release_at")
        return self


class IntensitySeries(Message):
    """Carbon intensity over a horizon in contiguous steps, as in the carbon service's histories and forecasts."""

    signal: Signal
    points: list[IntensityPoint] = Field(min_length=1, max_length=MAX_STEPS)

    @field_validator("points")
    @classmethod
    def _contiguous(cls, points: list[IntensityPoint]) -> list[IntensityPoint]:
        for index, point in enumerate(points):
            if point.end_at <= point.start_at:
                raise ValueError(f"point {index} does not end after it begins")
            if index and point.start_at != points[index - 1].end_at:
                raise ValueError(f"point {index} does not begin where point {index - 1} ends")
            if abs(point.gco2_per_kwh) > 1e6:
                raise ValueError(f"point {index} has an intensity beyond 1000000 gCO2/kWh")
        return points


class _CarbonBoundTerms(SolveOptions):
    capacity_gpus: Real | None = maybe("Number of GPUs.", ge=0, le=1e7)
    capacity_gpus_by_step: list[Annotated[Real, Field(ge=0, le=1e7)]] | None = maybe(
        "Number of GPUs in each step of `intensity.points`, instead of `capacity_gpus`."
    )
    work: list[WorkClass] = Field(min_length=1, max_length=MAX_WORK)
    pue: Real = said("Power usage effectiveness of the site.", default=1, ge=1, le=10)


class CarbonBoundRequest(_CarbonBoundTerms):
    """Asks for the least carbon that any schedule of `work` on these GPUs could reach, knowing the grid in advance.

    The carbon intensity is either given as `intensity` or forecast for `zone` and `horizon_h`. In the second case, the
    horizon begins with the current step of the forecast.
    """

    intensity: IntensitySeries | None = None
    zone: Name | None = None
    signal: Signal | None = maybe("With `zone`; by default, the signal that the installation is configured for.")
    horizon_h: Real = said("With `zone`: length of the horizon in hours.", default=24, gt=0, le=168)
    clock: Clock = said("With `zone`: whether `horizon_h` counts real hours or grid hours.", default="real")
    idle_power_w: Real | None = maybe("Power of an idle GPU; 0 if idle nodes are powered down.", ge=0, le=1e6)
    idle_power_fraction: Real | None = maybe(
        "Power of an idle GPU as a fraction of the mean power of the work's GPUs, instead of `idle_power_w`.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.intensity is None) == (self.zone is None):
            raise ValueError("give either intensity or zone")
        if self.idle_power_w is not None and self.idle_power_fraction is not None:
            raise ValueError("give either idle_power_w or idle_power_fraction")
        if (self.capacity_gpus is None) == (self.capacity_gpus_by_step is None):
            raise ValueError("give either capacity_gpus or capacity_gpus_by_step")
        if self.capacity_gpus_by_step is not None:
            steps = len(self.intensity.points) if self.intensity else 0
            if len(self.capacity_gpus_by_step) != steps:
                raise ValueError("capacity_gpus_by_step goes with intensity and has one number for each of its points")
        return self

    @property
    def idle_w(self) -> float:
        """Power of an idle GPU in watts."""
        if self.idle_power_fraction is not None:
            gpu_hours = sum(item.gpu_hours for item in self.work)
            return self.idle_power_fraction * sum(item.gpu_hours * item.power_w for item in self.work) / gpu_hours
        return self.idle_power_w or 0.0


class IntensitySource(Message):
    """The origin of a forecast intensity."""

    zone: str
    provider: str
    method: str
    generated_at: Instant
    is_stale: bool


class CarbonBoundProblem(_CarbonBoundTerms):
    """A carbon bound problem with all its inputs resolved."""

    kind: Literal["carbon-bound"] = "carbon-bound"
    intensity: IntensitySeries
    idle_power_w: float
    source: IntensitySource | None = maybe("Null if the caller gave the intensity.")


class ClassSchedule(Message):
    """When a class of work runs, in a schedule that reaches the bound."""

    name: str
    first_step: int = said("Index into the problem's `intensity.points`.")
    gpu_hours: list[float] = said("GPU hours in that step and each following one.")
    shortfall_gpu_hours: float = said("GPU hours that no schedule can fit in together with the other work.", default=0)


class CarbonBoundResult(SolveOutcome):
    """A carbon bound. If `infeasible`, the least shortfall and a schedule of the remaining work."""

    kind: Literal["carbon-bound"] = "carbon-bound"
    carbon_gco2: float | None = said("The least carbon, including idle GPUs and PUE.")
    busy_energy_kwh: float | None
    idle_energy_kwh: float | None
    schedule: list[ClassSchedule]


Problem = Annotated[
    CarbonBoundProblem | PoolsProblem | PartitionProblem | AllocationProblem, Field(discriminator="kind")
]
Result = Annotated[CarbonBoundResult | PoolsResult | PartitionResult | AllocationResult, Field(discriminator="kind")]


class SolveSummary(Message):
    """A solve without its problem and its result."""

    id: str
    kind: str
    tenant_id: str
    state: WorkState
    submitted_at: Instant
    started_at: Instant | None = maybe("When a worker last started it.")
    ended_at: Instant | None = None
    attempts: int = said("How often a worker started it; more than once after a crash.", default=0)
    solve_s: float | None = maybe("Wall-clock time of the solve.")
    progress: SolveProgress | None = maybe("Null before a worker starts it; written at most once a second.")
    outcome: SolveOutcome | None = None
    failure: WorkFailure | None = None


class Solve(SolveSummary):
    """A solve with its problem and its result."""

    problem: Problem
    result: Result | None = None


class SolveList(Page[SolveSummary]):
    """One page of solves, newest first."""


class SolveQuery(PageQuery):
    """Which solves to list, newest first."""

    state: list[WorkState] = many("Solves in any of these states; repeatable.")
    kind: Name | None = None
    tenant: Name | None = maybe("For operators: only this tenant's. Users always see only their own.")
