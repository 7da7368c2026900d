"""What-if runs: what may be asked of the simulator, in the words of `wattshift simulate training`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.background import WorkFailure, WorkState
from services.contracts.queries import PageQuery
from services.contracts.schema import Instant, Int, Message, Name, Real, Text

MAX_POLICIES = 20
HISTORY = "history"
FILE_OPTIONS = ("jobs", "carbon", "forecast")

Words = Annotated[Text, StringConstraints(min_length=1, max_length=1_000)]
Word = Annotated[Text, StringConstraints(min_length=1, max_length=200)]


class InlineFile(Message):
    """A file in the request: as `text`, or as `gzip_base64` of the same."""

    name: Name = "inline"
    text: Text | None = None
    gzip_base64: str | None = Field(default=None, pattern=r"^[A-Za-z0-9+/]*={0,2}$")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.text is None) == (self.gzip_base64 is None):
            raise ValueError("give either text or gzip_base64")
        return self


class StoredFile(Message):
    """A file that was in a request, kept by its content."""

    name: str
    sha256: str
    size: int = Field(description="Bytes, unpacked.")


class TrainingOptions(Message):
    """The options of `wattshift simulate training` that name no file."""

    policy: Word | Annotated[list[Word], Field(min_length=1, max_length=MAX_POLICIES)] = Field(
        description="One policy, or several: a list, or with commas between."
    )
    cluster: Words = Field(default="32x2:RTX3090", description="`NODESxGPUS:MODEL`, several separated by commas.")
    format: Word | None = Field(default=None, description="Of the job file; by its header if not given.")
    recipe: Word | None = Field(default=None, description="How jobs behave; the trace's own if not given.")
    start: Word | None = Field(default=None, description="Where simulated time begins: a date, UTC.")
    days: Real | None = Field(default=None, gt=0, le=36_600, description="Only jobs submitted within so many days.")
    seed: Int = Field(default=1, ge=0, lt=2**63, description="Equal input and equal seed give equal results.")
    params: dict[Word, Any] = Field(
        default_factory=dict[Word, Any],
        max_length=100,
        description="Policy parameters by name; `POLICY.name` for one of several policies.",
    )
    signal: Word = Field(default="direct", description="`direct`, `lifecycle` or `marginal` intensity.")
    round_minutes: Real = Field(default=30, gt=0, le=100_000, description="Between active rounds.")
    passive_interval_s: Real = Field(default=0, ge=0, le=1e7, description="Least time between passive rounds.")
    power_down_minutes: Real | None = Field(
        default=None, gt=0, le=1e6, description="Switch nodes off that were idle for so long; never if not given."
    )
    node_mtbf_days: Real | None = Field(
        default=None, gt=0, le=1e6, description="Mean time between failures of a node; none if not given."
    )
    host_idle_w: Real = Field(default=30, ge=0, le=1e5, description="Host draw per idle GPU, watts.")
    horizon_hours: Real = Field(default=48, gt=0, le=10_000, description="How far ahead policies see the grid.")
    placement: Word = Field(
        default="consolidated", description="Or `buddy`, `heavy-edge`, `refined`; for policies that do not place."
    )
    predictor: Word = Field(
        default="perfect",
        description="Of jobs' lengths: `perfect`, or of recurring jobs `forest`, `mean`, `median`, `mean-of-all`, "
        "`median-of-all`, learned from those that have ended.",
    )

    @field_validator("policy")
    @classmethod
    def _split(cls, value: str | list[str]) -> list[str]:
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @property
    def policies(self) -> list[str]:
        """The policies to compare, in order."""
        return [self.policy] if isinstance(self.policy, str) else self.policy


class TrainingRequest(TrainingOptions):
    """What policies would have done with past jobs."""

    jobs: Word | InlineFile = Field(
        description="A bundled trace (`green-year`, `green-day`), a file, or `history`: the jobs that ran here."
    )
    carbon: Word | InlineFile = Field(
        description="A bundled zone (`SE`, `GB`, `PL`, `US-CAL-CISO`, `CA-ON`) or a file; with `history` any zone of "
        "`/v1/carbon/zones`, as it was measured."
    )
    forecast: Literal["perfect", "persistence", "issued"] | InlineFile = Field(
        default="perfect",
        description="What policies are told of the hours ahead. `issued`: of bundled zones; or a file of such.",
    )

    @model_validator(mode="after")
    def _history_says_when(self) -> Self:
        if self.jobs == HISTORY and (self.start is None or self.days is None):
            raise ValueError("jobs 'history' needs start and days")
        if self.jobs == HISTORY and self.format is not None:
            raise ValueError("format goes with a file")
        return self


class TrainingProblem(TrainingOptions):
    """A what-if run as it is simulated: nothing left to look up."""

    jobs: str | StoredFile
    carbon: str | StoredFile
    forecast: str | StoredFile


class SimulationProgress(Message):
    """How far a run is."""

    done: int = Field(description="Jobs that have ended in simulated time, over all policies.")
    total: int = Field(description="Jobs times policies.")


class SimulationSummary(Message):
    """A what-if run, without its inputs and its result."""

    id: str
    tenant_id: str
    status: WorkState
    policies: list[str]
    submitted_at: Instant
    started_at: Instant | None = Field(default=None, description="When a worker last took it up.")
    ended_at: Instant | None = None
    attempts: int = Field(default=0, description="How often a worker took it up; more than once after a crash.")
    progress: SimulationProgress
    run_s: float | None = Field(default=None, description="Wall time of the run itself.")
    failure: WorkFailure | None = None


class Simulation(SimulationSummary):
    """A what-if run, whole."""

    request: TrainingProblem
    result: dict[str, Any] | list[dict[str, Any]] | None = Field(
        default=None, description="What `wattshift simulate training --json` prints: one object, or a list of several."
    )


class SimulationList(Message):
    """One page of what-if runs, newest first."""

    items: list[SimulationSummary]
    next_cursor: str | None = None


class SimulationQuery(PageQuery):
    """Which what-if runs to list, newest first."""

    status: list[WorkState] = Field(default_factory=list[WorkState], description="Any of these; repeatable.")
    tenant: Name | None = Field(default=None, description="Operators: only this tenant's. Users see their own.")
