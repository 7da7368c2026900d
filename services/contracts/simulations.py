"""Simulations: requests to the simulator, with the options of `wattshift simulate training`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.background import WorkFailure, WorkState
from services.contracts.grid import LONGEST_S
from services.contracts.queries import PageQuery
from services.contracts.schema import (
    LEAST,
    Flag,
    Instant,
    Int,
    Message,
    Name,
    Page,
    Positive,
    Real,
    Text,
    many,
    maybe,
    said,
)

MAX_POLICIES = 50
HISTORY = "history"
LIVE = "live"
"""The present queue, nodes and forecast; a format of files, too, but not one that requests may name."""
_NOT_WITH_LIVE = ("cluster", "start", "days", "recipe", "signal", "forecast", "predictor", "round_minutes")
FILE_OPTIONS = ("jobs", "carbon", "forecast")

Words = Annotated[Text, StringConstraints(min_length=1, max_length=1_000)]
Word = Annotated[Text, StringConstraints(min_length=1, max_length=200)]


class InlineFile(Message):
    """A file in the request, either as `text` or compressed as `gzip_base64`."""

    name: Name = "inline"
    text: Text | None = None
    gzip_base64: str | None = Field(default=None, pattern=r"^[A-Za-z0-9+/]*={0,2}$")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.text is None) == (self.gzip_base64 is None):
            raise ValueError("give either text or gzip_base64")
        return self


class StoredFile(Message):
    """A file from a request, stored under the hash of its content."""

    name: str
    sha256: str
    size: int = said("Size in bytes, uncompressed.")


class GridOrderAhead(Message):
    """An order of the grid in simulated time."""

    start_at: Instant
    duration_s: Real = Field(ge=LEAST, le=LONGEST_S)
    cut: Real | None = maybe("Share of what is drawn before it.", ge=LEAST, le=1)
    to_w: Real | None = maybe("The most that may be drawn, watts.", ge=0, le=1e12)
    notice_s: Real = said("How long before its start the cluster may prepare.", default=0.0, ge=0, le=LONGEST_S)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.cut is None) == (self.to_w is None):
            raise ValueError("give either cut or to_w")
        return self


class TrainingOptions(Message):
    """The options of `wattshift simulate training` that are not files."""

    policy: Word | Annotated[list[Word], Field(min_length=1, max_length=MAX_POLICIES)] = said(
        "One policy, or several as a list or separated by commas."
    )
    cluster: Words = said(
        "`NODESxGPUS:MODEL[SLICES]`, several separated by commas; `ZONE=` before one says its grid.",
        default="32x2:RTX3090",
    )
    format: Word | None = maybe("Format of the job file; by default recognised by its header.")
    recipe: Word | None = maybe("How jobs behave; by default the recipe of the trace.")
    start: Word | None = maybe("UTC date at which simulated time begins.")
    days: Real | None = maybe("Simulate only jobs submitted within this many days.", ge=LEAST, le=36_600)
    seed: Int = said("The same input and the same seed give the same results.", default=1, ge=0, lt=2**63)
    params: dict[Word, Any] = said(
        "Policy parameters by name, or by `POLICY.name` if there are several policies.",
        default_factory=dict[Word, Any],
        max_length=100,
    )
    signal: Word = said("Which intensity: `direct`, `lifecycle` or `marginal`.", default="direct")
    round_minutes: Real = said("Time between active rounds.", default=30, ge=0.001, le=100_000)
    passive_interval_s: Real = said("Minimum time between passive rounds.", default=0, ge=0, le=1e7)
    power_down_minutes: Real | None = maybe(
        "Power down nodes that have been idle for this long; by default never.", ge=LEAST, le=1e6
    )
    node_mtbf_days: Real | None = maybe(
        "Mean time between failures of a node; by default nodes do not fail.", ge=0.001, le=1e6
    )
    host_idle_w: Real = said("Power of the host per idle GPU, in watts.", default=30, ge=0, le=1e5)
    horizon_hours: Real = said("How far ahead policies know the carbon intensity.", default=48, ge=LEAST, le=10_000)
    placement: Word = said(
        "`consolidated`, `buddy`, `first-fit`, `heavy-edge` or `refined`; for policies that do not place "
        "jobs themselves.",
        default="consolidated",
    )
    topology: str = said(
        "Levels of the network, as the file of `PUT /v1/topology`; the nodes are n0, n1 and so on, in the order of "
        "`cluster`.",
        default="",
        max_length=1_000_000,
    )
    within: Word | None = maybe("Level in one domain of which every gang must lie, such as `rack`.")
    predictor: Word = said(
        "How job lengths are predicted: `perfect`; `none`, for policies that learn them from the jobs' own "
        "progress; or `forest`, `mean`, `median`, `mean-of-all` or "
        "`median-of-all`, learned from jobs that have ended.",
        default="perfect",
    )

    batch_tuning: Literal["all", "half", "none"] = said(
        "Which jobs' batch size may follow the gang, under policies that use it; half of them are drawn by the seed.",
        default="all",
    )

    tenant_guarantees: dict[Word, Annotated[Int, Field(ge=0)]] = said(
        "GPUs that tenants of the trace are guaranteed.", default_factory=dict[str, int], max_length=10_000
    )
    tenant_weights: dict[Word, Positive] = said(
        "The weight of each tenant of the trace in sharing the GPUs with others, under policies that "
        "share between tenants (`fair+` before a policy's name); 1 where none is given.",
        default_factory=dict[str, float],
        max_length=10_000,
    )

    orders: list[GridOrderAhead] = many(
        "Orders of the grid to the whole cluster, which the policies have to meet.", max_length=1_000
    )

    levers: Flag = said(
        "Instead of the policy's results, say what each of its levers saves: the jobs are replayed under "
        "`fifo`, then under the policy with one lever more each time. One policy, and not with jobs `live`.",
        default=False,
    )

    @field_validator("policy")
    @classmethod
    def _split(cls, value: str | list[str]) -> list[str]:
        names = [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]
        if not any(names):
            raise ValueError("must name a policy")
        return [name for name in names if name]

    @property
    def policies(self) -> list[str]:
        """The policies to compare, in order."""
        return [self.policy] if isinstance(self.policy, str) else self.policy


class TrainingRequest(TrainingOptions):
    """Asks what policies would have done with past jobs."""

    jobs: Word | InlineFile = said(
        "A bundled trace (`green-year`, `green-day`), a file, or `history` for the jobs that ran on this "
        "cluster, or `live` (for operators) for those that wait and run on it now."
    )
    carbon: Word | InlineFile = said(
        "A bundled zone (`SE`, `GB`, `PL`, `US-CAL-CISO`, `CA-ON`) or a file; with `history`, any zone of "
        "`/v1/carbon/zones`, with its measured intensities; with `live` also `live`."
    )
    forecast: Literal["perfect", "persistence", "issued"] | InlineFile = said(
        "The forecasts that policies get. `issued` stands for the recorded forecasts of bundled zones; a "
        "file holds other recorded ones.",
        default="perfect",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.jobs == HISTORY and (self.start is None or self.days is None):
            raise ValueError("jobs 'history' needs start and days")
        if self.jobs == HISTORY and self.format is not None:
            raise ValueError("format goes with a file")
        if (self.jobs == LIVE) != (self.carbon == LIVE):
            raise ValueError("jobs 'live' and carbon 'live' go together")
        if self.format == LIVE:
            raise ValueError("format 'live' is no format of a file")
        if self.jobs == LIVE and (given := [name for name in _NOT_WITH_LIVE if name in self.model_fields_set]):
            raise ValueError(f"{given[0]} does not go with jobs 'live', which have their own")
        return self


class TrainingProblem(TrainingOptions):
    """A simulation with all its inputs resolved."""

    jobs: str | StoredFile
    carbon: str | StoredFile
    forecast: str | StoredFile


class SimulationProgress(Message):
    """Progress of a simulation."""

    done: int = said("Jobs that have ended in simulated time, summed over policies.")
    total: int = said("Number of jobs times number of policies.")


class SimulationSummary(Message):
    """A simulation without its inputs and its result."""

    id: str
    tenant_id: str
    status: WorkState
    policies: list[str]
    submitted_at: Instant
    started_at: Instant | None = maybe("When a worker last started it.")
    ended_at: Instant | None = None
    attempts: int = said("How often a worker started it; more than once after a crash.", default=0)
    progress: SimulationProgress
    run_s: float | None = maybe("Wall-clock time of the simulation.")
    failure: WorkFailure | None = None


class Simulation(SimulationSummary):
    """A simulation with its inputs and its result."""

    request: TrainingProblem
    result: dict[str, Any] | list[dict[str, Any]] | None = maybe(
        "What `wattshift simulate training --json` prints: an object, or a list of objects for several "
        "policies. Of jobs `live`, an object with `job_ids`, and per policy the start, end and emissions of each job."
    )


class SimulationList(Page[SimulationSummary]):
    """One page of simulations, newest first."""


class SimulationQuery(PageQuery):
    """Which simulations to list, newest first."""

    status: list[WorkState] = many("Simulations in any of these states; repeatable.")
    tenant: Name | None = maybe("For operators: only this tenant's. Users always see only their own.")
