"""Long solves: what may be asked of the optimizer, and how an answer stands."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.contracts.background import WorkFailure, WorkState
from services.contracts.carbon import Clock, IntensityPoint, curve_of
from services.contracts.pools import PoolsProblem, PoolsResult
from services.contracts.queries import PageQuery
from services.contracts.schema import Instant, Message, Name, Real
from services.contracts.solver import SolveOptions, SolveOutcome
from services.core.domain.carbon import CarbonCurve, Signal

MAX_STEPS = 20_000
MAX_WORK = 20_000
MAX_CELLS = 500_000
"""Most pairs of a class of work and a step of its window: the variables of a carbon bound."""


def _storable(value: datetime | None) -> datetime | None:
    if value is not None and not 1970 <= value.year <= 9_000:
        raise ValueError("must lie between the years 1970 and 9000")
    return value


class WorkClass(Message):
    """Work of one kind: jobs that draw the same power and may run in the same window."""

    name: Name = "work"
    gpu_hours: Real = Field(gt=0, le=1e9)
    power_w: Real = Field(ge=0, le=1e6, description="Of one GPU at work, with whatever of the host goes with it.")
    release_at: Instant | None = Field(default=None, description="Not before; null for the horizon's beginning.")
    deadline_at: Instant | None = Field(default=None, description="Done by; null for the horizon's end.")
    max_gpus: Real | None = Field(default=None, gt=0, le=1e7, description="At most so many at once.")

    _window = field_validator("release_at", "deadline_at")(_storable)

    @model_validator(mode="after")
    def _window_is_open(self) -> Self:
        if self.release_at and self.deadline_at and self.release_at >= self.deadline_at:
            raise ValueError("deadline_at is not after release_at")
        return self


class IntensitySeries(Message):
    """The grid over a horizon: contiguous steps, as the carbon service's histories and forecasts list them."""

    signal: Signal
    points: list[IntensityPoint] = Field(min_length=1, max_length=MAX_STEPS)

    @field_validator("points")
    @classmethod
    def _contiguous(cls, points: list[IntensityPoint]) -> list[IntensityPoint]:
        for index, point in enumerate(points):
            if _storable(point.start_at) and _storable(point.end_at) and point.end_at <= point.start_at:
                raise ValueError(f"point {index} does not end after it begins")
            if index and point.start_at != points[index - 1].end_at:
                raise ValueError(f"point {index} does not begin where point {index - 1} ends")
            if abs(point.gco2_per_kwh) > 1e6:
                raise ValueError(f"point {index} has an intensity beyond 1000000 gCO2/kWh")
        return points

    def as_curve(self) -> CarbonCurve:
        """Return the steps in UTC seconds."""
        return curve_of(self.points)


class _CarbonBoundTerms(SolveOptions):
    capacity_gpus: Real | None = Field(default=None, ge=0, le=1e7, description="GPUs there are.")
    capacity_gpus_by_step: list[Annotated[Real, Field(ge=0, le=1e7)]] | None = Field(
        default=None, description="Instead of `capacity_gpus`: one number for each of `intensity.points`."
    )
    work: list[WorkClass] = Field(min_length=1, max_length=MAX_WORK)
    pue: Real = Field(default=1, ge=1, le=10, description="Power usage effectiveness of the site.")


class CarbonBoundRequest(_CarbonBoundTerms):
    """The least carbon any schedule of `work` could reach on so many GPUs, knowing the grid in advance.

    Either `intensity` says what the grid emits, or `zone` and `horizon_h` have it forecast; then the horizon begins
    with the forecast's step in force.
    """

    intensity: IntensitySeries | None = None
    zone: Name | None = None
    signal: Signal | None = Field(default=None, description="With `zone`; default: the installation's own.")
    horizon_h: Real = Field(default=24, gt=0, le=168, description="With `zone`.")
    clock: Clock = Field(default="real", description="With `zone`: whose hours `horizon_h` counts.")
    idle_power_w: Real | None = Field(
        default=None, ge=0, le=1e6, description="Of a GPU nobody uses; 0 where idle nodes are powered down."
    )
    idle_power_fraction: Real | None = Field(
        default=None, ge=0, le=1, description="Instead of `idle_power_w`: share of the mean power of the work's GPUs."
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
        """Watts of a GPU nobody uses."""
        if self.idle_power_fraction is not None:
            gpu_hours = sum(item.gpu_hours for item in self.work)
            return self.idle_power_fraction * sum(item.gpu_hours * item.power_w for item in self.work) / gpu_hours
        return self.idle_power_w or 0.0


class IntensitySource(Message):
    """Where a forecast intensity came from."""

    zone: str
    provider: str
    method: str
    generated_at: Instant
    is_stale: bool


class CarbonBoundProblem(_CarbonBoundTerms):
    """A carbon bound as it is solved: nothing left to look up."""

    kind: Literal["carbon-bound"] = "carbon-bound"
    intensity: IntensitySeries
    idle_power_w: float
    source: IntensitySource | None = Field(default=None, description="Null where the caller gave the intensity.")


class ClassSchedule(Message):
    """When one class of work runs in a schedule that reaches the bound."""

    name: str
    first_step: int = Field(description="Index into the problem's `intensity.points`.")
    gpu_hours: list[float] = Field(description="Of that step and those after it.")
    shortfall_gpu_hours: float = Field(default=0, description="Work that no schedule can do together with the rest.")


class CarbonBoundResult(SolveOutcome):
    """A carbon bound. `infeasible` comes with the least shortfall and a schedule of what can be done."""

    kind: Literal["carbon-bound"] = "carbon-bound"
    carbon_gco2: float | None = Field(description="The least carbon, idle GPUs and PUE included.")
    busy_energy_kwh: float | None
    idle_energy_kwh: float | None
    schedule: list[ClassSchedule]


Problem = Annotated[CarbonBoundProblem | PoolsProblem, Field(discriminator="kind")]
Result = Annotated[CarbonBoundResult | PoolsResult, Field(discriminator="kind")]


class SolveSummary(Message):
    """A solve, without its problem and its schedule."""

    id: str
    kind: str
    tenant_id: str
    state: WorkState
    submitted_at: Instant
    started_at: Instant | None = Field(default=None, description="When a worker last took it up.")
    ended_at: Instant | None = None
    attempts: int = Field(default=0, description="How often a worker took it up; more than once after a crash.")
    solve_s: float | None = Field(default=None, description="Wall time of the solve itself.")
    outcome: SolveOutcome | None = None
    failure: WorkFailure | None = None


class Solve(SolveSummary):
    """A solve, whole."""

    problem: Problem
    result: Result | None = None


class SolveList(Message):
    """One page of solves, newest first."""

    items: list[SolveSummary]
    next_cursor: str | None = None


class SolveQuery(PageQuery):
    """Which solves to list, newest first."""

    state: list[WorkState] = Field(default_factory=list[WorkState], description="Any of these states; repeatable.")
    kind: Name | None = None
    tenant: Name | None = Field(default=None, description="Operators: only this tenant's. Users see their own.")
